"""The effect of padding and of future tokens on each converted layer, with the layer's inputs in the model.

In a whole model, rounding may change which keys or clusters a layer chooses, and all later layers change with it. With
identical queries, keys and values, any difference comes from the mechanism itself or from its mask.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from approx.conversion.calibration import evaluating
from approx.conversion.regime import Trial
from approx.conversion.widened import in_float32
from approx.mechanisms.mechanism import Mechanism
from approx.planning.example_inputs import example_inputs
from approx.seam.observe import Call, observe


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite if any value is not finite."""
    largest = expected.float().abs().max().clamp_min(1e-6)
    error = float((actual.float() - expected.float()).abs().max() / largest)
    return error if error < torch.inf else torch.inf


def padding(model: Any, trial: Trial) -> float:
    """Largest relative difference between the outputs of padded rows and those of their real tokens alone.

    One row is padded on the right; with causal layers, which never see that padding, another one on the left.

    Args:
        model: A converted model whose inputs have an `attention_mask`.
        trial: Size of its inputs.
    """
    causal = any(site["causal"] for site in model.config.approx["sites"].values())
    inputs = example_inputs(model, trial.length, batch=3 if causal else 2, padded=trial.padded, device=model.device)
    own = "attention_mask"
    if causal and "decoder_input_ids" in inputs:
        own = "decoder_attention_mask"
        if own in signature(model.base_model.forward).parameters:
            inputs[own] = torch.ones_like(inputs["decoder_input_ids"])
            inputs[own][-1, trial.real :] = 0
    if causal and own in inputs:
        inputs[own][1] = inputs[own][-1].flip(0)

    def compare(mechanism: Mechanism, call: Call) -> float:
        given = inputs.get(own if mechanism.causal else "attention_mask")
        # Speech has fewer frames than samples, and only the model knows which frames are padding.
        real = given.bool() if given is not None and given.shape == call.k.shape[::2] else call.mask
        if real is None:
            return 0.0
        errors = [0.0]
        for row in (~real.all(1)).nonzero().squeeze(1).tolist():
            place = real[row].nonzero().squeeze(1)
            one = slice(row, row + 1)
            alone = _attend(
                mechanism,
                *(x[one, :, place] for x in (call.q, call.k, call.v)),
                tokens=None if call.tokens is None else call.tokens[one, place],
            )
            errors.append(difference(call.output[one, :, place], alone))
        return max(errors)

    return _largest(model, inputs, compare)[0]


def causality(model: Any, trial: Trial, inputs: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Largest relative change of earlier outputs of causal layers when the last tokens change, and the hidden states.

    Args:
        model: A converted model.
        trial: Size of the inputs; the tokens that would be padding count as the last ones.
        inputs: Inputs without padding.
    """

    def compare(mechanism: Mechanism, call: Call) -> float:
        if not mechanism.causal:
            return 0.0
        # A leak may end at the border of a block; of two adjacent cuts at least one is inside a block.
        first = call.k.shape[2] - trial.padded
        errors = []
        for cut in (first - 1, first):
            other = (torch.cat([x[:, :, :cut], 5 - 3 * x[:, :, cut:]], 2) for x in (call.q, call.k, call.v))
            changed = _attend(mechanism, *other, tokens=call.tokens)
            errors.append(difference(changed[:, :, :cut], call.output[:, :, :cut]))
        return max(errors)

    return _largest(model, inputs, compare)


def _attend(mechanism: Mechanism, *qkv: Tensor, tokens: Tensor | None) -> Tensor:
    return mechanism(*qkv) if tokens is None else mechanism(*qkv, tokens=tokens)


def _largest(
    model: Any, inputs: dict[str, Tensor], compare: Callable[[Mechanism, Call], float]
) -> tuple[float, Tensor]:
    differences = [0.0]

    def on_call(call: Call) -> None:
        if call.mechanism is not None and not call.exact:
            differences.append(compare(call.mechanism, call))

    with observe(model, on_call), evaluating(model), in_float32(model), torch.inference_mode():
        hidden = model.base_model(**inputs)[0]
    return max(differences), hidden
