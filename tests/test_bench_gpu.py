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
from transformers.utils import import_utils

from approx.errors import Exit
from bench import gpu, gpu_cases, gpu_jobs, gpu_page, gpu_verify, pages
from bench.gpu import Stage
from bench.gpu_cases import Attention, Part
from bench.gpu_workers import Job

pytest.importorskip("triton")

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="kernels are interpreted only where there is no GPU; with one, run the script itself",
)
LENGTH = 20
CHECKED = [
    {"suite": suite, "dtype": "float32", "name": name}
    for suite in ("attention", "attention-padded", "decode")
    for name in ("flash", "linear")
]
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
    monkeypatch.setattr(gpu_cases, "LAYERS", 1)
    monkeypatch.setattr(gpu, "planned", lambda: list(PARTS))
    monkeypatch.setattr(gpu, "stages", lambda: (Stage("attention", 1.0, PARTS), Stage("checks", 0.0)))
    monkeypatch.setattr(gpu, "checked", lambda: list(CHECKED))
    monkeypatch.setattr(gpu_jobs, "calibrate", partial(gpu_jobs.calibrate, side=32, copied=2**16))
    monkeypatch.setattr(gpu_jobs, "HEADS", 1)
    monkeypatch.setattr(gpu_verify, "SHAPES", [(2, LENGTH, 1)])
    monkeypatch.setattr(gpu_verify, "LENGTH", 9)
    monkeypatch.setattr(gpu_jobs, "measure", partial(gpu_jobs.measure, rounds=2))
    monkeypatch.setattr(gpu, "carry_out", here)
    how = {"output": tmp_path, "budget": 300.0, "tests": False, "only": "*", "lengths": (16, LENGTH), "device": "cpu"}
    gpu.run(argparse.Namespace(**how), Console(quiet=True))
    return tmp_path


def here(jobs, work, keep, **how):
    """Do the work of processes in this one."""
    for job in jobs:
        rows = []
        result = work(job.arguments, lambda row, rows=rows: rows.append(row) if "status" in row else None, {})
        keep(job, ({"contenders": rows} if rows else {}) | result)
    return []


def raced(part, tried, device=CPU):
    """The rows of a part, by name, in turns of this process."""
    arguments = {"kind": "part", "device": str(device), "part": part._asdict(), "tried": tried}
    stored = {}
    here([Job("part", arguments)], gpu_jobs.work, lambda job, result: stored.update(result))
    return {one["name"]: one for one in stored["contenders"]}


def record(folder):
    return json.loads((folder / "record.json").read_text("utf-8"))


@interpreted
@pytest.mark.slow
def test_the_page_shows_tried_and_timed_contenders_of_the_record(measured, capsys):
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
        low, high = rows["linear"]["against_sdpa"][1:]
        assert low <= rows["linear"]["against_sdpa"][0] <= high
        assert part["best_exact"] == "sdpa"
    text = pages.write_page(gpu_page.report, measured, measured)
    assert gpu_page.right(made)
    assert text == (measured / "report.md").read_text("utf-8")
    linear = pages.row(made["parts"][0], "linear")
    assert linear is not None
    assert f"{linear['median_ms']:.3g}; " in text
    assert gpu.main(["-o", str(measured), "--redraw"]) == Exit.OK
    assert capsys.readouterr().out == text

    # The same figures, attributed to the inputs of the targets.
    part = made["parts"][0] | {"dtype": "bfloat16", "length": 2048, "batch": 8, "way": "graph"}
    asked = {row[0]: row[3] for row in gpu_page.judged(made | {"parts": [part]})}
    over = gpu_page.over_floor({"rates": made["rates"]}, part, "linear")
    assert over is not None
    assert asked["`linear`, time over floor, at most"].startswith(f"2: {over:.2f}")
    assert asked["own flash against cuDNN, forward"] == "0.95: not measured"


def test_a_checkout_with_only_the_record_keeps_its_parts(tmp_path):
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
    pages.keep(tmp_path / "parts", "machine", {"kind": "machine", "environment": {"gpu": "newer"}, "rates": {}})
    gpu._take_up(tmp_path)
    gpu._gather(tmp_path, 1.0)
    again = record(tmp_path)
    assert {key: again[key] for key in ("tests", "verified", "parts")} == {
        key: made[key] for key in ("tests", "verified", "parts")
    }
    assert again["environment"] == {"gpu": "newer"}


@interpreted
def test_a_wrong_or_untried_contender_is_a_row_and_is_not_timed(tiny, monkeypatch):
    monkeypatch.setattr(gpu_verify, "FACTOR", 1e-3)
    monkeypatch.setattr(gpu_jobs, "HEADS", 1)
    monkeypatch.setattr(gpu_jobs, "measure", partial(gpu_jobs.measure, rounds=1))
    tried = {}
    jobs = [job for job in gpu.tries(PARTS[0], CPU) if job.arguments["name"] != "linear"]
    jobs = [job._replace(arguments=job.arguments | {"device": "cpu"}) for job in jobs]
    here(jobs, gpu_jobs.work, lambda job, result: tried.update({job.arguments["name"]: result["status"]}))
    assert tried["sdpa"] == "ok"
    assert tried["flash"].startswith(f"failed: out at {LENGTH} tokens has error")
    rows = raced(PARTS[0], tried)
    assert rows["sdpa"]["status"] == "ok"
    assert rows["flash"]["status"] == f"not timed: {tried['flash']}"
    assert rows["linear"]["status"] == gpu_jobs.UNTRIED
    assert "median_ms" not in rows["flash"]


