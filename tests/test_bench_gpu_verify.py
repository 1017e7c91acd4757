"""`auto` uses kernels that the GPU script verified: all cases of an op must be right, with the present sources."""

import argparse
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from approx.doctor import probing
from approx.mechanisms import MECHANISMS
from approx_kernels.dispatch import checked, findings
from approx_kernels.dispatch.checked import Check, check_of
from bench import gpu, gpu_cases, gpu_jobs, gpu_page, gpu_verify, pages

pytest.importorskip("triton")

WANTED = [{"suite": suite, "dtype": "bfloat16", "name": "linear"} for suite in gpu_cases.SUITES]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, own_cache):
    monkeypatch.setattr(findings, "_known", {})


def verified(**changed):
    return [
        {
            "kind": "verification",
            **one,
            "status": "ok",
            "kernels": ["linear_attention"],
            "sources": gpu_verify.sources(one["suite"], one["name"]),
        }
        | changed
        for one in WANTED
    ]


def test_an_op_passes_if_all_its_cases_are_right():
    assert gpu_verify.checks(verified(), WANTED) == {"linear_attention": Check(["bfloat16"], {})}


def test_an_incomplete_or_outdated_verification_gives_no_check():
    assert gpu_verify.checks(verified()[:2], WANTED) == {}
    assert gpu_verify.checks(verified(kernels=[]), WANTED) == {}
    assert gpu_verify.checks(verified(sources={"linear_attention": "others"}), WANTED) == {}
    assert gpu_verify.checks(verified(sources={"linear_attention": "others"}, status="failed: out"), WANTED) == {}


def test_one_case_that_is_wrong_or_lost_fails_its_op():
    wrong = [*verified()[:2], verified()[2] | {"status": "failed: out has error 1"}]
    by_op = gpu_verify.checks(wrong, WANTED)
    why = "linear in attention-padded failed: out has error 1"
    assert by_op == {"linear_attention": Check([], {"bfloat16": why})}
    lost = [{**WANTED[0], "kind": "verification", "error": "linear: it did not end within 240 s"}]
    assert "did not end" in gpu_verify.checks(lost, WANTED)["linear_attention"].wrong["bfloat16"]


def test_verifies_changed_sources_again():
    (one, *_) = verified()
    assert not gpu._unfinished(one)
    assert gpu._unfinished(one | {"sources": {"linear_attention": "others"}})


