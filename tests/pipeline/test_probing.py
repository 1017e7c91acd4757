import os

import pytest
import torch

from approx.errors import ApproxError
from approx.pipeline import health, probing
from approx_kernels import few_rows, findings, half_products, layers, products, tiled_layers
from approx_kernels.exact import probe


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
        found = [
            line for what, line in lines.items() if what.endswith(f"512 keys{form}") or f"512 keys{form}, sw" in what
        ]
        assert found
        assert found[0][0] == "ok"
        assert "error" in found[0][1]
    assert {"float32 products", "bfloat16 products", "float32 layers"} <= {" ".join(what.split()[:2]) for what in lines}
    assert findings.file().exists()
    monkeypatch.setattr(
        probe, "find", lambda device, asked, *_, **__: findings.find(device, asked, lambda: {"way": "none"})
    )
    monkeypatch.setattr(probing, "fastest", lambda case: findings.find("cpu", "another thing", dict))
    probing.probe()
    assert not any("exact attention" in asked for asked in findings.found("cpu"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rows": 8}, "switched from 8 rows on (2.0× at 8 rows, error 4.0e-07)"),
        ({}, "the switch gains too little here (2.0× at 8 rows)"),
        ({"error": 2e-3}, "the switch rounds to bfloat16 here (error 2.0e-03)"),
        ({"crowded": True}, " *"),
    ],
)
def test_what_is_said_of_products(changed, words):
    finding = {"rows": None, "gains": {"8": 2.0}, "error": 4e-7, "plain_error": 3e-7, **changed}
    findings.find("cpu", products.ASKED, lambda: finding)
    assert words in told()[f"float32 products {probing._of_products(finding)}".partition(":")[0]][1]


def test_what_was_measured_beside_other_programs_is_marked_and_the_mark_explained():
    finding = {"rows": {}, "gains": {}, "crowded": True}
    assert "other programs" not in " ".join(text for _, text in told().values())
    findings._known[findings.machine("cpu")][half_products.asked(torch.float16)] = finding
    assert "* was measured while other programs used the cores: when they are gone, measure anew" in " ".join(
        text for _, text in told().values()
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "A: in float32, rounded once, from 8 rows on (2.0× at 8 rows)"),
        ({"rows": {"A": 1}}, "A: in float32, rounded once, from 1 row on (2.0× at 8 rows)"),
        ({"rows": {"A": None}}, "A: as PyTorch has them, for float32 gains too little here (2.0× at 8 rows)"),
        ({"crowded": True}, " *"),
    ],
)
def test_what_is_said_of_products_of_16_bits(changed, words):
    finding = {"gains": {"A": {"8": 2.0}, "B": {"1": 1.0}}, **changed}
    finding["rows"] = {"A": 8, "B": None, **changed.get("rows", {})}
    findings.find("cpu", half_products.asked(torch.float16), lambda: finding)
    said = [each.found for each in health.examine(offline=True) if each.what == "float16 products"]
    assert words in said[0]
    assert said[1].startswith("B: as PyTorch has them"), "a line for each layout"


def test_a_probe_that_failed_is_told_with_the_remedy():
    for asked in ("exact attention, float32, 512 keys", products.ASKED, half_products.asked(torch.bfloat16)):
        findings.find("cpu", asked, dict, otherwise={})
        findings._known[findings.machine("cpu")][asked] = {"failed": "out of memory"}
    lines = [
        told()[what]
        for what in (
            "exact attention float32, 512 keys",
            "float32 products as PyTorch has it, for the probe failed",
            "bfloat16 products as PyTorch has it, for the probe failed",
        )
    ]
    for state, text in lines:
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


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"A": [2, 32]}, "A: in C from 2 to 32 rows (2.0× at 8 rows)"),
        ({"A": layers.NEVER}, "A: as PyTorch has them, for C gains too little here (2.0× at 8 rows)"),
    ],
)
def test_what_is_said_of_layers_of_few_rows(rows, words):
    finding = {"rows": rows, "gains": {layout: {"8": 2.0} for layout in rows}}
    assert list(probing._of_few_rows(finding)) == [words]
    findings.find("cpu", few_rows.asked(torch.float32), lambda: finding)
    assert words in " ".join(text for _, text in told().values())


def test_what_is_said_of_layers_on_tiles():
    finding = {"rows": {"A": [64, 2**31], "B": layers.NEVER}, "error": 2e-7}
    finding["gains"] = {layout: {"64": 1.5} for layout in finding["rows"]}
    words = [
        "A: in three parts of bfloat16 from 64 rows on (1.5× at 64 rows, error 2.0e-07)",
        "B: as PyTorch has them (1.5× at 64 rows, error 2.0e-07)",
    ]
    assert list(probing._of_tiles(finding)) == words
    findings.find("cpu", tiled_layers.ASKED, lambda: finding)
    assert words[1] in " ".join(text for _, text in told().values())