@interpreted
def test_references_of_many_pairs_take_the_first_sample_and_agree_with_all_of_them(tiny, monkeypatch):
    shapes = [(3, LENGTH, 1)]
    whole = gpu_verify.verify("attention-padded", "flash", torch.float32, CPU, shapes)
    monkeypatch.setattr(gpu_verify, "PAIRS", LENGTH**2)
    first = gpu_verify.verify("attention-padded", "flash", torch.float32, CPU, shapes)
    assert whole["status"] == first["status"] == "ok"
    assert whole["errors"].keys() == first["errors"].keys()
    assert whole["errors"]["out"] != first["errors"]["out"]
    forward = gpu_verify.verify("attention-padded", "flash", torch.float32, CPU, shapes, train=False)
    assert (forward["status"], list(forward["errors"])) == ("ok", ["out"])


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
    values = gpu_cases.inputs("attention", batch=1, length=500, dtype=torch.float32, device=CPU)[0]
    mechanism = gpu_cases.built(case, False, torch.float32, CPU, values)

    def heights(dtype):
        return values.q.to(dtype) @ mechanism.planes[:, :-1].to(dtype).T + mechanism.planes[:, -1].to(dtype)

    assert not torch.equal(heights(torch.float32).double(), heights(torch.float64))
    gpu_verify._make_hashes_exact(mechanism, values)
    assert torch.equal(heights(torch.float32).double(), heights(torch.float64))
    assert torch.equal(values.q, values.q.bfloat16().float())
    assert torch.equal(mechanism.planes, mechanism.planes.bfloat16().float())


def test_a_contender_that_was_not_tried_in_time_is_left_to_the_next_run():
    refuse = gpu_jobs.refusing({"lsh": "cannot be captured: it waits", "linear": "ok"})
    assert refuse("linear", "variant") is None
    assert refuse("lsh", "variant") == "not timed: cannot be captured: it waits"
    late = {"name": "local", "role": "variant", "status": refuse("local", "variant")}
    assert gpu._unfinished({"kind": "part", "contenders": [late]})
    assert not gpu._unfinished({"kind": "part", "contenders": [late | {"status": "ok"}]})
    assert gpu._unfinished({"kind": "part", "contenders": [], "unfinished": True})


@pytest.mark.parametrize("batch", [1, 4])
def test_half_of_a_padded_step_is_padding(batch):
    real = gpu_cases.real_tokens(batch, 512, CPU)
    assert real.float().mean() == pytest.approx(0.5, abs=0.01)
    assert (real.int().diff(dim=1) <= 0).all()


def test_a_contender_that_fails_is_a_row_and_the_others_go_on(tiny, monkeypatch):
    def failing(values):
        raise RuntimeError("no kernel\nfor this")

    everybody = list(gpu_cases.contenders("attention", "forward", LENGTH, torch.float32, CPU))[:1]
    everybody.append(Attention("broken", "peer", "sdpa", failing))
    everybody.append(everybody[0]._replace(name="again", role="exact"))
    monkeypatch.setattr(gpu_cases, "contenders", lambda *arguments: iter(everybody))
    said = []
    result = gpu_jobs.measure(PARTS[0], CPU, said.append, rounds=2)
    rows = {one["name"]: one for one in said if "status" in one}
    assert {name: one["status"] for name, one in rows.items()} == {
        "sdpa": "ok",
        "again": "ok",
        "broken": "RuntimeError: no kernel",
    }
    # Each is named before it runs, so that one that takes the process along is known.
    assert {"name": "broken", "role": "peer"} in said[: said.index(rows["broken"])]
    assert result["best_exact"] in ("sdpa", "again")


def test_after_a_lost_process_only_exact_attention_and_what_is_missing_is_measured(tiny, monkeypatch):
    everybody = list(gpu_cases.contenders("attention", "forward", LENGTH, torch.float32, CPU))[:1]
    everybody += [everybody[0]._replace(name=name, role="peer") for name in ("done", "lost", "new")]
    monkeypatch.setattr(gpu_cases, "contenders", lambda *arguments: iter(everybody))
    before = {
        name: {"name": name, "role": "peer", "status": status} for name, status in (("done", "ok"), ("lost", "died"))
    }
    said = []
    gpu_jobs.measure(PARTS[0], CPU, said.append, before=before, rounds=2)
    assert [one["name"] for one in said if "status" in one] == ["sdpa", "new"]


def test_without_a_gpu_names_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["-o", str(tmp_path / "out")]) == Exit.MISSING
    assert "finds none. Run it where there is one" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert gpu.main(["-o", str(tmp_path), "--redraw"]) == Exit.UNAVAILABLE
    assert "record.json is not there" in capsys.readouterr().err


