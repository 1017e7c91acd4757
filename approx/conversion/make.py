"""Make a folder: open a checkpoint, operate on it, check the result, and only then give the folder its name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from approx.conversion import checkpoint, export, positions, surgery, verify
from approx.conversion.anatomy import anatomy
from approx.conversion.folder import atomic_folder, refuse_existing
from approx.conversion.inputs import example_inputs
from approx.conversion.plan import Plan
from approx.errors import ApproxError, Exit

_CALIBRATION_TOKENS = 256
_CALIBRATION_TEXT = (
    "The harbour was quiet when the first boats came back. A clerk wrote down what each of them had caught, the weight, "
    "the price and the name of the buyer, and nobody asked why the northern grounds had given so little this year. "
    "In the office above the market two engineers compared the figures with those of the last ten summers. The water had "
    "grown warmer by half a degree, they said, but the fish had left before that; it was the current that had moved. "
    "Their report would be short. It would say what had been measured, how, and how sure one could be of it, and it would "
    "leave the question of what to do to those who had to live with the answer. "
)


def convert(
    name: str | Path,
    out: Path,
    plan: Plan,
    *,
    max_length: int | None = None,
    force: bool = False,
    revision: str | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Convert a checkpoint into a new folder, verified before it gets its name.

    Args:
        name: A folder, a model id of the hub, or `quickstart`.
        out: The folder to make.
        plan: Which layer gets what.
        max_length: Usable positions afterwards, in tokens, if the position table is to be extended.
        force: Whether an existing `out` is replaced, once the new folder is complete.
        revision: Commit of the hub.
        offline: Whether only local files and the hub's cache may be used.
        allow_pickle: Whether pickled weights are accepted.
        progress: Called with the name of each step.

    Returns:
        The receipt as plain data: what was swapped, left and added, the error of each layer, the checks.

    Raises:
        ApproxError: if the checkpoint or the plan is refused, or a check fails (exit code 6; the result is kept beside
            `out` with the suffix `.failed`).
    """
    out = Path(out)
    refuse_existing(out, force=force)
    progress("reading the config")
    source = checkpoint.locate(name, revision=revision, offline=offline, allow_pickle=allow_pickle)
    if source.converted:
        raise ApproxError(
            f"{name} is converted already. Revert it first, or convert its base checkpoint.", Exit.REFUSED
        )
    plan.resolve(anatomy(source.config, source.stock_class))
    progress("loading the weights")
    opened = checkpoint.load(name, revision=revision, offline=offline, allow_pickle=allow_pickle)
    model = opened.model
    progress("checking the exact limit")
    checks = [verify.exact_limit(model, plan)]
    reference = dict(model.state_dict())
    progress("exchanging attention")
    receipt = surgery.convert(model, plan, max_length=max_length)
    model.config.approx["recipe"] = [export.recipe_entry(opened, plan.to_data(), max_length)]
    progress("checking padding and causality")
    checks += [verify.padding(model), verify.causality(model)]
    receipt.errors = verify.layer_errors(model, calibration_batch(source, model))
    with atomic_folder(out, force=force) as folder:
        progress("writing")
        export.write(folder, opened, max_length)
        checks.append(verify.weights(folder, reference))
        progress("reloading in a fresh process")
        checks.append(verify.fresh_process(folder, model))
        data = export.write_receipt(folder, receipt, checks)
        export.write_card(folder, model)
        failed = [check for check in checks if check.passed is False]
        if failed:
            kept = out.with_name(f"{out.name}.failed")
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept)
            found = "; ".join(f"{check.name}: {check.detail}" for check in failed)
            raise ApproxError(
                f"The conversion of {name} did not pass its checks ({found}). Nothing was written to {out}; the result is kept "
                f"as {kept} to look into.",
                Exit.VERIFICATION,
            )
    return {**data, "notes": opened.notes}


def revert(name: str | Path, out: Path, *, force: bool = False) -> None:
    """Write the base checkpoint of a converted folder: the same tensors, without the mechanisms.

    Raises:
        ApproxError: if `name` is not a converted checkpoint, or `out` exists.
    """
    refuse_existing(Path(out), force=force)
    opened = checkpoint.load(name, offline=True)
    if not opened.source.converted:
        raise ApproxError(f"{name} is not a converted checkpoint, so there is nothing to revert.", Exit.REFUSED)
    was_extended = opened.model.config.approx["base"]["positions"] is not None
    surgery.revert(opened.model)
    limit = positions.limit(opened.model.config) if was_extended else None
    with atomic_folder(Path(out), force=force) as folder:
        export.write(folder, opened, limit)


def calibration_batch(source: checkpoint.Source, model: Any) -> dict[str, Tensor]:
    """Inputs on which the damage of each layer is measured: English text where there is a tokenizer, else random input."""
    limit = positions.limit(model.config)
    length = _CALIBRATION_TOKENS if limit is None else min(limit, _CALIBRATION_TOKENS)
    if model.main_input_name != "input_ids":
        return example_inputs(model, length, device=model.device)
    try:
        tokenizer = checkpoint.processor(source)
    except ApproxError:
        return example_inputs(model, length, device=model.device)
    tokens = tokenizer(_CALIBRATION_TEXT * 4, truncation=True, max_length=length)["input_ids"]
    # A vocabulary of another language reads this text as unknown tokens, which says nothing.
    if len(set(tokens)) < length // 4 or max(tokens) >= model.config.vocab_size:
        return example_inputs(model, length, device=model.device)
    return {"input_ids": torch.tensor([tokens], device=model.device)}
