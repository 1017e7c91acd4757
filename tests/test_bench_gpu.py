"""The script for GPUs, as far as it goes without one: what is wrong is not timed, what fails or dies is a row, and the page
says what the record says.
"""

import argparse
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from approx.errors import Exit
from bench import (
    gpu,
    gpu_cases,
    gpu_jobs,
    gpu_machine,
    gpu_models,
    gpu_page,
    gpu_plan,
    gpu_race,
    gpu_targets,
    gpu_verify,
    parts,
)
from bench.gpu_peers import COMPILED, Attention
from bench.gpu_race import Part

pytest.importorskip("triton")

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="kernels are interpreted only where there is no GPU; with one, run the script itself",
)
LENGTH = 20
PARTS = (
    Part("attention", "forward", "float32", LENGTH, 2, "eager"),
    Part("attention-padded", "train", "float32", LENGTH, 2, "eager"),
    Part("roberta-padded", "forward", "float32", LENGTH, 2, "eager"),
    Part("decode", "forward", "float32", 16, 2, "eager"),
)


@pytest.fixture
def tiny(monkeypatch):
    """Use one head and few mechanisms."""
    monkeypatch.setattr(gpu_cases, "HEADS", 1)
    monkeypatch.setattr(gpu_cases, "FEW", ("flash", "linear"))


@pytest.fixture
def measured(tiny, tmp_path, monkeypatch):
    """The folder of a run over three small parts, with all jobs in this process."""
    monkeypatch.setattr(gpu_models, "LAYERS", 1)
    monkeypatch.setattr(gpu, "planned", lambda: iter(PARTS))
    monkeypatch.setattr(gpu_plan, "checked", list)
    monkeypatch.setattr(gpu_jobs, "calibrate", partial(gpu_machine.calibrate, side=32, copied=2**16))
    monkeypatch.setattr(gpu_jobs, "verify", partial(gpu_verify.verify, shapes=[(2, LENGTH, 1)]))
    monkeypatch.setattr(gpu_jobs, "verify_decoding", partial(gpu_verify.verify_decoding, length=9))
    monkeypatch.setattr(gpu_jobs, "measure", partial(gpu_race.measure, rounds=2))

    def here(jobs, work, keep, **how):
        for job in jobs:
            keep(job, work(job.given, lambda name: None, {}))
        return []

    monkeypatch.setattr(gpu, "carry_out", here)
    how = {"output": tmp_path, "minutes": 5.0, "tests": False, "only": "*", "lengths": (16, LENGTH), "device": "cpu"}
    gpu.run(argparse.Namespace(**how), Console(quiet=True))
    return tmp_path


def record(folder):
    return json.loads((folder / "record.json").read_text("utf-8"))


@interpreted
@pytest.mark.slow
def test_everything_is_verified_before_it_is_timed_and_the_page_says_what_the_record_says(measured, capsys):
    made = record(measured)
    assert {
        (one["suite"], one["name"]): one["status"] for one in made["verified"] if one["name"] in ("flash", "linear")
    } == {(suite, name): "ok" for suite in ("attention", "attention-padded", "decode") for name in ("flash", "linear")}
    assert next(one for one in made["verified"] if one["name"] == "linear")["kernels"] == ["linear_attention"]
    assert [part["suite"] for part in made["parts"]] == [part.suite for part in PARTS]
    for part in made["parts"]:
        rows = {one["name"]: one for one in part["contenders"]}
        assert rows["sdpa"]["status"] == rows["linear"]["status"] == "ok"
        assert rows["sdpa"]["against_sdpa"][0] == 1
        assert rows["linear"]["against_sdpa"][0] == pytest.approx(
            rows["sdpa"]["median_ms"] / rows["linear"]["median_ms"]
        )
        assert part["best_exact"] == "sdpa"
    text, right = gpu_page.write(measured, measured)
    assert right
    assert text == (measured / "report.md").read_text("utf-8")
    linear = parts.row(made["parts"][0], "linear")
    assert linear is not None
    assert f"{linear['median_ms']:.3g}; " in text
    assert gpu.main(["-o", str(measured), "--redraw"]) == Exit.OK
    assert capsys.readouterr().out == text

    # The same figures, attributed to the inputs of the targets.
    part = made["parts"][0] | {"dtype": "bfloat16", "length": 2048, "batch": 8, "way": "graph"}
    asked = {row[0]: row[3] for row in gpu_targets.judged(made | {"parts": [part]})}
    over = gpu_targets.over_floor({"rates": made["rates"]}, part, "linear")
    assert over is not None
    assert asked["`linear`, time over floor, at most"].startswith(f"2: {over:.2f}")
    assert asked["own flash against cuDNN, forward"] == "0.95: not measured"


