"""What probes found is kept for other processes, and believed as long as it holds."""

import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from approx_kernels import findings


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(findings, "_known", {})
    monkeypatch.setattr(findings, "crowded", lambda: False)


def test_what_another_process_has_found_since_is_not_measured_again(monkeypatch):
    findings.find("cpu", "a thing", lambda: {"way": "x"})
    here = dict(findings._known)
    monkeypatch.setattr(findings, "_known", {})
    findings.find("cpu", "another thing", lambda: {"way": "y"})
    monkeypatch.setattr(findings, "_known", here)
    assert findings.find("cpu", "another thing", pytest.fail) == {"way": "y"}
    assert findings.find("cpu", "a thing", pytest.fail) == {"way": "x"}


def test_findings_reach_the_next_process_until_they_are_forgotten(monkeypatch):
    findings.find("cpu", "a thing", lambda: {"way": "x"})
    monkeypatch.setattr(findings, "_known", {})
    assert findings.find("cpu", "a thing", pytest.fail) == {"way": "x"}
    monkeypatch.setattr(findings, "machine", lambda device: "another machine")
    assert findings.find("cpu", "a thing", lambda: {"way": "y"}) == {"way": "y"}
    findings.forget()
    assert not findings.file().exists()
    assert findings.find("cpu", "a thing", lambda: {"way": "z"}) == {"way": "z"}


def test_what_was_found_on_a_crowded_machine_holds_while_it_is_crowded(monkeypatch):
    findings.find("cpu", "a thing", lambda: {"way": "x", "crowded": True})
    for busy in (True, False):
        monkeypatch.setattr(findings, "_known", {})
        monkeypatch.setattr(findings, "crowded", lambda busy=busy: busy)
        assert ("a thing" in findings.found("cpu")) == busy


def test_what_is_handed_over_is_believed_whether_or_not_the_machine_is_crowded(monkeypatch, tmp_path):
    findings.find("cpu", "a thing", lambda: {"way": "x", "crowded": True})
    findings.hand_over(tmp_path)
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    monkeypatch.setattr(findings, "_known", {})
    assert findings.find("cpu", "a thing", pytest.fail) == {"way": "x"}


def test_a_crowded_machine_is_measured_on_one_thread(monkeypatch):
    monkeypatch.setattr(findings, "crowded", lambda: True)
    torch.set_num_threads(2)
    try:
        with findings.clock() as now:
            assert (torch.get_num_threads(), now) == (1, time.thread_time)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_counter_counts_the_same_whether_or_not_something_is_measured():
    def counted() -> int:
        with FlopCounterMode(display=False) as counter:
            findings.find("cpu", "a thing", lambda: {"way": str(torch.mm(torch.ones(5, 5), torch.ones(5, 5)).shape)})
            torch.mm(torch.ones(2, 3), torch.ones(3, 4))
        return counter.get_total_flops()

    assert findings.found("cpu") == {}
    assert counted() == 48
    assert findings.found("cpu").keys() == {"a thing"}
    assert counted() == 48


def test_nothing_is_measured_of_fake_tensors():
    with FakeTensorMode():
        assert findings.find("cpu", "a thing", pytest.fail, otherwise={"way": "x"}) == {"way": "x"}
    assert findings.found("cpu") == {}
    found = findings.find("cpu", "a thing", lambda: {"way": "y"}, otherwise={"way": "x"})
    with FakeTensorMode():
        assert findings.find("cpu", "a thing", pytest.fail, otherwise={"way": "x"}) == found == {"way": "y"}


@pytest.mark.parametrize("damaged", ["{", "[]", '{"x": 3}', '{"x": {"y": 3}}', "\0"])
def test_a_damaged_file_is_measured_anew_and_replaced(monkeypatch, damaged):
    findings.file().parent.mkdir()
    findings.file().write_text(damaged)
    assert findings.find("cpu", "a thing", lambda: {"way": "x"}) == {"way": "x"}
    monkeypatch.setattr(findings, "_known", {})
    assert findings.find("cpu", "a thing", pytest.fail) == {"way": "x"}


def test_a_folder_that_cannot_be_written_only_costs_the_next_process_a_probe(tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    assert findings.find("cpu", "a thing", lambda: {"way": "x"}) == {"way": "x"}
    assert findings.find("cpu", "a thing", pytest.fail) == {"way": "x"}
