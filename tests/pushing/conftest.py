"""Converted folders, records of them, and hubs: one in this process, and the one at APPROX_TEST_HUB_ENDPOINT."""

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.utils import _http

from approx import api
from approx.conversion import convert
from approx.evaluation import record
from approx.planning.plan import Plan, Rule
from hub_server import serve
from hub_state import Hub
from tiny_study import tiny_checkpoint, tiny_data

HOME = "/home"
TOKEN = "hf_canary0123456789abcdefghijklmnopq"
PLAN = Plan((Rule("local", "0", {"left": 2, "right": 2}),))


@dataclass
class Place:
    """A repository of a hub that exists only for one test."""

    repo: str

    def files(self, revision: str = "main") -> list[str]:
        return HfApi().list_repo_files(self.repo, revision=revision)

    def read(self, name: str, revision: str = "main") -> str:
        return Path(hf_hub_download(self.repo, name, revision=revision)).read_text("utf-8")

    def write(self, name: str, text: str) -> None:
        HfApi().upload_file(path_or_fileobj=text.encode(), path_in_repo=name, repo_id=self.repo)


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pushed")
    base = tiny_checkpoint(folder / "base")
    (base / "README.md").write_text("---\nlicense: mit\nlanguage: en\nbase_model: owner/first\n---\nText\n")
    convert.convert(base, folder / "converted", PLAN)
    return folder / "converted"


@pytest.fixture(scope="session")
def other(converted, tmp_path_factory) -> Path:
    """The same base with another mechanism, whose code is in other files."""
    folder = tmp_path_factory.mktemp("other") / "converted"
    convert.convert(converted.parent / "base", folder, Plan((Rule("linear", "1"),)))
    return folder


@pytest.fixture(scope="session")
def records(converted, tmp_path_factory) -> list[Path]:
    """The quality and the speed of the folder, as the commands measure and save them."""
    folder = tmp_path_factory.mktemp("records")
    typed = f"approx evaluate {converted} --data {HOME}/ada/SST-2"
    data = str(tiny_data(folder / "home"))
    quality = api.evaluate(str(converted), "glue/sst2", data=data, fresh=True, command=typed)
    speed = api.bench(str(converted), [8, 16], rounds=3, seconds=0, command=typed)
    for name, made in (("quality", quality), ("speed", speed)):
        record.save(folder / f"{name}.json", made)
    return [folder / "quality.json", folder / "speed.json"]


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Point the client at a hub, with an empty cache and without waiting between attempts."""

    def set_to(endpoint: str, token: str | None = TOKEN) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)

    return set_to


@pytest.fixture
def hub(at, monkeypatch):
    """The hub in this process, which has no Xet storage."""
    made = Hub(tokens={TOKEN: ("ada", "write"), "hf_reader0123456789abcdefghijklmn": ("ada", "read")})
    server = serve(made)
    at(made.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # Not the module: the hub itself waits too.
    monkeypatch.setattr(
        _http, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time, monotonic=time.monotonic)
    )
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["here", pytest.param("real", marks=pytest.mark.network)])
def place(request, at):
    """A new name of a repository, at the hub in this process and at a real one."""
    if request.param == "here":
        request.getfixturevalue("hub")
        yield Place("ada/my-model")
        return
    endpoint, token = (os.environ.get(f"APPROX_TEST_HUB_{name}") for name in ("ENDPOINT", "TOKEN"))
    if not endpoint or not token:
        pytest.skip("APPROX_TEST_HUB_ENDPOINT and APPROX_TEST_HUB_TOKEN name no hub")
    at(endpoint.rstrip("/"), token)
    made = Place(f"{HfApi().whoami()['name']}/approx-test-{uuid.uuid4().hex[:12]}")
    yield made
    HfApi().delete_repo(made.repo, missing_ok=True)