def test_a_checkout_that_has_the_record_alone_loses_nothing(tmp_path):
    about = {"suite": "attention", "dtype": "bfloat16"}
    raced = {"kind": "part", **PARTS[0]._asdict(), "contenders": []}
    made = {
        "environment": {"gpu": "a card"},
        "rates": {"copy": 1.0},
        "tests": {"finished": True},
        "verified": [{"kind": "verification", **about, "name": "flash", "status": "ok"}],
        "parts": [raced],
    }
    (tmp_path / "record.json").write_text(json.dumps(made), encoding="utf-8")
    parts.keep(tmp_path / "parts", "machine", {"kind": "machine", "environment": {"gpu": "newer"}, "rates": {}})
    gpu._take_up(tmp_path)
    gpu._gather(tmp_path, 1.0)
    again = record(tmp_path)
    assert {key: again[key] for key in ("tests", "verified", "parts")} == {
        key: made[key] for key in ("tests", "verified", "parts")
    }
    assert again["environment"] == {"gpu": "newer"}


@interpreted
def test_what_is_wrong_is_told_and_not_timed(tiny, monkeypatch):
    monkeypatch.setattr(gpu_verify, "FACTOR", 1e-3)
    how = {"kind": "verification", "device": "cpu", "suite": "attention", "dtype": "float32"}
    monkeypatch.setattr(gpu_jobs, "verify", partial(gpu_verify.verify, shapes=[(1, LENGTH, 1)]))
    result = gpu_jobs.work({**how, "name": "flash"}, lambda name: None, {})
    assert result["status"].startswith(f"failed: out at {LENGTH} tokens has error")
    given = {"kind": "part", "device": "cpu", "part": PARTS[0]._asdict(), "verified": {"flash": result}}
    monkeypatch.setattr(gpu_jobs, "measure", partial(gpu_race.measure, rounds=1))
    rows = {one["name"]: one for one in gpu_jobs.work(given, lambda name: None, {})["contenders"]}
    assert rows["flash"]["status"] == f"not timed: {result['status']}"
    assert rows["linear"]["status"] == gpu_jobs.UNVERIFIED
    assert "median_ms" not in rows["flash"]


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("settings", gpu_cases.FORMS["linear"], ids=str)
def test_linear_attention_is_verified_in_every_form_and_so_are_the_gradients_of_what_it_learns(
    tiny, monkeypatch, settings
):
    name = "linear " + " ".join(f"{key}={value}" for key, value in settings.items())
    monkeypatch.setattr(gpu_cases, "FEW", (name,))
    result = gpu_verify.verify("attention-padded", name, torch.float32, CPU, [(1, 150, 1)])
    assert result["status"] == "ok"
    assert result["kernels"] == ["linear_attention"]
    learned = {"dquery_map", "dkey_map"} | ({"dmix"} if "window" in settings else set())
    assert set(result["errors"]) == {"out", "dq", "dk", "dv"} | learned


def test_hashes_that_are_verified_are_the_same_in_every_precision():
    case = next(case for case in gpu_cases.of_suite("attention", 1) if case.mechanism == "clustered")
    given = gpu_cases.inputs("attention", batch=1, length=500, dtype=torch.float32, device=CPU)[0]
    mechanism = gpu_cases.built(case, False, torch.float32, CPU, given)

    def heights(dtype):
        return given.q.to(dtype) @ mechanism.planes[:, :-1].to(dtype).T + mechanism.planes[:, -1].to(dtype)

    assert not torch.equal(heights(torch.float32).double(), heights(torch.float64))
    gpu_verify._make_hashes_exact(mechanism, given)
    assert torch.equal(heights(torch.float32).double(), heights(torch.float64))
    assert torch.equal(given.q, given.q.bfloat16().float())
    assert torch.equal(mechanism.planes, mechanism.planes.bfloat16().float())


def test_what_could_not_be_compiled_in_time_is_left_to_the_next_run(tiny, monkeypatch):
    part = Part("attention", "forward", "bfloat16", 4096, 4, "eager")
    assert gpu_plan.compiled_in(part) == list(COMPILED)
    assert gpu_plan.compiled_in(part._replace(batch=1)) == []
    late = {"kind": "part", "device": "cpu", "part": PARTS[0]._asdict(), "verified": {}, "uncompiled": ["sdpa"]}
    monkeypatch.setattr(gpu_jobs, "measure", partial(gpu_race.measure, rounds=1))
    result = gpu_jobs.work(late, lambda name: None, {})
    assert result["contenders"][0]["status"] == gpu_jobs.UNCOMPILED
    assert gpu._unfinished(result)


@pytest.mark.parametrize("batch", [1, 4])
def test_half_of_a_padded_step_is_padding(batch):
    real = gpu_cases.real_tokens(batch, 512, CPU)
    assert real.float().mean() == pytest.approx(0.5, abs=0.01)
    assert (real.int().diff(dim=1) <= 0).all()


def test_a_contender_that_fails_is_a_row_and_the_others_go_on(tiny, monkeypatch):
    def failing(given):
        raise RuntimeError("no kernel\nfor this")

    everybody = list(gpu_cases.contenders("attention", "forward", LENGTH, torch.float32, CPU))[:1]
    everybody.append(Attention("broken", "peer", "sdpa", failing))
    everybody.append(everybody[0]._replace(name="again", role="exact"))
    monkeypatch.setattr(gpu_cases, "contenders", lambda *given: iter(everybody))
    seen: list[str] = []
    result = gpu_race.measure(PARTS[0], CPU, seen.append, rounds=2)
    assert [one["status"] for one in result["contenders"]] == ["ok", "RuntimeError: no kernel", "ok"]
    assert set(seen) == {"sdpa", "broken", "again"}
    assert result["best_exact"] in ("sdpa", "again")


