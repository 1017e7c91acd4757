"""Findings of a probe are stored for other processes; reading them measures nothing."""

import json

import pytest

from approx_kernels.dispatch import findings


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(findings, "_known", {})


def another_process(monkeypatch):
    monkeypatch.setattr(findings, "_known", {})


def test_findings_reach_this_process_and_the_next_until_they_are_removed(monkeypatch):
    assert findings.found("cpu") == {}
    findings.keep("cpu", "a thing", {"way": "x"})
    assert findings.found("cpu") == {"a thing": {"way": "x"}}
    another_process(monkeypatch)
    assert findings.found("cpu") == {"a thing": {"way": "x"}}
    findings.forget()
    assert not findings.file().exists()
    assert findings.found("cpu") == {}


def test_can_keep_findings_of_other_subjects(monkeypatch):
    findings.keep("cpu", "a thing", {"way": "x"})
    findings.keep("cpu", "other things", {"way": "y"})
    findings.forget(but="other")
    for _ in range(2):
        assert findings.found("cpu") == {"other things": {"way": "y"}}
        another_process(monkeypatch)
    findings.forget(but="a thing")
    assert not findings.file().exists()


def test_findings_are_stored_per_machine(monkeypatch):
    findings.keep("cpu", "a thing", {"way": "x"})
    here = findings.machine("cpu")
    monkeypatch.setattr(findings, "machine", lambda device: "another machine")
    assert findings.found("cpu") == {}
    findings.keep("cpu", "a thing", {"way": "y"})
    stored = json.loads(findings.file().read_text("utf-8"))
    assert stored == {here: {"a thing": {"way": "x"}}, "another machine": {"a thing": {"way": "y"}}}


def test_merges_findings_of_several_processes(monkeypatch):
    findings.found("cpu")
    before = findings._known
    another_process(monkeypatch)
    findings.keep("cpu", "a thing", {"way": "x"})
    monkeypatch.setattr(findings, "_known", before)
    findings.keep("cpu", "another thing", {"way": "y"})
    another_process(monkeypatch)
    assert findings.found("cpu") == {"a thing": {"way": "x"}, "another thing": {"way": "y"}}


def test_findings_do_not_change_within_a_process(monkeypatch):
    assert findings.found("cpu") == {}
    known = findings._known
    another_process(monkeypatch)
    findings.keep("cpu", "a thing", {"way": "x"})
    monkeypatch.setattr(findings, "_known", known)
    assert findings.found("cpu") == {}


@pytest.mark.parametrize("damaged", ["{", "[]", '{"x": 3}', '{"x": {"y": 3}}', "\0"])
def test_ignores_and_replaces_a_damaged_file(monkeypatch, damaged):
    findings.file().parent.mkdir()
    findings.file().write_text(damaged)
    assert findings.found("cpu") == {}
    findings.keep("cpu", "a thing", {"way": "x"})
    another_process(monkeypatch)
    assert findings.found("cpu") == {"a thing": {"way": "x"}}


def test_unwritable_folder_is_an_error_and_leaves_no_files(tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    assert findings.found("cpu") == {}
    with pytest.raises(OSError, match="cache"):
        findings.keep("cpu", "a thing", {"way": "x"})
    assert findings.found("cpu") == {}
