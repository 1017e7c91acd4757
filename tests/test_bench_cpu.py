"""The benchmark on CPUs, run on inputs of a few tokens: what it measures, keeps, leaves and writes."""

import json
import sys

import pytest

from approx.mechanisms import MECHANISMS
from bench import cpu, cpu_floor, cpu_page, cpu_targets
from bench.parts import find


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Run the benchmark on one thread, with rates that nobody measures and without peers; its record."""
    monkeypatch.setattr(cpu, "SECONDS", 0.0)
    for name, few in (("WARM_UP_SECONDS", 0.0), ("ROUNDS", 2), ("FEW", 2)):
        monkeypatch.setattr(cpu, name, few)
    rates = {"flops": 1e11, "by_precision": {"highest": 1e11}, "bytes": 1e10}
    monkeypatch.setattr(
        cpu_floor, "calibrate", lambda dtype, threads: {"dtype": dtype, "threads": threads, "error": 0.0, **rates}
    )
    monkeypatch.setattr("bench.cpu_cases.transformers_peers", lambda *given, **more: iter(()))

    def run(*words):
        given = ["-o", str(tmp_path), "--threads", "1", "--dtypes", "float32", *words]
        monkeypatch.setattr(sys, "argv", ["bench/cpu.py", *given])
        assert cpu.main() == 0
        return json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))

    return run, tmp_path


def test_every_mechanism_takes_part_and_what_was_not_measured_is_said(bench):
    run, folder = bench
    made = run("--lengths", "48", "--only", "attention*/forward/*")
    assert {(part["suite"], part["length"]) for part in made["parts"]} == {("attention", 48), ("attention-causal", 48)}
    named = {row["name"].split()[0]: row for part in made["parts"] for row in part["contenders"]}
    assert set(MECHANISMS) <= set(named)
    assert {row["status"] for row in named.values()} == {"ok"}
    assert all(len(row["against_sdpa"]) == 3 for row in named.values())
    assert "roberta/forward/bfloat16/2/8192" in made["left"]
    page = (folder / "report.md").read_text(encoding="utf-8")
    assert "not measured" in page


def test_what_is_kept_is_not_measured_again_and_the_minutes_end_it(bench, monkeypatch):
    run, folder = bench
    first = run("--lengths", "32,48", "--only", "attention/forward/*/32")
    monkeypatch.setattr(cpu, "measure", lambda *given: pytest.fail("it was measured again"))
    again = run("--lengths", "32,48", "--only", "attention/forward/*/32")
    assert again["parts"] == first["parts"]
    assert run("--lengths", "48", "--only", "attention/forward/*", "--minutes", "0")["parts"] == first["parts"]
    before = (folder / "report.md").read_bytes()
    (folder / "report.md").unlink()
    run("--redraw")
    assert (folder / "report.md").read_bytes() == before


@pytest.mark.parametrize("suite", ["roberta", "gpt2", "decode", "wav2vec2"])
def test_models_run_end_to_end_beside_their_ceiling(bench, monkeypatch, suite):
    run, _ = bench
    few = ("linear", "local", "exact")
    monkeypatch.setattr("bench.cpu_cases.MECHANISMS", {name: MECHANISMS[name] for name in (*few, "sdpa", "full")})
    monkeypatch.setattr(cpu, "FRAMES", (49,))
    made = run("--lengths", "48", "--only", f"{suite}/forward/*", "--minutes", "3")
    part = find(made, suite=suite, batch=1)
    assert part is not None
    names = {row["name"].split()[0]: row["status"] for row in part["contenders"]}
    assert set(names.values()) == {"ok"}
    assert {"sdpa", "no", *few} <= set(names)


def test_a_precision_that_is_unknown_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench/cpu.py", "-o", "x", "--dtypes", "float23"])
    with pytest.raises(SystemExit):
        cpu.main()
    assert "float23 was asked for; allowed are float32, bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(("wide", "said"), [(160e9, "in float32 and rounded at 160."), (5e9, "")])
def test_the_page_says_what_is_no_gain_of_the_attention(wide, said):
    rates = {"dtype": "bfloat16", "threads": 2, "by_precision": {"highest": 10e9, "float32": wide}}
    text = cpu_page._half_products({"rates": [rates]})
    assert said in text
    assert bool(text) == bool(said)


@pytest.mark.parametrize(
    ("suite", "name", "batch", "found", "free", "said"),
    [
        ("roberta", "exact", 1, 1.1, 1.2, "1.6: 1.10, not reached, nor without any attention: 1.20"),
        ("roberta", "exact", 1, 1.1, 1.7, "1.6: 1.10, not reached"),
        ("roberta", "exact", 1, 1.7, 1.2, "1.6: **1.70**, reached"),
        ("decode", "linear", 8, 1.1, 1.0, "1.25: 1.10, not reached"),
    ],
)
def test_a_target_beyond_the_ceiling_is_told(suite, name, batch, found, free, said):
    place = {"suite": suite, "mode": "forward", "dtype": "float32", "threads": 2, "length": 512, "batch": batch}
    ratios = {name: found, "no attention": free}
    rows = [
        {"name": one, "status": "ok", "against_sdpa": [ratio], "against_best": [ratio]} for one, ratio in ratios.items()
    ]
    lines = cpu_targets.judged({"parts": [{**place, "contenders": rows}]})
    (cell,) = (line[4] for line in lines if line[1:4] == [f"`{name}`", "float32", "default SDPA"])
    assert cell == said
