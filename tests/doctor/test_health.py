import importlib.metadata
import socket
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from approx.doctor import health

ROOT = Path(__file__).resolve().parents[2]


def test_the_versions_asked_for_are_those_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    declared = {r.name: r.specifier for r in map(Requirement, declared)}
    assert {name: declared[name] for name in health._RANGES} == {
        name: SpecifierSet(allowed) for name, allowed in health._RANGES.items()
    }


def test_this_machine_is_usable_without_a_hub():
    findings = {finding.what: finding for finding in health.examine(offline=True)}
    assert {"python", "torch", "transformers", "gpu", "triton", "processor", "hub cache"} <= findings.keys()
    assert "hub" not in findings
    assert [finding for finding in findings.values() if finding.state == "broken"] == []


def test_one_core_is_not_told_as_several(monkeypatch):
    monkeypatch.setattr(health.os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(health.torch, "get_num_threads", lambda: 2)
    assert health._processor().found.startswith("1 core, 2 threads, ")


@pytest.mark.parametrize("version", ["1.0", None])
def test_a_wrong_or_missing_package_is_broken_and_says_what_to_type(monkeypatch, version):
    def fake(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", fake)
    finding = health._package("torch", ">=2.10")
    assert finding.state == "broken"
    assert "pip install 'torch>=2.10'" in finding.found


def test_an_unreachable_hub_is_told_and_no_token_with_it(monkeypatch):
    from huggingface_hub import constants

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    finding = health._hub()
    assert (finding.state, finding.found) == ("missing", f"{endpoint} cannot be reached: use local folders and --data")


def test_offline_mode_is_told(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in health._hub().found


def test_a_cache_that_cannot_be_written_is_broken(monkeypatch):
    monkeypatch.setattr(health.os, "access", lambda *_: False)
    finding = health._data()
    assert finding.state == "broken"
    assert "HF_HOME" in finding.found
