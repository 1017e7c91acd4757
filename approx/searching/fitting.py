"""Fit the parameters of candidates to exact attention before they are measured, as `finetune --recover transfer` does."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from approx.errors import ApproxError, Exit
from approx.finetuning.data import TrainingData
from approx.finetuning.finetune import finetune
from approx.finetuning.objectives import Transfer
from approx.finetuning.options import FinetuneStage
from approx.finetuning.parameters import own_parameters
from approx.finetuning.phase import Measure, Phase
from approx.finetuning.preparation import Preparation, measure_of
from approx.finetuning.trainer import train
from approx.searching.composition import Composer
from approx.searching.judging import Judge
from approx_kernels.runtime.atomic_file import atomic_file

_STEPS, _BATCH, _RATE = 100, 8, 1e-2
_HELD_OUT = 0.1

Advance = Callable[[int, int], None]


def fit(
    composer: Composer, judge: Judge, running: dict[str, Any], file: Path, about: str, seed: int, advance: Advance
) -> None:
    """Fit the mechanisms of uniform models in place, and keep their state for every mix.

    Args:
        composer: Makes the mixes; gets the state.
        judge: Its examples for comparing plans are what the mechanisms are fitted on.
        running: Name of a candidate -> a model with it at every site.
        file: Keeps the state; read instead of fitting if it exists.
        about: Hash of everything that the state depends on.
        seed: Seed of the order of examples.
        advance: Called with steps done and in all.

    Raises:
        ApproxError: if the file is damaged, or its state was fitted for something else.
    """
    fitted = {name: model for name, model in running.items() if own_parameters(model)}
    kept = _read(file, about) if file.is_file() else {}
    for number, (name, model) in enumerate(fitted.items()):
        sites = {site.layer: model.base_model.get_submodule(site.path) for site in composer.anatomy.sites}
        mechanisms = {layer: one.mechanism for layer, one in sites.items() if hasattr(one, "mechanism")}
        if not kept:
            trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
            _train(model, judge, seed, lambda done, start=number: advance(start * _STEPS + done, len(fitted) * _STEPS))
            for parameter, before in trainable.items():
                parameter.requires_grad_(before)
            model.eval()
        for layer, mechanism in mechanisms.items():
            prefix = f"{name}/{layer}/"
            if kept:
                state = {key.removeprefix(prefix): value for key, value in kept.items() if key.startswith(prefix)}
                try:
                    mechanism.load_state_dict(state)
                except RuntimeError as error:
                    raise _damaged(file, error) from None
            composer.fitted[layer, name] = {
                key: value.detach().clone() for key, value in mechanism.state_dict().items()
            }
    if fitted and not kept:
        state = {
            f"{name}/{layer}/{key}": value
            for (layer, name), values in composer.fitted.items()
            for key, value in values.items()
        }
        with atomic_file(file) as temporary:
            save_file(state, temporary, {"about": about})


def _read(file: Path, about: str) -> dict[str, Tensor]:
    try:
        with safe_open(file, "pt") as opened:
            known = (opened.metadata() or {}).get("about")
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from None
    if known != about:
        raise ApproxError(
            f"{file} was fitted for another model, other candidates or other examples. Delete it, and the mechanisms are fitted again, or "
            "start over with --force.",
            Exit.REFUSED,
        )
    return state


def _damaged(file: Path, error: Exception) -> ApproxError:
    return ApproxError(
        f"{file} is damaged: {' '.join(str(error).split())[:200]}. Delete it, and the mechanisms are fitted again, or start over with "
        "--force.",
        Exit.UNAVAILABLE,
    )


def _train(model: Any, judge: Judge, seed: int, advance: Callable[[int], None]) -> None:
    with TemporaryDirectory() as place:
        folder = Path(place)
        if judge.task is None:
            # The rest of the text proves the plan.
            rows = [batch.inputs["input_ids"][0].tolist() for batch in judge.search.batches]
            searched = judge.processor.decode([*chain.from_iterable(rows)], skip_special_tokens=True)
            text = folder / "text.txt"
            text.write_text(searched, encoding="utf-8")
            options = FinetuneStage(
                recover=["transfer"], text=[str(text)], length=max(len(rows[0]), 8), steps=_STEPS, batch_size=_BATCH,
                seed=seed,
            )  # fmt: skip
            finetune(
                model,
                judge.processor,
                options,
                folder=folder / "training",
                # The scores before and after have a progress of their own.
                progress=lambda what, done, total: advance(done) if what.startswith("transfer") else None,
            )
            return
        data = _training_data(model, judge)
        objective = Transfer(model, joint=False, match="outputs")
        phase = Phase(
            "transfer", objective, own_parameters(model), _STEPS, _BATCH, 1, _RATE, _RATE, None, _STEPS // 4, None, 0.0, False, False,
            None, seed,
        )  # fmt: skip
        sample = {name: value.to(model.device) for name, value in data.batch([0], 0).items()}
        measure = measure_of(phase, Preparation(data, [phase], set(), Measure("loss", True, None), sample), model)
        train(
            model,
            phase,
            data,
            measure,
            folder,
            resume=False,
            progress=lambda what, done, total: advance(done),
        )


def _training_data(model: Any, judge: Judge) -> TrainingData:
    task, read = judge.of_task(judge.search)
    examples = read.split.examples
    count = max(1, round(len(examples) * _HELD_OUT))
    trained = replace(read.split, examples=examples[:-count])
    windows: dict[int, int] = {}
    rows, encodings = [], []
    for owner, encoding in zip(read.owners, read.encodings, strict=True):
        window = windows[owner] = windows.get(owner, -1) + 1
        if owner < len(examples) - count:
            rows.append((owner, window))
            encodings.append(encoding)
    held_out = replace(read.split, examples=examples[-count:])
    return TrainingData(task, trained, held_out, rows, encodings, False, None, judge.processor, model.config)
