"""Models with 8-bit weights in PyTorch, by torchao: the same products as in `approx export --quantize int8`."""

from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from approx.checkpoints.checkpoint import Checkpoint
from approx.checkpoints.exported import quiet, refuse_missing
from approx.conversion.calibration import mechanisms
from approx.errors import ApproxError, Exit
from approx.evaluation.options import CHOICES

_OPTION = "--quantize"


def refuse_quantising(quantize: str, device: str = "auto") -> None:
    """Check that models can be rounded here, before one is opened.

    Args:
        quantize: The precision of the weights; allowed is `int8`.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        ApproxError: if the precision is unknown, the device is not the CPU, or torchao is missing.
    """
    if quantize not in CHOICES["quantize"]:
        raise ApproxError(f"The precision '{quantize}' is unknown; {_OPTION} takes {', '.join(CHOICES['quantize'])}.")
    if device not in ("auto", "cpu"):
        raise ApproxError(
            f"{_OPTION} {quantize} computes on the CPU only, but the device is '{device}'. Leave out one of them.",
            Exit.UNSUPPORTED,
        )
    with quiet():
        refuse_missing("torchao", what=f"{_OPTION} {quantize}", extra="int8")


def quantise(opened: Checkpoint, quantize: str) -> Checkpoint:
    """Round the weights of a model's linear layers to int8, in place, with a scale for each output.

    Inputs of these layers are rounded too, with a scale for each token, so that products are computed in 8 bits. Biases,
    embeddings, convolutions, norms and all parameters of mechanisms keep their dtype.

    Args:
        opened: A stock or converted checkpoint in float weights on the CPU.
        quantize: As for `refuse_quantising`, which was called before.

    Raises:
        ApproxError: if the model is quantised already, or has no linear layer with float weights.
    """
    model, name = opened.model, opened.source.name
    if opened.source.raw.get("quantization_config") or getattr(model, "quantization_method", None):
        raise ApproxError(
            f"{name} is quantised already. Leave out {_OPTION}, or give the checkpoint from which it was quantised.",
            Exit.UNSUPPORTED,
        )
    _as_linear(model)
    found = mechanisms(model) if opened.source.converted else []
    own = {part for mechanism in found for part in mechanism.modules()}
    # Subclasses of `Linear` may compute something else; a weight that is no plain parameter was rounded before.
    chosen = {
        part
        for part in model.modules()
        if type(part) is nn.Linear and part not in own and type(part.weight) is nn.Parameter
    }
    if not chosen:
        raise ApproxError(
            f"{name} has no linear layers with float weights, which {_OPTION} rounds. Leave it out.", Exit.UNSUPPORTED
        )
    with quiet():
        from torchao.quantization import (  # pyright: ignore[reportMissingImports]  # optional
            Int8DynamicActivationInt8WeightConfig,
            quantize_,
        )
        from torchao.utils import should_reduce_range  # pyright: ignore[reportMissingImports]  # optional

        # Without VNNI, sums of full 8-bit products overflow. Settings of the compiler are the user's.
        reduced = should_reduce_range(model.device)
        config = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, reduce_range=reduced)
        quantize_(model, config, filter_fn=lambda part, _: part in chosen)
    opened.runtime = f"torch {torch.__version__} with torchao {version('torchao')}, {quantize}"
    return opened


def _as_linear(model: Any) -> None:
    """Replace GPT-2's layers with transposed weights, in place, by linear layers that compute the same."""
    for path, part in list(model.named_modules()):
        if isinstance(part, Conv1D):
            inputs, outputs = part.weight.shape
            linear = nn.Linear(inputs, outputs, device="meta")
            linear.weight, linear.bias = nn.Parameter(part.weight.detach().T.contiguous()), part.bias
            model.set_submodule(path, linear.eval())
