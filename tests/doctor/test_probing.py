"""`approx doctor --probe`: what it measures, stores and prints."""

import pytest

from approx.doctor import health, probing
from approx.errors import ApproxError
from approx.measuring import products
from approx_kernels.dispatch import checked, findings
from approx_kernels.ops.fastest import choice, probe, ways


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, own_cache):
    monkeypatch.setattr(findings, "_known", {})
    monkeypatch.setattr(probe, "crowded", lambda: False)
    monkeypatch.setattr(probing, "LENGTHS", (512,))
    monkeypatch.setattr(probing, "_DTYPES", probing._DTYPES[:1])


def examined() -> dict[str, tuple[str, str]]:
    return {f"{one.what} {one.found}".partition(":")[0]: (one.state, one.found) for one in health.examine(offline=True)}


def test_without_a_probe_shows_the_defaults_and_how_to_measure():
    lines = [one for one in health.examine(offline=True) if one.what == "exact attention"]
    assert [one.state for one in lines] == ["ok"]
    assert "default; `approx doctor --probe` measures" in lines[0].found
    assert not findings.file().exists()


@pytest.mark.slow
def test_shows_a_probe_line_by_line_and_replaces_it_by_a_new_one(monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 0.0)
    seen = []
    probing.probe(lambda *where: seen.append(where))
    # Seven forms of attention and, if they can help, fast products.
    assert [(done, total) for _, done, total in seen] == [(done, len(seen)) for done in range(len(seen))]
    assert len(seen) == 7 + (products.obstacle() is None)
    lines = examined()
    forms = ("", ", causal", ", padded", ", causal, padded", ", few", ", training", ", causal, training")
    for form in forms:
        state, text = lines[f"exact attention float32, 512 keys{form}"]
        assert state == "ok"
        assert "error" in text
    # Calls of this and later processes use the finding.
    case = choice.Case("cpu", probing._DTYPES[0], 512)
    assert choice.chosen(case)[0] == findings.found("cpu")[str(case)]["way"]
    fake = {"way": ways.DEFAULT, "milliseconds": {ways.DEFAULT: 1.0}, "errors": {ways.DEFAULT: 0.0}}
    monkeypatch.setattr(probing, "_FORMS", ({},))
    monkeypatch.setattr(probing, "measure", lambda case: fake)
    probing.probe()
    assert findings.found("cpu")[str(case)] == fake
    assert len(findings.found("cpu")) == 1 + (products.obstacle() is None)


def test_a_probe_keeps_the_checks_of_kernels(monkeypatch):
    monkeypatch.setattr(
        probing, "measure", lambda case: {"way": ways.DEFAULT, "milliseconds": {}, "errors": {ways.DEFAULT: 0.0}}
    )
    monkeypatch.setattr(products, "obstacle", lambda device="cpu": "none here")
    checked.keep_check("flash", "cpu", checked.Check(["bfloat16"], {}))
    probing.probe()
    assert checked.check_of("flash", "cpu") == (["bfloat16"], {})
    assert not any(what.startswith(checked.ABOUT) for what, _, _ in probing.status_lines())


def test_marks_measurements_disturbed_by_other_programs():
    assert "other programs" not in " ".join(text for _, text in examined().values())
    finding = {"way": "x", "milliseconds": {"x": 1.0, ways.DEFAULT: 2.0}, "errors": {"x": 1e-7}, "crowded": True}
    findings.keep("cpu", "exact attention, float32, 512 keys", finding)
    lines = " ".join(text for _, text in examined().values())
    assert "x, 2.00× default SDPA, error 1.0e-07 *" in lines
    assert "* other programs used the cores during the measurement: stop them, then measure again" in lines


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory\nmore")], ids=["memory", "runtime"])
def test_a_failed_probe_keeps_the_default_and_names_the_remedy(monkeypatch, error):
    def fail(case):
        raise error

    monkeypatch.setattr(probing, "measure", fail)
    probing.probe()
    state, text = examined()["exact attention float32, 512 keys"]
    assert state == "missing"
    assert "float32 products" in " ".join(examined())
    why = "MemoryError" if isinstance(error, MemoryError) else "out of memory"
    assert f"default SDPA, because the probe failed: {why}. Fix that, then measure again with `approx doctor" in text
    assert choice.chosen(choice.Case("cpu", probing._DTYPES[0], 512))[0] == ways.DEFAULT


def test_findings_that_cannot_be_stored_are_an_error_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(probing, "measure", lambda case: {"way": ways.DEFAULT})
    with pytest.raises(ApproxError, match=r"cannot be (kept|removed).*APPROX_CACHE"):
        probing.probe()


def test_findings_that_cannot_be_removed_are_an_error_with_the_remedy():
    findings.file().mkdir()
    with pytest.raises(ApproxError, match=r"cannot be removed: .*APPROX_CACHE"):
        probing.probe()


def test_lists_kernels_by_the_outcome_of_their_check(monkeypatch):
    checks = {
        "a": checked.Check(["float32"], {}),
        "b": checked.Check(["float32"], {"bfloat16": "off by 1"}),
        "c": checked.Check([], {"float32": "off by 2"}),
        "d": checked.Check([], {}),
        "e": None,
    }
    asked = []
    monkeypatch.setattr(checked, "OPS", checks)
    monkeypatch.setattr(checked, "check_of", lambda op, device: asked.append(device) or checks[op])
    assert list(probing.of_kernels("cuda")) == [
        ("gpu kernels", True, "passed their check in float32, so `auto` uses them: a, b"),
        ("gpu kernels", False, "b failed its check in bfloat16, so `auto` uses PyTorch: off by 1"),
        ("gpu kernels", False, "c failed its check in float32, so `auto` uses PyTorch: off by 2"),
        (
            "gpu kernels",
            False,
            f"not checked on this GPU with these versions, so `auto` uses PyTorch: d, e; {checked.AGAIN}",
        ),
    ]
    assert asked == ["cuda"] * 5
