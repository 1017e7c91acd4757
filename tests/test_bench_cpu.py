"""The CPU benchmark on inputs of a few tokens: what it measures, stores, skips and writes."""

import json
import re
import shutil
import sys

import pytest
import torch

from approx.errors import Exit
from approx.mechanisms import MECHANISMS
from bench import cpu, cpu_cases, cpu_floor, cpu_page
from bench.pages import find, ratio


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Run the benchmark on one thread with fixed rates and without peers; return its record."""
    monkeypatch.setattr(cpu, "SECONDS", 0.0)
    for name, few in (("WARM_UP_SECONDS", 0.0), ("ROUNDS", 2), ("FEW", 2)):
        monkeypatch.setattr(cpu, name, few)
    rates = {"flops": 1e11, "by_precision": {"highest": 1e11}, "bytes": 1e10}
    monkeypatch.setattr(
        cpu_floor, "calibrate", lambda dtype, threads: {"dtype": dtype, "threads": threads, "error": 0.0, **rates}
    )
    monkeypatch.setattr("bench.cpu_cases.transformers_peers", lambda *arguments, **more: iter(()))

    def run(*words):
        arguments = ["-o", str(tmp_path), "--threads", "1", "--dtypes", "float32", *words]
        monkeypatch.setattr(sys, "argv", ["bench/cpu.py", *arguments])
        assert cpu.main() == 0
        return json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))

    return run, tmp_path


@pytest.mark.slow
def test_measures_every_mechanism_and_lists_missing_parts(bench):
    run, folder = bench
    made = run("--lengths", "48", "--only", "attention*/forward/*")
    assert {(part["suite"], part["length"]) for part in made["parts"]} == {("attention", 48), ("attention-causal", 48)}
    named = {row["name"].split()[0]: row for part in made["parts"] for row in part["contenders"]}
    assert set(MECHANISMS) <= set(named)
    assert {row["status"] for row in named.values()} == {"ok"}
    assert all(len(row["against_sdpa"]) == 3 for row in named.values())
    assert {"roberta/forward/bfloat16/2/8192", "longest/linear"} <= set(made["left"])
    page = (folder / "report.md").read_text(encoding="utf-8")
    assert "not measured" in page
    for part in made["parts"]:
        assert part["command"].startswith("python bench/cpu.py -o ")
        assert f"| commit | {cpu_page._commit(part)} |" in page
        # Includes ops of earlier parts.
        assert set(part["chosen"].values()) & {"cpu", "reference"}
    assert "git_commit" not in made["environment"]


@pytest.mark.slow
def test_measures_stored_parts_once_and_stops_at_the_time_limit(bench, monkeypatch):
    run, folder = bench
    first = run("--lengths", "32,48", "--only", "attention/forward/*/32")
    monkeypatch.setattr(cpu, "measure", lambda *arguments: pytest.fail("it was measured again"))
    again = run("--lengths", "32,48", "--only", "attention/forward/*/32")
    assert again["parts"] == first["parts"]
    assert run("--lengths", "48", "--only", "attention/forward/*", "--minutes", "0")["parts"] == first["parts"]
    before = (folder / "report.md").read_bytes()
    (folder / "report.md").unlink()
    run("--redraw")
    assert (folder / "report.md").read_bytes() == before


@pytest.mark.slow
def test_a_checkout_with_only_the_record_keeps_its_parts(bench, monkeypatch):
    run, folder = bench
    monkeypatch.setattr("bench.cpu_cases.MECHANISMS", {name: MECHANISMS[name] for name in ("linear", "sdpa", "exact")})
    first = run("--lengths", "32", "--only", "attention/forward/*")
    shutil.rmtree(folder / "parts")
    both = run("--lengths", "32", "--only", "attention*/forward/*")
    assert len(both["parts"]) == 2
    assert find(both, suite="attention") == first["parts"][0]
    again = run("--lengths", "32", "--only", "attention/*", "--again")
    assert find(again, suite="attention") != first["parts"][0]
    assert find(again, suite="attention-causal") == find(both, suite="attention-causal")


@pytest.mark.parametrize("number", ["processor", "instructions", "family"])
def test_refuses_to_continue_the_record_of_another_processor(bench, monkeypatch, capsys, number):
    run, folder = bench
    monkeypatch.setattr(cpu, "generation", lambda: {"family": "one"})
    run("--only", "nothing")
    assert "No part of the plan is called 'nothing'" in capsys.readouterr().err
    made = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    made["environment"][number] = "another"
    (folder / "record.json").write_text(json.dumps(made), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bench/cpu.py", "-o", str(folder)])
    assert cpu.main() == Exit.REFUSED
    errors = capsys.readouterr().err
    assert re.search(r"holds what was measured on .*another.*, and this is ", errors)


def test_draws_parts_without_a_commit_and_lists_missing_ones_in_order():
    assert cpu_page._commit({}) == "unknown"
    assert cpu_page._commit({"git_commit": "0123456789+changes"}) == "0123456+"
    names = [f"decode/forward/float32/1/{length}" for length in ("4096x8", "512", "4096", "512x8")]
    _, lines = cpu_page._left({"left": [*names, "longest/lsh", "longest/linear"]})
    assert lines == "- `decode/forward/float32/1` at 512, 4096, 512x8, 4096x8\n- `longest` of `lsh`, `linear`"


@pytest.mark.parametrize(
    "suite", ["decode", *(pytest.param(name, marks=pytest.mark.slow) for name in ("roberta", "gpt2", "wav2vec2"))]
)
@pytest.mark.sample(0)
def test_models_run_end_to_end_next_to_their_ceiling(bench, monkeypatch, suite):
    run, _ = bench
    few = ("linear", "local", "exact")
    monkeypatch.setattr("bench.cpu_cases.MECHANISMS", {name: MECHANISMS[name] for name in (*few, "sdpa", "full")})
    monkeypatch.setattr(cpu_cases, "FRAMES", (49,))
    made = run("--lengths", "48", "--only", f"{suite}/forward/*", "--minutes", "3")
    part = find(made, suite=suite, batch=1)
    assert part is not None
    names = {row["name"].split()[0]: row["status"] for row in part["contenders"]}
    assert set(names.values()) == {"ok"}
    assert {"sdpa", "no", *few} <= set(names)


@pytest.mark.parametrize(
    ("option", "wrong", "allowed"),
    [
        ("--dtypes", "float23", "float32, bfloat16"),
        ("--lengths", "512,0", "whole numbers from 1 on"),
        ("--threads", "two", "whole numbers from 1 on"),
    ],
)
def test_refuses_unsupported_measurements(monkeypatch, capsys, option, wrong, allowed):
    monkeypatch.setattr(sys, "argv", ["bench/cpu.py", "-o", "x", option, wrong])
    with pytest.raises(SystemExit):
        cpu.main()
    assert f"{wrong} was asked for; allowed are {allowed}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gained", "said"),
    [
        ({"float32 products": 8}, "(products of float32 by another library)"),
        (
            {"bfloat16 products": {"weights [out, in]": None, "weights [in, out]": 1}},
            "(products of bfloat16 computed in float32)",
        ),
        ({"float32 layers on tiles": {"weights [out, in]": [1, 0], "weights [in, out]": [64, 2**31]}}, "on tiles"),
        ({"float32 layers on tiles": {"weights [out, in]": [1, 0], "weights [in, out]": [1, 0]}}, ""),
        ({"float32 products": None, "bfloat16 products": {"weights [out, in]": None}}, ""),
    ],
)
def test_the_page_names_the_other_gains_of_older_parts(gained, said):
    text = cpu_page.products({"parts": [{}, {"products": {}}, {"products": gained}]})
    assert said in text
    assert bool(text) == bool(said)


@pytest.mark.parametrize(
    ("suite", "name", "batch", "contender", "free", "said", "why"),
    [
        ("roberta", "exact", 1, 1.1, 1.2, "1.25: 1.10, not reached", "no attention at all reaches 1.20 (512)"),
        (
            "roberta",
            "exact",
            1,
            1.1,
            1.76,
            "1.25: 1.10, not reached",
            "share of what no attention at all reaches: 0.62 (512)",
        ),
        ("roberta", "exact", 1, 1.24, 1.7, "1.25: 1.24, not reached", "within the noise of 1.0% (512)"),
        ("roberta", "exact", 1, 1.7, 1.2, "1.25: 1.70, reached", ""),
        (
            "decode",
            "linear",
            8,
            1.1,
            1.0,
            "1.25: 1.10, not reached",
            "no attention at all, its cache still copied, reaches 1.00 (512)",
        ),
    ],
)
def test_a_target_that_is_not_reached_has_a_reason(suite, name, batch, contender, free, said, why):
    dtype = "float32" if suite == "decode" else "bfloat16"
    part = raced({name: contender, "no attention": free}, suite=suite, batch=batch, dtype=dtype, spread=1.01)
    lines = cpu_page.judged({"parts": [part], "rates": []})
    (line,) = (line for line in lines if line[1:4] == [f"`{name}`", dtype, "default SDPA"])
    assert (line[4], line[-1]) == (said, why or "–")


def raced(ratios, **about):
    """A part with contenders of given speed relative to SDPA."""
    place = {"suite": "roberta", "mode": "forward", "dtype": "float32", "threads": 2, "length": 512, "batch": 1}
    rows = [
        {
            "name": one,
            "role": "ceiling" if one == "no attention" else "variant",
            "status": "ok",
            "median_ms": 10 / ratio,
        }
        | {"against_sdpa": [ratio, ratio - 0.01, ratio + 0.01], "against_best": [ratio, ratio - 0.01, ratio + 0.01]}
        for one, ratio in ratios.items()
    ]
    return {**place, "spread": 1.0, "crowded": False, "contenders": rows, **about}


@pytest.mark.parametrize(
    ("about", "free", "bold", "marked"),
    [
        ({}, 1.5, True, False),
        ({"spread": 0.97}, 1.5, True, False),
        ({"spread": 0.92}, 1.5, False, True),
        ({"spread": 1.09}, 1.5, False, True),
        ({"crowded": True}, 1.5, True, True),
        ({}, 1.0, False, True),
        ({"suite": "decode"}, 1.0, True, False),
    ],
)
def test_gains_within_the_noise_are_not_bold_and_noisy_columns_are_marked(about, free, bold, marked):
    part = raced({"linear": 1.08, "no attention": free}, **about)
    assert ratio(part, "linear", "against_sdpa") == ("**1.08**" if bold else "1.08")
    assert bool(cpu_page.dagger(part)) == marked
    assert ratio(part, "absent", "against_sdpa") == "–"


def test_a_floor_counts_what_must_be_computed_and_signs_at_their_own_rate():
    rates = {"dtype": "float32", "flops": 1e9, "bytes": 1e15}
    pairs = sum(min(i, 128) + min(511 - i, 128) + 1 for i in range(512))
    floor = cpu_floor.floor_ms("local left=128 right=128", 512, False, rates, None)
    assert floor == pytest.approx(1e3 * cpu_cases.HEADS * 4 * cpu_cases.SIZE * pairs / 1e9)
    name = "clustered iterations=3"
    assert cpu_floor.floor_ms(name, 512, False, rates, None) is None
    fast, slow = (cpu_floor.floor_ms(name, 512, False, rates, signs) for signs in (1e18, 1e9))
    assert fast is not None
    assert slow is not None
    assert slow - fast == pytest.approx(1e3 * cpu_cases.HEADS * 512 * 3 * 2 * 64 * 25 / 1e9)
    assert cpu_floor.floor_ms("transformers BigBird", 512, False, rates, 1e9) is None
    assert [cpu_floor.limit(one) for one in (name, "clustered iterations=10", "linear", "performer")] == [
        4.5,
        None,
        2,
        None,
    ]


def test_marks_values_beyond_their_limit():
    rates = {"dtype": "float32", "threads": 2, "flops": 1e9, "bytes": 1e15}
    least = cpu_floor.floor_ms("linear", 512, False, rates, None)
    assert least is not None
    part = raced({"linear": 10 / (2.5 * least)}, suite="attention")
    text = "\n".join(cpu_page.floors({"rates": [rates], "parts": [part]}, "float32"))
    assert "| attention | at most | 512 |" in text
    assert "| `linear` | 2 | 2.5, over |" in text


@pytest.mark.parametrize("causal", [False, True])
def test_every_peer_has_a_counterpart(causal):
    pytest.importorskip("fast_transformers")
    runs = {one.name: one for one in cpu_cases.attention(64, torch.float32, causal=causal, train=False)}
    peers = [one for one in runs.values() if one.role == "peer"]
    assert {"idiap full", "idiap exact-topk", "idiap reformer"} < {one.name for one in peers}
    assert ("idiap causal improved-clustered" in runs) == causal
    for one in peers:
        one.call()
        assert cpu_cases.COUNTERPARTS[one.name] in runs


def test_signs_are_rated_where_c_can_be_compiled(monkeypatch):
    monkeypatch.setattr(cpu_floor, "_WORDS", 256)
    rate = cpu_floor._calibrate_signs(1)["flops"]
    assert rate is None or rate > 0
    monkeypatch.setattr(cpu_floor, "load", lambda source: "there is no compiler")
    assert cpu_floor._calibrate_signs(1)["flops"] is None


@pytest.mark.slow
@pytest.mark.parametrize("suite", list(cpu_cases.GROUPED))
def test_decodes_shared_keys_next_to_repeated_ones(bench, monkeypatch, suite):
    run, folder = bench
    monkeypatch.setattr(cpu_cases, "GROUPED_LENGTHS", (48,))
    made = run("--lengths", "48", "--only", f"{suite}/*")
    assert {(part["suite"], part["batch"]) for part in made["parts"]} == {(suite, 1), (suite, 4)}
    decoding = {name for name, kind in MECHANISMS.items() if kind.supports_causal and kind.supports_decode}
    for part in made["parts"]:
        contenders = {row["name"].split()[0]: row for row in part["contenders"]}
        assert {row["status"] for row in contenders.values()} == {"ok"}
        assert decoding <= set(contenders)
        assert any(row["name"] == cpu_cases.REPEATED for row in part["contenders"])
    assert "32 heads of" in (folder / "report.md").read_text(encoding="utf-8")
