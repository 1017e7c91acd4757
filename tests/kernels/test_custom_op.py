"""Kernels as operators: compiled, differentiated, counted, and side by side in one process."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

SOURCE = """
from __future__ import annotations

import torch
from torch import Tensor

from approx_kernels.runtime.custom_op import custom_op


def _like(x: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return torch.empty_like(x)


def _grad(ctx, grad):
    return scaled_backward(grad, ctx.scale), None if ctx.alone else grad, None


def _keep(ctx, inputs, output):
    ctx.scale, ctx.alone = inputs[2], inputs[1] is None


def _count(x, bias, scale, out_shape=None):
    return 2 * x[0] * x[1]


@custom_op(_like, flops=_count, backward=_grad, save=_keep)
def scaled(x: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return FACTOR * scale * x + (0 if bias is None else bias)


@custom_op(lambda grad, scale: torch.empty_like(grad))
def scaled_backward(grad: Tensor, scale: float) -> Tensor:
    return FACTOR * scale * grad
"""


def loaded(name: str, folder: Path, factor: float):
    """A module of that name with its own operator, as a converted folder brings one."""
    path = folder / f"{abs(hash(name))}-{factor}.py"
    path.write_text(f"{SOURCE}\nFACTOR = {factor}\n")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def module(tmp_path):
    return loaded("some.package.scaling", tmp_path, 1.0)


def test_runs_as_an_operator_under_observers(module, monkeypatch):
    through, operator = [], module.scaled.operator
    monkeypatch.setattr(module.scaled, "operator", lambda *args: through.append(1) or operator(*args))
    x, learnt = torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)

    def seen(one) -> bool:
        through.clear()
        module.scaled(one, None, 2.0)
        return bool(through)

    assert not seen(x)
    assert seen(learnt)
    assert seen(x.to("meta"))
    with torch.no_grad():
        assert not seen(learnt)
    with torch.inference_mode():
        assert not seen(x)
    with FlopCounterMode(display=False):
        assert seen(x)
    with torch.profiler.profile() as profile:
        assert seen(x)
    assert any(event.key.endswith("::scaled") for event in profile.key_averages())
    with FakeTensorMode() as mode:
        assert seen(mode.from_tensor(x))
    with torch.device("cpu"):
        assert seen(x)
    torch.func.vmap(lambda one: one * seen(one))(x)
    assert through


@pytest.mark.parametrize("way", ["torch.func", "dual level"])
def test_an_operator_refuses_tangents_instead_of_losing_them(module, way):
    x = torch.randn(2, 3)

    def push() -> object:
        if way == "torch.func":
            return torch.func.jvp(lambda x: module.scaled(x, None, 2.0), (x,), (x,))
        with forward_ad.dual_level():
            return module.scaled(forward_ad.make_dual(x, x), None, 2.0)

    with pytest.raises(NotImplementedError, match=r"scaled has no forward-mode derivative\. Ask for impl='reference'"):
        push()


def test_an_operator_passes_opcheck(module):
    x, bias = torch.randn(2, 3, 4, requires_grad=True)
    opcheck(module.scaled.operator, (x, bias, 2.0))
    opcheck(module.scaled.operator, (x, None, 2.0))


def test_it_is_compiled_without_a_break(module):
    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(lambda x: module.scaled(x, None, 2.0).sin(), fullgraph=True, backend="aot_eager")
    out = compiled(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, (2 * x).sin())
    assert torch.equal(grad, 2 * (2 * x).cos())


def test_its_operations_are_counted(module):
    with FlopCounterMode(display=False) as counter:
        module.scaled(torch.randn(3, 4), None, 2.0)
    assert counter.get_total_flops() == 24


def test_copies_under_other_names_do_not_collide(tmp_path):
    x = torch.randn(3, 4)
    package = loaded("approx_kernels.scaling", tmp_path, 1.0)
    folder = loaded("transformers_modules.my-folder_é.approx_kernels_scaling", tmp_path, 2.0)
    other = loaded("transformers_modules.my_folder_e.approx_kernels_scaling", tmp_path, 3.0)
    assert [torch.equal(m.scaled(x, None, 1.0), f * x) for m, f in ((package, 1), (folder, 2), (other, 3))] == [
        True
    ] * 3


def test_a_module_that_is_read_again_replaces_its_operator(tmp_path):
    x = torch.randn(3, 4)
    loaded("approx_kernels.scaling", tmp_path, 1.0)
    again = loaded("approx_kernels.scaling", tmp_path, 5.0)
    assert torch.equal(again.scaled(x, None, 1.0), 5 * x)


@pytest.mark.sample(0)
def test_files_can_be_imported_without_triton():
    code = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import approx_kernels, approx_kernels.gpu.language as language
assert language.tl is None
for module in pkgutil.walk_packages(approx_kernels.__path__, "approx_kernels."):
    importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2] / "kernels")
