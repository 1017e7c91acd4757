"""Train a loaded model mode by mode, and report its score before and after."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from approx.checkpoints import families
from approx.checkpoints.atomic_folder import claim, remove
from approx.checkpoints.integrity import state_sha256
from approx.errors import ApproxError, Exit
from approx.evaluation import distributed
from approx.finetuning import parameters
from approx.finetuning.objectives import exactly
from approx.finetuning.options import FinetuneStage, allowed_loss
from approx.finetuning.phase import Measure, Outcome, Phase, Progress
from approx.finetuning.preparation import Preparation, measure_of, prepare_training, with_adapters
from approx.finetuning.trainer import disk_errors, train
from approx.paths import refuse_leaving
from approx.tasks.metrics import METRICS
from approx.validation import first_mistake
from approx_kernels.runtime.atomic_file import write_whole

_STATE = "training.json"
# Keys of a config that change no number of a training.
_ELSEWHERE = ("_name_or_path", "transformers_version")
# Settings that change while a model trains: by us, by the Trainer, which switches the cache off, and by a pass with labels.
_TOUCHED = ("layerdrop", "use_cache", "problem_type")


class About(BaseModel):
    """What a training is about; another one does not go on with its state. An earlier version did not keep the config."""

    model_config = ConfigDict(strict=True)

    options: dict[str, Any]
    data: str
    model: str
    weights: str
    config: dict[str, Any] | None = None
    sites: dict[str, Any]


class Begun(BaseModel):
    """The state of an unfinished training, in `training.json`.

    Attributes:
        about: The training.
        scored: Whether the two scores below were measured.
        exact: Score with exact attention; None for an exact model.
        before: Score before the first step; None if the model has no score.
        notes: What these scores show about the order of the model's labels.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    about: About
    scored: bool = False
    exact: float | None = None
    before: float | None = None
    notes: list[str] = []


