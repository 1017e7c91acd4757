"""A hub that responds, even with an error, is used; one that does not respond is not."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from datasets import config as settings

from approx.errors import ApproxError, Exit
from approx.tasks import hub


class Refusing(BaseHTTPRequestHandler):
    """A hub that responds with 404 to everything."""

    def do_HEAD(self):
        self.send_error(404)

    def log_message(self, format, *args):
        """Do not log."""


@pytest.fixture
def endpoint():
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_counts_a_refusal_as_an_answer_but_not_a_closed_port(endpoint):
    assert hub.reachable(endpoint)
    assert not hub.reachable("http://127.0.0.1:9")


@pytest.mark.parametrize("streaming", [False, True])
def test_names_the_reason_that_the_hub_gives(endpoint, monkeypatch, tmp_path, streaming):
    monkeypatch.setattr(settings, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(settings, "HF_ENDPOINT", endpoint)
    with pytest.raises(ApproxError, match=r"The dataset a/b \(c, test\) could not be loaded: ") as caught:
        hub.load_rows("a/b", "c", "test", streaming=streaming)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    assert "cannot be reached" not in str(caught.value)
    assert "offline" not in str(caught.value)
    assert settings.HF_HUB_OFFLINE is False
