import os

import pytest
import torch

from approx.errors import ApproxError
from approx.pipeline import health, probing
from approx_kernels import findings
from approx_kernels.exact import probe, ways


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(findings, "_known", {})
    monkeypatch.setattr(findings, "crowded", lambda: False)
    monkeypatch.setattr(probing, "_LENGTHS", (512,))
    monkeypatch.setattr(probing, "_DTYPES", (torch.float32,))


def told() -> dict[str, tuple[str, str]]:
    return {f"{one.what} {one.found}".partition(":")[0]: (one.state, one.found) for one in health.examine(offline=True)}


def test_before_a_probe_the_doctor_says_how_to_start_one():
    state, text = told()["exact attention not measured yet"]
    assert state == "missing"
    assert "approx doctor --probe" in text


def test_a_probe_is_told_line_by_line_and_a_new_one_replaces_it(monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 0.0)
    seen = []
    probing.probe(lambda *where: seen.append(where))
    assert [(done, total) for _, done, total in seen] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    lines = told()
    for form in ("", ", causal", ", padded", ", few"):
        found = [line for what, line in lines.items() if what.endswith(f"512 keys{form}")]
        assert found
        assert found[0][0] == "ok"
        assert "error" in found[0][1]
    assert findings.file().exists()
    monkeypatch.setattr(
        probe, "find", lambda device, asked, *_, **__: findings.find(device, asked, lambda: {"way": "none"})
    )
    monkeypatch.setattr(probing, "fastest", lambda case: findings.find("cpu", "another thing", dict))
    probing.probe()
    assert not any("exact attention" in asked for asked in findings.found("cpu"))


def test_what_was_measured_beside_other_programs_is_marked_and_the_mark_explained():
    finding = {"way": "x", "milliseconds": {"x": 1.0, ways.DEFAULT: 2.0}, "errors": {"x": 1e-7}, "crowded": True}
    assert "other programs" not in " ".join(text for _, text in told().values())
    findings._known[findings.machine("cpu")]["exact attention, float32, 512 keys"] = finding
    assert "* was measured while other programs used the cores: when they are gone, measure anew" in " ".join(
        text for _, text in told().values()
    )


def test_a_probe_that_failed_is_told_with_the_remedy():
    findings.find("cpu", "exact attention, float32, 512 keys", lambda: {"failed": "out of memory"})
    state, text = told()["exact attention float32, 512 keys"]
    assert state == "missing"
    assert "the probe failed: out of memory. Mend that, then measure anew with `approx doctor --probe`" in text


@pytest.mark.skipif(os.name != "posix", reason="folders have other rights elsewhere")
def test_findings_that_cannot_be_kept_are_told(monkeypatch):
    monkeypatch.setattr(probing.os, "access", lambda *_: False)
    assert "set APPROX_CACHE to a folder that can be written" in " ".join(text for _, text in told().values())


def test_findings_that_cannot_be_removed_are_an_error_with_the_remedy():
    findings.file().mkdir(parents=True)
    with pytest.raises(ApproxError, match=r"cannot be removed: .*APPROX_CACHE"):
        probing.probe()
