"""The checks that a conversion must pass before its folder gets its name."""

from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from approx.conversion import fresh, positions, surgery, travel
from approx.conversion.anatomy import anatomy
from approx.conversion.calibration import evaluating
from approx.conversion.families import stock_class
from approx.conversion.inputs import example_inputs
from approx.conversion.plan import Plan
from approx.mechanisms import MECHANISMS
from approx_kernels.implementation import untold

_LENGTH = 40
# Images and spectrograms have a length of their own, which the exact limit must cover too.
_LONGEST = 4096
# Largest difference allowed, relative to the largest output: rounding through a whole model, not an approximation.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Check:
    """One check of a conversion.

    Attributes:
        name: What was checked.
        passed: Whether it held; None if it does not apply to this model.
        detail: The figure found, or why it does not apply.
    """

    name: str
    passed: bool | None
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """The check as plain data."""
        return asdict(self)


def exact_limit(model: Any, plan: Plan) -> Check:
    """Whether the layers of the plan, set to the limit where their mechanism is exact, leave the stock model as it is.

    Args:
        model: The stock model; it is converted and reverted again.
        plan: The plan to be carried out afterwards.
    """
    name = "exact limit equals the base"
    rules, inexact = [], []
    for rule in chain.from_iterable(plan.resolve(anatomy(model.config, type(model))).values()):
        limit = MECHANISMS[rule.mechanism].exact_settings(_LONGEST)
        if limit is None:
            inexact.append(rule.mechanism)
        else:
            rules.append(replace(rule, settings={**rule.settings, **limit}, exact_below=0))
    if not rules:
        return Check(name, None, f"{', '.join(sorted(set(inexact)))}: no settings are exact")
    inputs = _examples(model)
    before = _run(model, inputs)
    # At the limit nothing depends on what mechanisms are fitted to.
    surgery.exchange(model, Plan(tuple(rules)))
    try:
        # Its settings are others than the plan's, and so is what is slow about them.
        with untold():
            after = _run(model, inputs)
    finally:
        surgery.revert(model)
    error = max(_difference(*pair) for pair in zip(_real(after, inputs), _real(before, inputs), strict=True))
    skipped = f"; not checked: {', '.join(sorted(set(inexact)))}" if inexact else ""
    return Check(name, error <= _tolerance(model), f"relative difference {error:.1e}{skipped}")


def padding(model: Any) -> Check:
    """Whether padding a batch changes nothing for the row that was padded."""
    name = "padding cannot matter"
    padded = _examples(model)
    if "attention_mask" not in padded:
        return Check(name, None, f"{type(model).__name__} takes no padding")
    real = padded["attention_mask"][-1].sum().item()
    alone = {key: tensor[-1:, :real] for key, tensor in padded.items()}
    single = _run(model, alone)
    error = _difference(_run(model, padded)[-1:, : single.shape[1]], single)
    if error > _tolerance(model) and _pads_without_mask(model):
        return Check(name, None, "this model normalises over the padding itself and is meant to be used without a mask")
    return Check(name, error <= _tolerance(model), f"relative difference {error:.1e}")


def causality(model: Any) -> Check:
    """Whether changing the last token leaves every earlier output of a causal model as it was."""
    name = "no leak from the future"
    sites = model.config.approx["sites"].values()
    inputs = {key: tensor[:1] for key, tensor in _examples(model).items() if key != "attention_mask"}
    tokens = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    if not any(site["causal"] for site in sites) or tokens not in inputs:
        return Check(name, None, "no converted layer is causal")
    changed = {**inputs, tokens: inputs[tokens].clone()}
    changed[tokens][:, -1] = (changed[tokens][:, -1] + 1) % model.config.vocab_size
    before, after = _run(model, inputs), _run(model, changed)
    error = _difference(after[:, :-1], before[:, :-1])
    return Check(name, error <= _tolerance(model), f"relative difference {error:.1e}")


def weights(folder: Path, reference: dict[str, Tensor]) -> Check:
    """Whether every tensor of the base stands in the written folder, bit for bit; an extended table begins with the old."""
    written: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        written.update(load_file(path))
    shared = {name: tensor for name, tensor in reference.items() if name in written}
    stored = {tensor.data_ptr() for tensor in shared.values()}
    wrong = [name for name, tensor in reference.items() if name not in written and tensor.data_ptr() not in stored]
    wrong += [name for name, tensor in shared.items() if not _begins_with(written[name], tensor.cpu())]
    detail = f"{len(shared)} tensors compared" if not wrong else f"missing or different: {', '.join(wrong[:3])}"
    return Check("base weights are bit-equal", not wrong, detail)


def _begins_with(tensor: Tensor, start: Tensor) -> bool:
    return torch.equal(tensor[: start.shape[0]] if start.dim() else tensor, start)


def fresh_process(folder: Path, model: Any) -> Check:
    """Whether a new process without approx, approx_kernels and triton loads the folder and gives the same bits."""
    name = "reload without approx is bit-equal"
    stock = stock_class(type(model))
    auto = next((a for a, head in travel.heads(stock.config_class.model_type).items() if head == stock.__name__), None)  # type: ignore[attr-defined]  # every model class has it
    # Some heads tell padding by a token that not every config has, and take one row only without it.
    rows = 2 if getattr(model.config, "pad_token_id", None) is not None else 1
    inputs = {key: tensor[:rows].to("cpu") for key, tensor in _examples(model).items()}
    with evaluating(model.to("cpu")), torch.inference_mode():
        here = model(**inputs)[0]
    try:
        there = fresh.first_output(folder, auto or "AutoModel", inputs)
    except fresh.ReloadError as error:
        return Check(name, False, str(error))
    return Check(name, torch.equal(here, there), f"largest difference {(here.float() - there.float()).abs().max():.1e}")


def _examples(model: Any) -> dict[str, Tensor]:
    """Two rows, the second padded where the family takes padding."""
    length = min(_LENGTH, positions.limit(model.config) or _LENGTH)
    return example_inputs(model, length, batch=2, padded=length // 4, device=model.device)


def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Last hidden states, [B, L, hidden]: heads that pool or rescale would hide what happens at single positions."""
    with evaluating(model), torch.inference_mode():
        return model.base_model(**inputs)[0]


def _real(hidden: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The positions of both rows that are not padding, where outputs have no meaning; speech has fewer than samples."""
    mask = inputs.get("attention_mask")
    kept = hidden.shape[1] if mask is None else int(hidden.shape[1] * mask[-1].float().mean())
    return hidden[0], hidden[1, :kept]


def _difference(found: Tensor, expected: Tensor) -> float:
    largest = expected.float().abs().max().clamp_min(1e-6)
    return float((found.float() - expected.float()).abs().max() / largest)


def _tolerance(model: Any) -> float:
    return _TOLERANCE.get(model.dtype, _TOLERANCE[torch.float32])


def _pads_without_mask(model: Any) -> bool:
    return getattr(model.config, "feat_extract_norm", None) == "group"
