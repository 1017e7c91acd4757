"""The private names of PyTorch: fallbacks for versions without them compute the same."""

import ast
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import approx_kernels
from approx.mechanisms import MECHANISMS
from approx_kernels.dispatch import opaque
from approx_kernels.runtime import pytorch

HOME = Path(approx_kernels.__path__[0])


def test_no_other_file_of_the_kernels_uses_a_private_name_of_torch():
    places = []
    for file in HOME.rglob("*.py"):
        if file.name == "pytorch.py":
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in (
                "_C",
                "_version",
                "_int_mm",
                "_dynamo",
                "_guards",
                "_current_level",
            ):
                places.append(f"{file.name}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
                places.append(f"{file.name}:{node.lineno}")
    assert places == []


def test_gradients_inside_an_operator_are_the_same_without_private_names(monkeypatch):
    mechanism = MECHANISMS["block"](2, 8, causal=False, scale=8**-0.5)
    q, k, v, grad = (torch.randn(1, 2, 12, 8) for _ in range(4))

    def gradients():
        out, seed = opaque.attend(q, k, v, None, None, [], opaque.described(mechanism), False, 0.0)
        arguments = (grad, seed, q, k, v, None, None, [], opaque.described(mechanism), False, 0.0)
        return [out, *opaque.attend_backward.operator(*arguments)]

    expected = gradients()
    assert expected[1].abs().sum() > 0
    monkeypatch.setattr(pytorch, "_can_enable_autograd", False)
    for one, other in zip(gradients(), expected, strict=True):
        assert torch.equal(one, other)


def test_products_of_int8_are_the_same_without_the_private_one(monkeypatch):
    a, b = torch.randint(-127, 128, (32, 64), dtype=torch.int8), torch.randint(-127, 128, (64, 24), dtype=torch.int8)
    with FlopCounterMode(display=False) as counter:
        expected = pytorch.int8_product(a, b)
    assert counter.get_total_flops() == 2 * 32 * 64 * 24
    monkeypatch.setattr(pytorch, "_int_mm", None)
    product = pytorch.int8_product(a, b)
    assert product.dtype == expected.dtype == torch.int32
    assert torch.equal(product, expected)


def test_version_counters_follow_changes():
    x = torch.zeros(2)
    before = pytorch.changes(x)
    x.add_(1)
    after = pytorch.changes(x)
    assert before is not None
    assert after == before + 1
    with torch.inference_mode():
        assert pytorch.changes(torch.zeros(2)) is None