def test_every_op_and_every_mechanism_that_runs_one_is_in_the_checks():
    asked = gpu.checked()
    assert {op for one in asked for op in gpu_verify.ops_of(one["suite"], one["name"])} == set(checked.OPS)
    assert {one["dtype"] for one in asked} == {"bfloat16", "float16", "float32"}
    # Ops that use PyTorch alone, and one made of other ops.
    assert set(MECHANISMS) - set(gpu_verify.RUN_BY) <= {"full", "sdpa", "exact", "head-groups"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU")
def test_every_op_of_performer_runs_its_kernels_in_a_case_of_its_own(monkeypatch):
    name = "performer estimator=positive"
    monkeypatch.setattr(gpu_cases, "HEADS", 1)
    assert {"suite": "decode", "dtype": "float16", "name": name} in gpu.checked()
    result = gpu_verify.verify_decoding(name, torch.float32, torch.device("cpu"), length=9)
    assert (result["status"], result["kernels"]) == ("ok", ["performer_decode"])
    result = gpu_verify.verify("attention", name, torch.float32, torch.device("cpu"), [(1, 20, 1)])
    assert (result["status"], result["kernels"]) == ("ok", ["performer_attention"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU")
@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_a_run_stores_its_checks_for_doctor_and_page(tmp_path, monkeypatch, right):
    wanted = [{"suite": suite, "dtype": "float32", "name": "linear"} for suite in ("attention", "decode")]
    monkeypatch.setattr(gpu_cases, "HEADS", 1)
    monkeypatch.setattr(gpu, "stages", lambda: (gpu.Stage("checks", 1.0),))
    monkeypatch.setattr(gpu, "checked", lambda: wanted)
    monkeypatch.setattr(gpu_jobs, "calibrate", partial(gpu_jobs.calibrate, side=32, copied=2**16))
    monkeypatch.setattr(gpu_jobs, "verify", partial(gpu_verify.verify, shapes=[(2, 20, 1)]))
    monkeypatch.setattr(gpu_jobs, "verify_decoding", partial(gpu_verify.verify_decoding, length=9))
    if not right:
        monkeypatch.setattr(gpu_verify, "FACTOR", 1e-3)

    def here(jobs, work, keep, **how):
        for job in jobs:
            keep(job, work(job.arguments, lambda row: None, {}))
        return []

    monkeypatch.setattr(gpu, "carry_out", here)
    how = {"output": tmp_path, "budget": 300.0, "tests": False, "only": "*", "lengths": (20,), "device": "cpu"}
    gpu.run(argparse.Namespace(**how), Console(quiet=True))
    text = pages.write_page(gpu_page.report, tmp_path, tmp_path)
    lines = list(probing.of_kernels("cpu"))
    for op in ("linear_attention", "linear_decode"):
        check = check_of(op, "cpu")
        assert check is not None
        assert (list(check.passed), list(check.wrong)) == ((["float32"], []) if right else ([], ["float32"]))
        assert (f"| `{op}` | float32 | – |" in text) == right
        assert any(op in line and well == right for _, well, line in lines)
    if not right:
        assert (
            "linear_attention failed its check in float32, so `auto` uses PyTorch: linear in attention failed"
            in next(line for _, _, line in lines).partition(": out at")[0]
        )
    assert "not checked on this GPU" in lines[-1][2]
    assert "topk_attention" in lines[-1][2]
    # Another probe of exact attention does not change it.
    findings.keep("cpu", "exact attention, float32", {"way": "x"})
    findings.forget(but=checked.ABOUT)
    assert check_of("linear_attention", "cpu") is not None
    assert "exact attention, float32" not in findings.found("cpu")


@pytest.mark.parametrize("apart", [False, True])
def test_the_largest_keys_are_the_same_in_16_bits_where_inputs_are_set_apart(apart):
    how = {"batch": 1, "length": 512, "heads": 2, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    values = gpu_cases.inputs("attention", **how)[0]
    if apart:
        gpu_verify._set_apart(values)
    same = []
    # The mean queries of clusters, of two queries or of all.
    for count in (2, 8, 64, 512):
        scores = values.q.float().unflatten(2, (-1, count)).mean(3) @ values.k.float().mT
        exact, rounded = (x.topk(gpu_verify.KEPT).indices.sort().values for x in (scores, scores.bfloat16().float()))
        same.append(torch.equal(exact, rounded))
        if apart:
            assert torch.equal(exact, torch.arange(gpu_verify.KEPT).expand_as(exact))
            last, first_left_out = scores.topk(gpu_verify.KEPT + 1).values[..., -2:].unbind(-1)
            # By more than numbers of that size in 16 bits are apart.
            assert (last - first_left_out > last.abs() * 2**-7).all()
    assert all(same) is apart


def test_ships_what_the_stored_record_verified():
    record = json.loads((gpu.SHIPPED / "record.json").read_text(encoding="utf-8"))
    assert json.loads(checked.VERIFIED.read_text(encoding="utf-8")) == gpu_verify.shipped(record)


def test_only_current_sources_are_shipped_and_exact_attention_only_where_it_wins():
    def record(*ratios, **changed):
        rows = [{"name": "flash", "against_best": [ratio, ratio, ratio]} for ratio in ratios]
        by_op = {op: (["bfloat16"], {}) for op in ("linear_attention", "flash_attention")}
        flash = {"sources": {"flash_attention": checked.identity("flash_attention")}}
        return {
            "environment": {"capability": "9.0", "gpu": "a card", "triton": "3.6.0"},
            "checks": by_op,
            "verified": [*verified(**changed), verified()[0] | flash],
            "parts": [{"contenders": rows}],
        }

    assert list(gpu_verify.shipped(record(0.8, 1.2))["9.0"]["ops"]) == ["linear_attention", "flash_attention"]
    assert list(gpu_verify.shipped(record(0.8))["9.0"]["ops"]) == ["linear_attention"]
    others = {"linear_attention": "others, torch 2.11.0"}
    assert list(gpu_verify.shipped(record(1.2, sources=others))["9.0"]["ops"]) == ["flash_attention"]


@pytest.mark.parametrize(
    ("changed", "valid"),
    [
        ({}, True),
        ({"capability": (10, 0)}, False),
        ({"triton": "3.6.1"}, True),
        ({"triton": "3.7.0"}, False),
        ({"of": "other sources"}, False),
        ({"obstacle": "ptxas 12.8 writes out of bounds"}, False),
    ],
    ids=str,
)
def test_a_shipped_check_counts_for_the_same_capability_sources_and_compiler(tmp_path, monkeypatch, changed, valid):
    card = {
        "capability": (9, 0),
        "triton": "3.6.0",
        "of": checked.digest("linear_attention"),
        "obstacle": None,
    } | changed
    path = tmp_path / "verified.json"
    one = {"of": card["of"], "passed": ["bfloat16"]}
    path.write_text(json.dumps({"9.0": {"gpu": "a card", "triton": "3.6.0", "ops": {"linear_attention": one}}}))
    monkeypatch.setattr(checked, "VERIFIED", path)
    monkeypatch.setattr(checked, "found", lambda device: {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card["capability"])
    monkeypatch.setattr(checked, "assembler_obstacle", lambda *capability: card["obstacle"])
    monkeypatch.setattr(checked, "triton", SimpleNamespace(__version__=card["triton"]))
    assert check_of("linear_attention", "cuda:0") == (Check(["bfloat16"], {}) if valid else None)
    assert check_of("local_attention", "cuda:0") is None
    assert check_of("linear_attention", "cpu") is None
