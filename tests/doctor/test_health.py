import importlib.metadata
import platform
import shutil
import socket
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from approx.doctor import health

ROOT = Path(__file__).resolve().parents[2]


def test_requires_the_versions_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    declared = {r.name: r.specifier for r in map(Requirement, declared)}
    assert {name: declared[name] for name in health._RANGES} == {
        name: SpecifierSet(allowed) for name, allowed in health._RANGES.items()
    }


def test_this_machine_is_usable_without_a_hub():
    findings = {finding.what: finding for finding in health.examine(offline=True)}
    assert {"python", "torch", "transformers", "gpu", "triton", "processor", "hub cache"} <= findings.keys()
    assert "hub" not in findings
    assert {finding.state for finding in findings.values()} <= {"ok", "missing"}
    assert findings["python"] == health.Finding("python", "ok", platform.python_version())
    assert "hub" in {finding.what for finding in health.examine(offline=False)}


def test_a_python_that_is_too_old_is_broken(monkeypatch):
    monkeypatch.setattr(health.sys, "version_info", (3, 10, 9))
    assert health.examine(offline=True)[0].state == "broken"


def test_missing_optional_parts_say_what_they_are_for(monkeypatch):
    monkeypatch.setattr(health.torch.cuda, "is_available", lambda: False)
    assert health._gpu() == health.Finding(
        "gpu",
        "missing",
        f"none: {'this build of torch is CPU-only' if torch.version.cuda is None else 'torch sees no CUDA device'}",
    )
    monkeypatch.setattr(health.shutil, "which", lambda name: None)
    assert (health._compiler().what, health._compiler().state) == ("c++ compiler", "missing")
    monkeypatch.setattr(health.importlib.util, "find_spec", lambda name: None)
    assert (health._triton().what, health._triton().state) == ("triton", "missing")
    monkeypatch.setattr(health, "compiler_obstacle", lambda: "install gcc, or ask for 'auto'.")
    expected = "none that works, so mechanisms are slower on the CPU: install gcc."
    assert health._c_compiler() == health.Finding("c compiler", "missing", expected)


def test_present_parts_are_shown_with_path_or_version(monkeypatch):
    monkeypatch.setattr(health.shutil, "which", lambda name: f"/bin/{name}" if name == "clang++" else None)
    assert health._compiler() == health.Finding("c++ compiler", "ok", "/bin/clang++")
    monkeypatch.setattr(health, "compiler_obstacle", lambda: None)
    monkeypatch.setattr(health, "find_compiler", lambda: ("/bin/cc", []))
    assert health._c_compiler() == health.Finding("c compiler", "ok", "/bin/cc; APPROX_COMPILE_C=0 turns C off")


@pytest.mark.parametrize(("token", "expected"), [("hf_canary", "a token is set"), (None, "no token (hf auth login)")])
def test_a_reachable_hub_is_shown_with_the_state_of_the_token(monkeypatch, token, expected):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    monkeypatch.setattr(health, "reachable", lambda endpoint: endpoint == "https://hub")
    assert health._hub() == health.Finding("hub", "ok", f"https://hub, {expected}")


def test_checks_where_a_missing_cache_would_be_made(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "there"))
    cache = health._data()
    assert (cache.what, cache.state) == ("hub cache", "ok")
    assert cache.found.startswith(f"{tmp_path}/not/there, ")
    free = shutil.disk_usage(tmp_path).free / 1e9
    assert float(cache.found.removesuffix(" GB free").rpartition(" ")[2]) == pytest.approx(free, abs=2)


def test_one_core_is_singular(monkeypatch):
    monkeypatch.setattr(health.os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(health.torch, "get_num_threads", lambda: 2)
    assert health._processor().found.startswith("1 core, 2 threads, ")


@pytest.mark.parametrize("version", ["1.0", None])
def test_a_wrong_or_missing_package_is_broken_and_names_the_command(monkeypatch, version):
    def fake(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", fake)
    finding = health._package("torch", ">=2.10")
    assert finding.state == "broken"
    assert "pip install 'torch>=2.10'" in finding.found


def test_an_unreachable_hub_is_missing(monkeypatch):
    from huggingface_hub import constants

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    finding = health._hub()
    assert (finding.state, finding.found) == ("missing", f"{endpoint} cannot be reached: use local folders and --data")


def test_shows_offline_mode(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in health._hub().found


def test_a_cache_that_cannot_be_written_is_broken(monkeypatch):
    monkeypatch.setattr(health.os, "access", lambda *_: False)
    finding = health._data()
    assert finding.state == "broken"
    assert "HF_HOME" in finding.found