@dataclass
class Healing:
    """The outcome of a training.

    Attributes:
        recover: Modes, in order.
        phases: Outcome of each mode.
        measure: What was measured on the held-out examples: a metric, or `loss`.
        exact: Its value with exact attention before training; None for an exact model.
        before: Its value before the first step; None if the model has no score.
        after: Its value after training.
        held_out: Number of held-out examples.
        examples: Number of training examples.
        data_sha256: Hash of all examples.
        options: The options as given.
        approximated: Share of the training inputs on which the mechanisms approximate; None for an exact model.
        notes: What a user should know.
    """

    recover: list[str]
    phases: list[Outcome]
    measure: str
    exact: float | None
    before: float | None
    after: float | None
    held_out: int
    examples: int
    data_sha256: str
    options: dict[str, Any]
    approximated: float | None
    notes: list[str]

    @property
    def steps(self) -> int:
        """Steps of all modes."""
        return sum(phase.steps for phase in self.phases)

    def to_data(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class BudgetMetError(ApproxError):
    """The budget is met before training.

    Args:
        message: One line for the user.
        healing: The outcome, without any mode.
    """

    def __init__(self, message: str, healing: Healing) -> None:
        super().__init__(message, Exit.REFUSED)
        self.healing = healing


def finetune(
    model: Any,
    processor: Any,
    options: FinetuneStage,
    *,
    folder: Path,
    teacher: Any = None,
    resume: bool = False,
    restart: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Healing:
    """Train a model in place.

    Args:
        model: A transformers model, converted or not.
        processor: Its tokenizer or feature extractor.
        options: Options of the training.
        folder: Folder for checkpoints and finished modes; the caller removes it once the model is saved.
        teacher: The exact model for `distill`; by default a copy of the model with exact attention.
        resume: Whether to continue from the state in the folder.
        restart: Whether to delete an unfinished training in the folder, once everything else is checked.
        progress: Called with the current activity, steps done and total steps.

    Raises:
        ApproxError: if a mode cannot be used, the data do not fit, the budget is met already (exit code 8), the folder holds
            another training, or the loss is not finite.
        Interrupted: after Ctrl-C or SIGTERM; the folder holds the state after the last step.
    """
    progress("read the data", 0, 1)
    prepared = prepare_training(model, processor, options, teacher)
    if restart and distributed.leads():
        claim(folder, "training", "a training", has_begun)
        remove(folder, "training")
    begun = _begun(folder, model, prepared, options, resume=resume)
    with _removed_if_empty(folder) if not resume and distributed.leads() else nullcontext():
        return _trained(folder, model, prepared, options, begun, resume, progress)


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove the folder of a new training after an error, if there is no state to continue from."""
    try:
        yield
    except ApproxError:
        if not any(folder.glob("*/checkpoint-*")) and not any(folder.glob("*/finished.json")):
            remove(folder, "training")
        raise


def _trained(
    folder: Path,
    model: Any,
    prepared: Preparation,
    options: FinetuneStage,
    begun: Begun,
    resume: bool,
    progress: Progress,
) -> Healing:
    progress("score before training", 0, 1)
    again = begun.scored
    if not again:
        exact, before = _before(model, prepared.measure)
        begun = Begun(about=begun.about, scored=True, exact=exact, before=before, notes=prepared.measure.about_labels)
        _keep(folder, begun)
    exact, before = begun.exact, begun.before
    if options.budget is not None:
        prepared.measure.enough = _enough(prepared.measure, exact, before, options)
        if before is not None and prepared.measure.suffices(before) and not again:
            if distributed.leads():
                remove(folder, "training")
            beside = "" if exact is None else f", {exact:.4f} with exact attention"
            raise BudgetMetError(
                f"The budget {options.budget} is met before training: {prepared.measure.name} is {before:.4f} on "
                f"{len(prepared.data.held_out.examples)} held-out examples{beside}. Nothing was trained.",
                _healing(prepared, options, begun, [], before),
            )
    outcomes: list[Outcome] = []
    unused = 0.0
    for number, phase in enumerate(prepared.phases):
        if phase.seconds is not None:
            phase = replace(phase, seconds=phase.seconds + unused)
        place = folder / f"{number}-{phase.mode}"
        finished = _finished(place, model)
        outcomes.append(
            finished or _carried_out(model, phase, prepared, options, place, resume=resume, progress=progress)
        )
        if outcomes[-1].ended == "budget":
            break
        # The next mode gets the time that this one did not need.
        unused = max((phase.seconds or 0.0) - outcomes[-1].seconds, 0.0)
    progress("score after training", 0, 1)
    model.eval()
    after = None if prepared.measure.value is None else prepared.measure.value()
    return _healing(prepared, options, begun, outcomes, after)


def _healing(
    prepared: Preparation, options: FinetuneStage, begun: Begun, outcomes: list[Outcome], after: float | None
) -> Healing:
    return Healing(
        [phase.mode for phase in prepared.phases] if not prepared.adapted else list(options.recover or []),
        outcomes, prepared.measure.name, begun.exact, begun.before, after, len(prepared.data.held_out.examples),
        len(prepared.data.split.examples), prepared.data.sha256, options.model_dump(mode="json", exclude_none=True), prepared.approximated,
        [*prepared.notes, *begun.notes],
    )  # fmt: skip


def _carried_out(
    model: Any, phase: Phase, prepared: Preparation, options: FinetuneStage, place: Path,
    *, resume: bool, progress: Progress,
) -> Outcome:  # fmt: skip
    # Adapters freeze everything else.
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    adapted = phase.mode in prepared.adapted
    if adapted:
        phase = with_adapters(model, phase, prepared, options)
    settings = {name: getattr(model.config, name) for name in _TOUCHED if hasattr(model.config, name)}
    if settings.get("layerdrop") and phase.mode in ("transfer", "distill"):
        # A skipped layer has no output to compare.
        model.config.layerdrop = 0.0
    finished = False
    try:
        outcome = train(
            model, phase, prepared.data, measure_of(phase, prepared, model), place, resume=resume, progress=progress
        )
        finished = True
    finally:
        for name, value in settings.items():
            setattr(model.config, name, value)
        if adapted:
            # After a failure the weights are those from before this mode.
            parameters.remove_adapters(model, merge=finished)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
    with disk_errors(place):
        _finish(place, model, outcome)
    return outcome


def _before(model: Any, measure: Measure) -> tuple[float | None, float | None]:
    if measure.value is None:
        return None, None
    before = measure.value()
    if not families.is_converted(model):
        return None, before
    with exactly(model):
        return measure.value(), before


def _enough(measure: Measure, exact: float | None, before: float | None, options: FinetuneStage) -> float:
    points = allowed_loss(options.budget or "")
    if exact is None:
        why = "this model has none on these examples" if before is None else "this model is exact already"
        raise ApproxError(
            f"The budget {options.budget} is a loss of score against exact attention, and {why}. Leave it out."
        )
    allowed = points / (100 if METRICS[measure.name].fraction else 1)
    return exact + allowed if measure.lower_is_better else exact - allowed


def has_begun(folder: Path) -> bool:
    """Whether a folder holds the state of a training, also of an earlier version, which made no claims."""
    try:
        return isinstance(json.loads((folder / _STATE).read_bytes())["about"]["weights"], str)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _begun(folder: Path, model: Any, prepared: Preparation, options: FinetuneStage, *, resume: bool) -> Begun:
    """Claim a folder for this training, or check that it holds this training; return the stored state."""
    settings = json.loads(model.config.to_json_string(use_diff=False))
    about = {
        "options": options.model_dump(mode="json", exclude={"time_budget", "report_to"}),
        "data": prepared.data.sha256,
        "model": type(model).__name__,
        "weights": state_sha256(model),
        "config": {key: value for key, value in settings.items() if key not in _ELSEWHERE},
        "sites": (getattr(model.config, "approx", None) or {}).get("sites", {}),
    }
    about = About.model_validate(json.loads(json.dumps(about)))
    file = folder / _STATE
    # The leading process removes and writes this file, maybe before another one looks for it.
    found = distributed.agree(file.read_bytes() if distributed.leads() and file.is_file() else None)
    if found is not None and resume:
        for path in folder.rglob("*"):
            refuse_leaving(folder, path)
        kept = _read(file, found)
        known = kept.about.model_dump(exclude_none=True)
        if different := [what for what in known if known[what] != getattr(about, what)]:
            words = {
                "options": "options",
                "data": "examples",
                "model": "a model",
                "weights": "weights",
                "config": "settings in config.json",
                "sites": "mechanisms",
            }
            raise ApproxError(
                f"{folder} holds an unfinished training with other {', '.join(words[what] for what in different)}. Continue it "
                "with the same ones, or start over with --force.",
                Exit.REFUSED,
            )
        if distributed.leads():
            claim(folder, "training", "a training", has_begun)
        return kept
    if found is not None:
        raise ApproxError(
            f"{folder} holds an unfinished training. Continue it with --resume, or start over with --force.",
            Exit.REFUSED,
        )
    if resume:
        raise ApproxError(f"There is nothing to resume: {folder} holds no training.", Exit.UNAVAILABLE)
    kept = Begun(about=about)
    _keep(folder, kept)
    return kept


def _read(file: Path, text: bytes) -> Begun:
    try:
        state = json.loads(text)
        if isinstance(state, dict) and "scored" not in state:
            # An earlier version wrote both scores or none.
            state["scored"] = "before" in state
        return Begun.model_validate(state)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> ApproxError:
    reason = first_mistake(error) if isinstance(error, ValidationError) else " ".join(str(error).split())[:200]
    return ApproxError(
        f"{file} is damaged: {reason}. The training cannot go on from there; start over with --force instead of --resume.",
        Exit.UNAVAILABLE,
    )


def _keep(folder: Path, kept: Begun) -> None:
    if distributed.leads():
        claim(folder, "training", "a training", has_begun)
        write_whole(folder / _STATE, kept.model_dump_json())


def _finish(place: Path, model: Any, outcome: Outcome) -> None:
    """Store the weights after a mode, then remove its checkpoints."""
    # The other processes may still read the best checkpoint.
    distributed.gather(None)
    if not distributed.leads():
        return
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(state, place / "finished.safetensors.tmp")
    (place / "finished.safetensors.tmp").replace(place / "finished.safetensors")
    write_whole(place / "finished.json", json.dumps(asdict(outcome)))
    for checkpoint in place.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def _finished(place: Path, model: Any) -> Outcome | None:
    file = place / "finished.json"
    if not file.is_file():
        return None
    try:
        outcome = TypeAdapter(Outcome).validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        raise _damaged(file, error) from None
    file = place / "finished.safetensors"
    try:
        model.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise _damaged(file, error) from None
    return outcome
