"""The cases of the GPU benchmark: long inputs skip mechanisms that hold every pair; exact top-k attention is verified."""

import pytest
import torch

from bench import gpu_cases, gpu_verify

pytest.importorskip("triton")


def test_mechanisms_with_all_pairs_run_on_short_inputs_only():
    short, long = ({case.name for case in gpu_cases.of_suite("attention", length)} for length in (512, 8192))
    assert short - long == {"full"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, run the script itself")
@pytest.mark.slow
@pytest.mark.parametrize("suite", gpu_cases.SUITES)
def test_exact_topk_is_verified(monkeypatch, suite):
    monkeypatch.setattr(gpu_cases, "FEW", ("exact-topk",))
    result = gpu_verify.verify(suite, "exact-topk", torch.float32, torch.device("cpu"), [(1, 100, 1)])
    assert result["status"] == "ok"
    assert result["kernels"] == ["topk_attention"]
