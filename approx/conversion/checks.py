"""The checks that a conversion must pass before its folder is published."""

import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from approx.checkpoints.bundle import auto_map
from approx.checkpoints.families import stock_class, write_code
from approx.checkpoints.foreign import differences
from approx.checkpoints.integrity import weight_files
from approx.checkpoints.receipt import Check
from approx.conversion import clean_process, layerwise, regime, surgery
from approx.conversion.calibration import all_open, evaluating, exact_below
from approx.conversion.companions import settings
from approx.conversion.layerwise import difference
from approx.conversion.regime import Trial
from approx.conversion.widened import in_float32, widened
from approx.mechanisms import MECHANISMS
from approx.planning import positions
from approx.planning.anatomy import anatomy
from approx.planning.example_inputs import example_inputs
from approx.planning.plan import Plan
from approx.seam.transformers_internals import auto_classes
from approx_kernels.dispatch.implementation import implementation, untold

# Images and spectrograms have fixed lengths, which the exact limit must cover too.
_LONGEST = 4096
# Largest difference allowed, relative to the largest output: rounding through a whole model, but no approximation.
_TOLERANCE = 2e-5


def exact_limit(model: Any, plan: Plan) -> Check:
    """Whether the plan with exact settings of its mechanisms gives the outputs of the stock model.

    Args:
        model: The stock model; it is converted and reverted.
        plan: The plan of the conversion.
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
    length = min(regime.SHORT, positions.limit(model.config) or regime.SHORT)
    inputs = _examples(model, Trial(length, length // 4))
    before = _run(model, inputs)
    # At the exact limit, calibration has no effect.
    surgery.exchange(model, Plan(tuple(rules)))
    try:
        # Warnings about slow settings would concern the exact settings, not the plan's.
        with untold():
            after = _run(model, inputs)
    finally:
        surgery.revert(model)
    error = max(difference(*pair) for pair in zip(_real(after, inputs), _real(before, inputs), strict=True))
    skipped = f"; not checked: {', '.join(sorted(set(inexact)))}" if inexact else ""
    return Check(name, error <= _TOLERANCE, f"relative difference {error:.1e}{skipped}", [length])


def padding(model: Any) -> Check:
    """Whether padding a batch leaves the outputs of padded rows unchanged.

    On a short input the whole model is compared. On an input that its mechanisms approximate, each layer is compared
    with the same inputs, since rounding may change which keys or clusters later layers choose.
    """
    name = "padding cannot matter"
    tried = regime.trials(model)
    padded = _examples(model, tried[0])
    if "attention_mask" not in padded:
        return Check(name, None, f"{type(model).__name__} takes no padding")
    real = padded["attention_mask"][-1].sum().item()
    alone = {key: tensor[-1:, :real] for key, tensor in padded.items()}

    def change() -> float:
        single = _run(model, alone)
        return difference(_run(model, padded)[-1:, : single.shape[1]], single)

    with all_open(model):
        error = change()
        layers = [layerwise.padding(model, trial) for trial in tried]
    if error > _TOLERANCE:
        with exact_below(model, sys.maxsize):
            own = change()
        if own > _TOLERANCE:
            # As Wav2Vec2 with group norm does, which is meant to be used without a mask.
            error = 0.0
            if max(layers) <= _TOLERANCE:
                return Check(
                    name,
                    None,
                    f"with exact attention too, this model reads its padding (relative difference {own:.1e})",
                )
    errors = [error, *layers]
    return _compared(name, model, max(errors), [trial.real for trial in tried])


def causality(model: Any) -> Check:
    """Whether changing the last tokens leaves all earlier outputs of a causal model, and of each causal layer, unchanged."""
    name = "no leak from the future"
    sites = model.config.approx["sites"].values()
    tried, errors = regime.trials(model), []
    for trial in tried:
        inputs = {key: tensor[:1] for key, tensor in _examples(model, trial).items() if key != "attention_mask"}
        tokens = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        if not any(site["causal"] for site in sites) or tokens not in inputs:
            return Check(name, None, "no converted layer is causal")
        changed = {**inputs, tokens: inputs[tokens].clone()}
        changed[tokens][:, trial.real :] = (
            changed[tokens][:, trial.real :] + 1
        ) % model.config.get_text_config().vocab_size
        with all_open(model):
            error, before = layerwise.causality(model, trial, inputs)
            after = _run(model, changed)
            errors += [error, difference(after[:, : trial.real], before[:, : trial.real])]
    return _compared(name, model, max(errors), [trial.length for trial in tried])


def weights(folder: Path, reference: dict[str, Tensor], whose: str = "base") -> Check:
    """Whether every tensor of a model stands in the written folder, bit for bit; an extended table begins with the old.

    A tensor may be stored in another dtype than the model computes in.
    """
    written: dict[str, Tensor] = {}
    for path in weight_files(folder):
        written.update(load_file(path))
    shared = {name: tensor for name, tensor in reference.items() if name in written}
    stored = {tensor.data_ptr() for tensor in shared.values()}
    wrong = [name for name, tensor in reference.items() if name not in written and tensor.data_ptr() not in stored]
    wrong += [name for name, tensor in shared.items() if not _begins_with(written[name], tensor.cpu())]
    detail = f"{len(shared)} tensors compared" if not wrong else f"missing or different: {', '.join(wrong[:3])}"
    return Check(f"{whose} weights are bit-equal", not wrong, detail)


def _begins_with(tensor: Tensor, start: Tensor) -> bool:
    return torch.equal((tensor[: start.shape[0]] if start.dim() else tensor).to(start.dtype), start)


def fresh_process(folder: Path, model: Any) -> Check:
    """Whether a new process without approx, approx_kernels and triton loads the folder and gives bit-equal outputs.

    A slim folder runs plain PyTorch there, so it is compared with plain PyTorch here. The process runs the code that this
    version writes, and only if the folder's own code equals it.
    """
    name = "reload without approx is bit-equal"
    stock = stock_class(type(model))
    if foreign := differences(folder, model.config, stock):
        return Check(name, False, f"not run, since {', '.join(foreign)} is not what this version writes")
    auto = next((a for a, head in auto_classes(stock.config_class.model_type).items() if head == stock.__name__), None)  # type: ignore[attr-defined]  # every model class has it
    # Some task heads identify padding by a token that not every config has; without it they take only one row.
    rows = 2 if getattr(model.config, "pad_token_id", None) is not None else 1
    model.to("cpu")
    tried = regime.trials(model)
    # Some mechanisms decode differently from a whole forward pass; only the first call may have a cache.
    uncached = {"use_cache": False} if "use_cache" in signature(model.base_model.forward).parameters else {}
    inputs = [{key: tensor[:rows] for key, tensor in _examples(model, tried[0]).items()}]
    # Long inputs need only the padded row, and no language model head, whose outputs would be large.
    longer = tried[1:] or (tried if uncached else [])
    inputs += [{key: tensor[-1:] for key, tensor in _examples(model, trial).items()} for trial in longer]
    slim = not model.config.approx.get("bundle_kernels", False)
    with (
        implementation("plain") if slim else nullcontext(), evaluating(model), widened(model), all_open(model),
        torch.inference_mode(),
    ):  # fmt: skip
        here = [model(**inputs[0])[0], *(model.base_model(**each, **uncached)[0] for each in inputs[1:])]
    with TemporaryDirectory(prefix="approx-copy-") as scratch:
        _copy_with_our_code(folder, Path(scratch), model)
        try:
            there = clean_process.first_outputs(Path(scratch), auto or "AutoModel", inputs)
        except clean_process.ReloadError as error:
            return Check(name, False, str(error))
    pairs = list(zip(here, there, strict=True))
    largest = max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
    lengths = [tried[0].length, *(trial.real for trial in tried[1:])]
    same = all(torch.equal(*pair) for pair in pairs)
    ran = " in plain PyTorch" if slim else ""
    return Check(name, same, f"largest difference {largest:.1e}{ran}{_at(model, lengths)}", lengths)


def _copy_with_our_code(folder: Path, target: Path, model: Any) -> None:
    """The data of a folder, and beside them code written here: whoever changes the folder meanwhile changes no code."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix == ".safetensors":
            (target / path.name).symlink_to(path.resolve())
        elif path.is_file() and path.suffix == ".json":
            shutil.copyfile(path, target / path.name)
    config = settings(target / "config.json")
    config["auto_map"] = auto_map(stock_class(type(model.config)), stock_class(type(model)))
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_code(target, model.config, stock_class(type(model)))


def _compared(name: str, model: Any, error: float, lengths: list[int]) -> Check:
    detail = f"relative difference {error:.1e}{_at(model, lengths)}"
    return Check(name, error <= _TOLERANCE, detail, lengths)


def _at(model: Any, lengths: list[int]) -> str:
    return f" at {' and '.join(map(str, lengths))} positions{regime.unseen(model, max(lengths))}"


def _examples(model: Any, trial: Trial) -> dict[str, Tensor]:
    """Two rows, the second padded if the family takes padding."""
    return example_inputs(model, trial.length, batch=2, padded=trial.padded, device=model.device)


def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Last hidden states, [B, L, hidden]: task heads that pool or rescale would hide changes at single positions."""
    with evaluating(model), in_float32(model), torch.inference_mode():
        return model.base_model(**inputs)[0]


def _real(hidden: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both rows without padded positions, where outputs are undefined; speech has fewer positions than samples."""
    mask = inputs.get("attention_mask")
    kept = hidden.shape[1] if mask is None else int(hidden.shape[1] * mask[-1].float().mean())
    return hidden[0], hidden[1, :kept]
