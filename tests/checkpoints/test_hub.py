"""Downloads from a small local hub server that answers, denies access, fails or does not respond."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from approx.checkpoints import checkpoint
from approx.errors import ApproxError, Exit
from zoo import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    """Point the client at an address of this machine, with an empty cache."""

    def set_to(address):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(checkpoint, "_SECONDS", 0.5)

    return set_to


@pytest.fixture
def serve(endpoint):
    """Serve the files of a folder as the repository acme/tiny; paths under `failing` get a status and an error code."""
    servers = []

    def start(folder, failing):
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                status, code, body = 200, "", b""
                failed = next((reply for part, reply in failing.items() if part in self.path), None)
                if failed:
                    status, code = failed
                elif "/tree/" in self.path:
                    files = [(path.name, path.stat().st_size) for path in folder.iterdir()]
                    listing = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in files]
                    body = json.dumps(listing).encode()
                elif self.path.startswith("/api/"):
                    names = [{"rfilename": path.name} for path in folder.iterdir()]
                    body = json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": names, "tags": []}).encode()
                else:
                    body = (folder / self.path.rpartition("/")[2]).read_bytes()
                self.send_response(status)
                for name, value in {
                    "X-Repo-Commit": COMMIT,
                    "ETag": f'"{len(body)}"',
                    "Content-Length": str(len(body)),
                    "X-Error-Code": code,
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        endpoint(f"http://127.0.0.1:{server.server_address[1]}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    tiny("BertModel").save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    return folder


def test_a_model_is_downloaded_once_and_pinned_to_its_commit(repository, serve):
    serve(repository, {})
    opened = checkpoint.load("acme/tiny", revision="main")
    assert opened.source.revision == COMMIT
    assert type(opened.model).__name__ == "BertModel"
    assert not (opened.source.folder / "pytorch_model.bin").exists()
    serve(repository, {"/": (503, "")})
    assert checkpoint.locate("acme/tiny", revision=COMMIT).revision == COMMIT
    assert checkpoint.locate("acme/tiny", revision=COMMIT, offline=True).revision == COMMIT


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        ({"/api/": (404, "RepoNotFound")}, ["was not found, or you have no access", "hf auth login"]),
        ({"/api/": (401, "GatedRepo")}, ["was not found, or you have no access", "hf auth login"]),
        ({"/api/": (404, "RevisionNotFound")}, ["no revision 'v9'", "--revision"]),
        ({"/api/": (500, "")}, ["cannot be reached"]),
        ({"safetensors": (404, "EntryNotFound")}, ["could not be downloaded", "Try again"]),
    ],
    ids=["unknown", "gated", "revision", "server at fault", "file missing"],
)
@pytest.mark.sample(2)
def test_reports_refusals_of_the_hub(failing, words, repository, serve):
    serve(repository, failing)
    with pytest.raises(ApproxError) as caught:
        checkpoint.load("acme/tiny", revision="v9")
    assert caught.value.exit_code == Exit.UNAVAILABLE
    for word in words:
        assert word in str(caught.value)


def test_silent_network_times_out_soon(endpoint):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ApproxError, match="the hub cannot be reached"):
            checkpoint.load("acme/tiny")
        assert time.monotonic() - start < 5
