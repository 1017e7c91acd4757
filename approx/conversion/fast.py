"""The call of a model with its products on the CPU at full speed; travels with converted checkpoints."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting
from transformers.pytorch_utils import Conv1D

from approx_kernels.compiled_layers import compiled_layers
from approx_kernels.few_rows import few_rows_linear, worth_rows
from approx_kernels.half_products import BY_INPUT, BY_OUTPUT, half_products
from approx_kernels.layers import layers_by
from approx_kernels.products import FEATURES, fast_products
from approx_kernels.tiled_layers import tiled_linear, worth_tiles

# Samples of sound that the families turn into one row.
_FRAME = 320


def fast_products_for(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[bool]:
    """A context around `model(*args, **kwargs)` in which its products are fast, if it has rows enough to gain by it.

    It is put back when the call ends, also by an error; calls may be nested and run in several threads.
    """
    # What is exported runs elsewhere.
    if is_exporting():
        return nullcontext(False)
    device, dtype = model.device, model.dtype
    single = device.type == "cpu" and dtype == torch.float32
    if single and is_compiling():
        return compiled_layers(switched=False)
    names = (model.main_input_name, "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
    given = (*args[:1], *(kwargs.get(name) for name in names))
    rows = max([0, *(_rows(each) for each in given if isinstance(each, Tensor))])
    if single and model._compiled_call_impl is not None:
        return _around_graph(rows, _features(model))
    for product, worth_it in ((few_rows_linear, worth_rows), (tiled_linear, worth_tiles)):
        worth = worth_it(rows, device, dtype)
        if any(least <= rows <= most for least, most in worth.values()):
            return layers_by(product, [(layer, how) for layer, how in _layers(model) if worth[how][0] <= rows], worth)
    if device.type != "cpu" or dtype == torch.float32:
        return fast_products(rows, device, dtype, _features(model))
    layers = _modules(model)
    # What is computed once more in the backward pass would be computed otherwise there, which PyTorch takes for an error.
    if model.training and any(getattr(each, "gradient_checkpointing", False) for each in layers):
        return nullcontext(False)
    layouts = (BY_OUTPUT, BY_INPUT) if any(isinstance(each, Conv1D) for each in layers) else (BY_OUTPUT,)
    return half_products(rows, device, dtype, layouts=layouts)


@contextmanager
def _around_graph(rows: int, features: int) -> Iterator[bool]:
    with compiled_layers(switched=True) as held, fast_products(rows, "cpu", torch.float32, features) as thrown:
        yield held or thrown


def _layers(model: Any) -> list[tuple[nn.Module, str]]:
    """The layers of a model and how their weights lie; none of one in which something was compiled with them inside."""
    modules = _modules(model)
    if any(each._compiled_call_impl is not None or "_orig_mod" in each._modules for each in modules):
        return []
    layouts = {nn.Linear: BY_OUTPUT, Conv1D: BY_INPUT}
    return [(each, layouts[type(each)]) for each in modules if type(each) in layouts]


def _modules(model: nn.Module) -> list[nn.Module]:
    # A tenth of the time that `modules()` takes, which would tell in every token that is decoded.
    found = [model]
    for each in found:
        found += [child for child in each._modules.values() if child is not None]
    return found


def _features(model: Any) -> int:
    """Features of a token; those of a usual model where one of several parts does not say."""
    told = getattr(model.config, "hidden_size", None)
    return told if isinstance(told, int) else FEATURES[-1]


def _rows(x: Tensor) -> int:
    """About how many rows the products of a layer have for an input: token ids, embeddings, features, pixels or sound."""
    if not x.is_floating_point():
        return x.numel()
    return x.numel() // (x.shape[-1] if x.dim() > 2 else _FRAME)