def test_the_plan_names_every_part_once_and_tries_whoever_is_timed_in_it():
    plan = [part for stage in gpu.stages() for part in stage.parts]
    assert len({part.id for part in plan}) == len(plan)
    for part in (plan[0], next(part for part in plan if part.suite == "gpt2")):
        tried = [job.arguments["name"] for job in gpu.tries(part, torch.device("cuda"))]
        assert len(set(tried)) == len(tried)
        assert tried[:2] == ["sdpa", "sdpa efficient"] or tried[:2] == ["sdpa", "sdpa math"]
        assert "linear" in tried
    assert "FlexAttention" in [job.arguments["name"] for job in gpu.tries(plan[0], torch.device("cuda"))]
    known = {case.name for suite in ("attention", "gpt2") for case in gpu_cases.of_suite(suite, 1)}
    assert {*gpu_page.ENCODER, *gpu_page.PREFILL, *gpu_page.FLOORS} <= known
    assert set(gpu_cases.FIRST) <= known


def test_the_plan_is_printed_with_the_second_at_which_each_stage_ends(capsys):
    assert gpu.main(["--plan", "--budget", "560"]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    ends = [int(word) for line in lines if (word := line.rpartition("until second ")[2].partition(",")[0]).isdigit()]
    assert ends == sorted(ends)
    assert ends[-1] == 560
    assert ends[-2] <= 550


def test_the_next_stage_gets_the_time_left_by_a_stage():
    chosen = (Stage("a", 0.5), Stage("b", 0.3), Stage("rest", 0.0))
    assert [(stage.name, end) for stage, end in gpu.allotted(chosen, 100.0, 180.0)] == [
        ("a", pytest.approx(150)),
        ("b", pytest.approx(180)),
        ("rest", pytest.approx(180)),
    ]


@pytest.mark.parametrize("length", [512, 1000])
def test_tiles_of_a_window_are_counted_as_the_kernel_cuts_them(length):
    cut = gpu_page.FORWARD["narrow"][0].tiles
    place = torch.arange(length)
    near = (place[:, None] - place).abs() <= 128
    tiles = [
        near[i : i + cut["BM"], j : j + cut["BN"]].any().item()
        for i in range(0, length, cut["BM"])
        for j in range(0, length, cut["BN"])
    ]
    assert gpu_page.computed_pairs(gpu_page.WINDOWS[0], length) == sum(tiles) * cut["BM"] * cut["BN"]


def test_counts_results_of_interrupted_tests():
    text = """
[gw1] [ 12%] PASSED tests/kernels/test_flash.py::test_windows[before itself]
[gw0] [ 25%] FAILED tests/kernels/test_flash.py::test_spans[0]
tests/kernels/test_probe.py::test_on_a_gpu[few] PASSED      [ 40%]
tests/kernels/test_probe.py::test_other SKIPPED (no reason) [ 50%]
tests/kernels/test_flash.py:51: AssertionError
"""
    counts = gpu_jobs.counted(text)
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (2, 1, 1)
    assert counts["failures"] == ["tests/kernels/test_flash.py::test_spans[0]"]


def test_the_tests_that_need_a_gpu_lie_where_the_script_looks():
    folder = gpu_jobs.ROOT / "tests"
    needing = [path for path in folder.rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    folders = {path.parent.relative_to(gpu_jobs.ROOT).as_posix() for path in needing if path.parent != folder}
    assert folders == {word for word in gpu_jobs.TESTS if word.startswith("tests/")}


def test_describes_the_machine_without_nvidia_smi_too(monkeypatch):
    monkeypatch.setattr(gpu_jobs.shutil, "which", lambda name: None)
    assert gpu_jobs.watched() == {}
    said = SimpleNamespace(stdout="41, 1980\n")
    monkeypatch.setattr(gpu_jobs.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpu_jobs.subprocess, "run", lambda *arguments, **how: said)
    assert gpu_jobs.asked("temperature.gpu", "clocks.sm") == {"temperature.gpu": "41", "clocks.sm": "1980"}


def test_rating_products_leaves_their_precision_as_it_was():
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore[reportAttributeAccessIssue]  # a module made at run time
    before = [one.fp32_precision for one in settings]
    gpu_jobs.calibrate(torch.device("cpu"), side=32, copied=2**16)
    assert [one.fp32_precision for one in settings] == before


def test_mechanisms_with_all_pairs_run_on_short_inputs_only():
    short, long = ({case.name for case in gpu_cases.of_suite("attention", length)} for length in (512, 8192))
    assert short - long == {"full"}


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("suite", gpu_cases.SUITES)
def test_exact_topk_is_verified(monkeypatch, suite):
    monkeypatch.setattr(gpu_cases, "FEW", ("exact-topk",))
    result = gpu_verify.verify(suite, "exact-topk", torch.float32, CPU, [(1, 100, 1)])
    assert result["status"] == "ok"
    assert result["kernels"] == ["topk_attention"]


def test_models_without_padding_get_no_mask_for_being_captured(monkeypatch):
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    assert import_utils.is_tracing()
    with gpu_cases._unmasked():
        assert not import_utils.is_tracing()
    assert import_utils.is_tracing()