def test_a_graph_that_cannot_be_captured_is_not_tried():
    part = Part("attention", "train", "bfloat16", 512, 32, "graph")
    verified = {"lsh": {"status": "ok", "graphs": {"forward": "equal", "train": "cannot be captured: it waits"}}}
    refuse = gpu_jobs._refusing(part, verified, {"local": "it did not end"})
    assert refuse("lsh", "variant") == "cannot be captured: it waits"
    assert gpu_jobs._refusing(part._replace(way="eager"), verified, {})("lsh", "variant") is None
    assert refuse("local", "variant") == "it did not end"
    assert gpu_jobs._refusing(part._replace(suite="roberta"), {}, {})("sdpa cudnn", "exact") is None


def test_without_a_gpu_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["-o", str(tmp_path / "out")]) == Exit.MISSING
    assert "finds none. Run it where there is one" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert gpu.main(["-o", str(tmp_path), "--redraw"]) == Exit.UNAVAILABLE
    assert "record.json is not there" in capsys.readouterr().err


def test_the_plan_names_every_part_once_and_verifies_whoever_runs_in_it():
    plan = list(gpu.planned())
    assert len({part.id for part in plan}) == len(plan)
    jobs = {job.id for job in gpu.verifications(plan)}
    assert {part.way for part in plan if part.suite == "roberta-padded"} == {"graph", "eager"}
    for part in plan:
        if part.suite in gpu_cases.SUITES:
            dtype = getattr(torch, part.dtype)
            for one in gpu_cases.contenders(part.suite, part.mode, part.length, dtype, CPU):
                assert f"verification/{part.suite}/{part.dtype}/{one.name}" in jobs
    assert "verification/decode/bfloat16/linear" in jobs
    assert "verification/attention/bfloat16/sdpa cudnn" in jobs
    assert "compilation/attention/forward/bfloat16/4096x4/graph/FlexAttention" in jobs
    known = {case.name for suite in ("attention", "gpt2") for case in gpu_cases.of_suite(suite, 1)}
    assert {*gpu_targets.ENCODER, *gpu_targets.PREFILL, *gpu_targets.FLOORS} <= known


@pytest.mark.parametrize("length", [512, 1000])
def test_tiles_of_a_window_are_counted_as_the_kernel_cuts_them(length):
    cut = gpu_targets.FORWARD["narrow"][0].tiles
    place = torch.arange(length)
    near = (place[:, None] - place).abs() <= 128
    tiles = [
        near[i : i + cut["BM"], j : j + cut["BN"]].any().item()
        for i in range(0, length, cut["BM"])
        for j in range(0, length, cut["BN"])
    ]
    assert gpu_targets.computed_pairs(gpu_targets.WINDOWS[0], length) == sum(tiles) * cut["BM"] * cut["BN"]


def test_what_the_tests_say_is_counted_even_if_they_are_cut_off():
    text = """
[gw1] [ 12%] PASSED tests/kernels/test_flash.py::test_windows[before itself]
[gw0] [ 25%] FAILED tests/kernels/test_flash.py::test_spans[0]
tests/kernels/test_probe.py::test_on_a_gpu[few] PASSED      [ 40%]
tests/kernels/test_probe.py::test_other SKIPPED (no reason) [ 50%]
tests/kernels/test_flash.py:51: AssertionError
"""
    counts = gpu_machine.counted(text)
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (2, 1, 1)
    assert counts["failures"] == ["tests/kernels/test_flash.py::test_spans[0]"]


def test_the_tests_that_need_a_gpu_lie_where_the_script_looks():
    folder = gpu_machine.ROOT / "tests"
    needing = [path for path in folder.rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    own = {path.parent.relative_to(gpu_machine.ROOT).as_posix() for path in needing if path.parent != folder}
    assert own == {word for word in gpu_machine.TESTS if word.startswith("tests/")}


def test_the_machine_is_asked_without_nvidia_smi_too(monkeypatch):
    monkeypatch.setattr(gpu_machine.shutil, "which", lambda name: None)
    assert gpu_machine.watched() == {}
    said = SimpleNamespace(stdout="41, 1980\n")
    monkeypatch.setattr(gpu_machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpu_machine.subprocess, "run", lambda *given, **how: said)
    assert gpu_machine.asked("temperature.gpu", "clocks.sm") == {"temperature.gpu": "41", "clocks.sm": "1980"}


def test_rating_products_leaves_their_precision_as_it_was():
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore[reportAttributeAccessIssue]  # a module made at run time
    before = [one.fp32_precision for one in settings]
    gpu_machine.calibrate(torch.device("cpu"), side=32, copied=2**16)
    assert [one.fp32_precision for one in settings] == before
