"""Pushes that a hub refuses or fails, that break off, or are killed: one line that says what to do, and a second run completes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from approx import api
from approx.errors import ApproxError, Exit
from hub_state import Fault

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTS = {
    "the token is not valid": (Fault("whoami", 401), Exit.UNAVAILABLE, ["does not accept the token", "hf auth login"]),
    "no access": (
        Fault("POST .*/create$", 403, message="You don't have the rights"),
        Exit.UNAVAILABLE,
        ["may not write to ada/m (You don't have the rights)", "--create-pr"],
    ),
    "no access to commit": (Fault("/commit/", 403, message="Forbidden"), Exit.UNAVAILABLE, ["may not write to ada/m"]),
    "not found": (Fault("/preupload/", 404, "RepoNotFound"), Exit.UNAVAILABLE, ["ada/m was not found", "the token"]),
    "conflict": (Fault("/commit/", 409, message="Conflict"), Exit.REFUSED, ["ada/m changed while this push ran"]),
    "quota": (
        Fault("/commit/", 403, message="Private repository storage limit reached"),
        Exit.UNAVAILABLE,
        ["no room for these files (Private repository storage limit reached)"],
    ),
    "too large": (Fault("PUT /lfs", 413), Exit.UNAVAILABLE, ["no room for these files"]),
    "too many calls": (Fault("/commit/", 429, message="Slow down"), Exit.UNAVAILABLE, ["(429)", "Wait some minutes"]),
    "a fault of the server": (
        Fault("/lfs/objects/batch", 500),
        Exit.UNAVAILABLE,
        ["failed with 500", "not uploaded twice"],
    ),
    "an upload is cut": (
        Fault("PUT /lfs"),
        Exit.UNAVAILABLE,
        ["cannot be reached or breaks off", "not uploaded twice"],
    ),
    "a download is cut": (
        Fault("GET .*/resolve/.*/model.safetensors"),
        Exit.UNAVAILABLE,
        ["Downloading what was pushed"],
    ),
    "gated": (
        Fault("GET /api/models/ada/m", 403, "GatedRepo"),
        Exit.UNAVAILABLE,
        ["ada/m is gated", "Accept its terms"],
    ),
    "the card is rejected": (Fault("validate-yaml", 400), Exit.VERIFICATION, ["rejects the model card"]),
}


@pytest.mark.parametrize(("fault", "code", "words"), FAULTS.values(), ids=FAULTS)
@pytest.mark.sample(1)
def test_reports_a_fault_in_one_line_and_a_second_run_completes_the_push(converted, hub, fault, code, words):
    hub.faults = [fault]
    with pytest.raises(ApproxError) as caught:
        api.push(converted, "ada/m")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == code
    for word in words:
        assert word in str(caught.value)
    hub.faults = []
    assert api.push(converted, "ada/m").check
    # What had arrived is not uploaded twice.
    assert len([call for call in hub.calls if call.startswith("PUT")]) <= 1 + 6 * ("PUT" in fault.where)


@pytest.mark.sample(0)
def test_waits_for_a_slow_hub_that_sometimes_fails(converted, hub):
    hub.faults = [
        Fault("preupload", 503, times=2),
        Fault("PUT /lfs", times=1),
        Fault("/tree/", 502, times=1),
        Fault("whoami", seconds=0.3),
    ]
    assert api.push(converted, "ada/m").uploaded


def test_the_next_run_recognises_a_commit_whose_answer_was_lost(converted, hub):
    hub.faults = [Fault("/commit/", after=True, times=1)]
    with pytest.raises(ApproxError, match="cannot be reached or breaks off"):
        api.push(converted, "ada/m")
    first = hub.repos["ada/m"].refs["main"]
    hub.calls.clear()
    done = api.push(converted, "ada/m")
    assert done.uploaded == ["README.md", "approx_manifest.json"]
    assert first.encode() in hub.repos["ada/m"].commits[done.commit]["README.md"]
    assert [call for call in hub.calls if call.startswith("PUT")] == []


@pytest.mark.sample(0)
def test_without_pull_requests_a_branch_is_offered(converted, other, hub):
    api.push(converted, "ada/m")
    hub.pull_requests = False
    with pytest.raises(ApproxError, match=r"takes no pull requests \(Discussions are disabled.*--revision") as caught:
        api.push(other, "ada/m", create_pr=True)
    assert caught.value.exit_code == Exit.UNSUPPORTED


def test_a_hub_without_xet_names_the_variable(converted, hub, monkeypatch):
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(ApproxError, match=r"has no Xet storage.*HF_HUB_DISABLE_XET=1"):
        api.push(converted, "ada/m")


def test_names_missing_token_network_and_offline_mode(converted, hub, at, monkeypatch):
    at(hub.endpoint, token=None)
    with pytest.raises(ApproxError, match=r"there is none.*hf auth login.*HF_TOKEN"):
        api.push(converted, "ada/m")
    at(hub.endpoint, token="hf_reader0123456789abcdefghijklmn")
    with pytest.raises(ApproxError, match=r"may not write to ada/m \(its role is 'read'\)"):
        api.push(converted, "ada/m")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    at(f"http://127.0.0.1:{port}")
    with pytest.raises(ApproxError, match=rf"http://127.0.0.1:{port} cannot be reached.*HF_ENDPOINT") as caught:
        api.push(converted, "ada/m")
    assert caught.value.exit_code == Exit.UNAVAILABLE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ApproxError, match="HF_HUB_OFFLINE is set"):
        api.push(converted, "ada/m")


@pytest.mark.slow
def test_a_push_that_is_killed_is_completed_by_the_next_and_shows_no_token(converted, hub, tmp_path):
    """Killed when the files are uploaded but not committed; then once more between the two commits."""
    token = os.environ["HF_TOKEN"]
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    command = [sys.executable, str(ROOT / "cli.py"), "push", str(converted), "ada/m", "--yes"]
    said = tmp_path / "said"
    for commits in (1, 2):
        # The last of these commits never gets its answer.
        hub.faults = [Fault("/commit/", seconds=0.01, times=commits - 1), Fault("/commit/", seconds=600.0)]
        hub.calls.clear()
        with said.open("a") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=tmp_path)
            deadline = time.monotonic() + 200
            while sum("/commit/" in call for call in hub.calls) < commits and time.monotonic() < deadline:
                assert process.poll() is None, said.read_text()
                assert token not in _command_lines()
                os.sched_yield()
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert sum("/commit/" in call for call in hub.calls) == commits
    hub.faults = []
    hub.calls.clear()
    done = api.push(converted, "ada/m")
    assert done.uploaded == ["README.md", "approx_manifest.json"]
    assert [call for call in hub.calls if call.startswith("PUT")] == []
    assert re.search(r'"revision": "\w{40}"', hub.repos["ada/m"].commits[done.commit]["README.md"].decode())
    assert token not in said.read_text()


def _command_lines() -> str:
    """The command lines of all processes."""
    lines = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(process.read_text("utf-8", "replace"))
        except OSError:
            continue
    return "\n".join(lines)
