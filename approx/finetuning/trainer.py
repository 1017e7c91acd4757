"""Train one mode with transformers' Trainer, with our losses, validation and order of examples."""

import hashlib
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from approx.errors import ApproxError, Exit
from approx.finetuning.data import Schedule, TrainingData
from approx.finetuning.phase import Measure, Outcome, Phase, Progress
from approx.finetuning.watch import Watch, signals
from approx_kernels.runtime.atomic_file import write_whole

_COMPLETE = "complete.json"
# Bytes of a file that is hashed.
_SMALL = 1_000_000
_NUMBERED = re.compile(r"checkpoint-[0-9]{1,15}").fullmatch
# Share of the steps for warm-up.
_WARM_UP = 0.06


class Interrupted(KeyboardInterrupt):
    """Training was interrupted; the state after the last step is stored."""


def train(
    model: Any, phase: Phase, data: TrainingData, measure: Measure, folder: Path, *, resume: bool, progress: Progress
) -> Outcome:
    """Train a model in place; it ends with the weights of the best step.

    Args:
        model: The model; the Trainer moves it to its device.
        phase: The mode.
        data: Training data.
        measure: The measure that chooses the best step.
        folder: Folder for the checkpoints of this mode.
        resume: Whether to continue from the last complete checkpoint in the folder, if any.
        progress: Called with the current activity, steps done and total steps.

    Raises:
        ApproxError: if the loss is not finite, the processes cannot share a batch, or the disk does not take a checkpoint.
        Interrupted: after Ctrl-C or SIGTERM; a checkpoint of the last step is in the folder.
    """
    trainer = _Trainer(model, phase, data, measure, folder, progress)
    last = last_complete(folder) if resume else None
    for stale in folder.glob("checkpoint-*") if trainer.args.should_save else ():
        if last is None or not (stale / _COMPLETE).is_file():
            shutil.rmtree(stale)
    try:
        with signals(trainer.watch), disk_errors(folder), _damage_reported(trainer, last):
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    finally:
        # Otherwise the forward pass would stay under autocast.
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        vars(model).pop("forward", None)
        if phase.recompute:
            _recomputing(model, "disable")()
    if trainer.watch.stopped:
        raise Interrupted
    return trainer.outcome()


@contextmanager
def _damage_reported(trainer: "_Trainer", last: Path | None) -> Iterator[None]:
    """Report a checkpoint that cannot be read; which errors the libraries raise for its files is not specified."""
    try:
        yield
    except (ApproxError, Interrupted):
        raise
    except Exception as error:
        if last is None or trainer.begun:
            raise
        raise ApproxError(
            f"{last} is damaged: {type(error).__name__}: {' '.join(str(error).split())[:200]}. Delete it to continue from the one "
            "before, or start over with --force instead of --resume.",
            Exit.UNAVAILABLE,
        ) from error


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Report a checkpoint that cannot be written, and the state that is still there."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        kept = last_complete(folder)
        state = f"; the state after step {_step(kept)} is kept" if kept else ""
        raise ApproxError(
            f"A checkpoint could not be written to {folder}: {getattr(error, 'strerror', None) or error}{state}. Free space, then "
            "continue with --resume.",
            Exit.UNAVAILABLE,
        ) from None


def last_complete(folder: Path) -> Path | None:
    """The latest complete checkpoint; None if there is none."""
    whole = [path for path in folder.glob("checkpoint-*") if (path / _COMPLETE).is_file() and _NUMBERED(path.name)]
    return max(whole, key=_step, default=None)


def _hashes(checkpoint: Path) -> dict[str, str]:
    """Hashes of the small files of a checkpoint: the state of the training, but not tensors, which may be many gigabytes."""
    small = (path for path in checkpoint.iterdir() if path.is_file() and path.stat().st_size <= _SMALL)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in small if path.name != _COMPLETE}


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


class _Trainer(Trainer):
    def __init__(
        self, model: Any, phase: Phase, data: TrainingData, measure: Measure, folder: Path, progress: Progress
    ) -> None:
        self.phase, self.data, self.measure = phase, data, measure
        self.trained: Any = model
        self.watch = Watch(self, progress)
        self.begun = False
        chosen = set(phase.trained)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
        if phase.recompute:
            # Observing attention requires the non-reentrant variant.
            _recomputing(model, "enable")({"use_reentrant": False})
        arguments = _arguments(model, phase, measure, folder)
        self.schedule = schedule = Schedule(data, phase.batch_size, phase.steps, phase.seed)
        super().__init__(
            model=model, args=arguments, train_dataset=schedule, eval_dataset=schedule, data_collator=self._collated,
            callbacks=[self.watch, *([EarlyStoppingCallback(phase.patience)] if phase.patience else [])],
        )  # fmt: skip
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        # Losses are batch means over equally large batches, so the Trainer may average them (transformers#47688).
        self.model_accepts_loss_kwargs = False

    def _collated(self, places: list[tuple[int, int]]) -> dict[str, Tensor]:
        return self.data.batch([row for row, _ in places], places[0][1])

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        # The schedule is the order.
        return SequentialSampler(self.schedule)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # All of a checkpoint was read.
        self.begun = True
        inner = self.accelerator.unwrap_model(model)
        loss = self.phase.objective.loss(model, inner, inputs)
        if self.phase.penalty:
            loss = loss + self.phase.penalty * inner.attention_penalty().to(loss.device)
        if not loss.requires_grad:
            raise ApproxError(
                f"Nothing that '{self.phase.mode}' trains changes its loss: the mechanisms are exact on inputs this short, with the spans "
                "they have. Use longer inputs (--min-length), a --penalty above 0 for spans, or another mode.",
                Exit.UNSUPPORTED,
            )
        if not torch.isfinite(loss):
            kept = last_complete(Path(str(self.args.output_dir)))
            state = "nothing was kept yet" if kept is None else f"the state after step {_step(kept)} is kept in {kept}"
            raise ApproxError(
                f"The loss of '{self.phase.mode}' is {float(loss)} at step {self.state.global_step + 1}; {state}. Lower "
                "--learning-rate, or look for damaged examples.",
                Exit.VERIFICATION,
            )
        self.watch.count(inputs)
        return loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with a separate rate for mechanisms' parameters; only matrices of the base have weight decay."""
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for name, parameter in (self.trained if model is None else model).named_parameters():
            if parameter.requires_grad:
                own = ".mechanism." in name
                rate = self.phase.own_learning_rate if own else self.phase.learning_rate
                groups.setdefault((rate, 0.0 if own or parameter.dim() < 2 else 0.01), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": part, "lr": rate, "weight_decay": decay} for (rate, decay), part in groups.items()]
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Linear warm-up, then cosine decay to 0 at the last step or at the time limit, whichever comes first."""
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self._rate)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _rate(self, step: int) -> float:
        done = max(step / self.phase.steps, self.watch.share_of_time())
        warm = min(1.0, (step + 1) / max(1.0, _WARM_UP * self.phase.steps))
        return warm * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Validate with our measure instead of a loss over an evaluation dataset."""
        assert self.measure.value is not None  # each mode has a loss at least
        value = self.measure.value()
        self.log({f"eval_{self.measure.name}": value})
        metrics = {f"eval_{self.measure.name}": value}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            # Written last, so an incomplete checkpoint lacks it.
            write_whole(folder / _COMPLETE, self.watch.kept(_hashes(folder)))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint is not None:
            self.watch.take((Path(checkpoint) / _COMPLETE).read_bytes(), _hashes(Path(checkpoint)))
        super()._load_optimizer_and_scheduler(checkpoint)

    def outcome(self) -> Outcome:
        history = self.state.log_history
        curve: dict[int, dict[str, float]] = {}
        for entry in history:
            named = {"loss": "loss", "learning_rate": "learning_rate", f"eval_{self.measure.name}": "validation"}
            kept = {ours: float(entry[theirs]) for theirs, ours in named.items() if theirs in entry}
            if kept:
                step = int(entry["step"])
                curve.setdefault(step, {"step": step}).update(kept)
        best = self.state.best_global_step or self.state.global_step
        parameters = sum(p.numel() for name, p in self.trained.named_parameters() if name in set(self.phase.trained))
        return Outcome(
            self.phase.mode, self.state.global_step, best, parameters, self.watch.tokens, round(self.watch.seconds(), 1),
            self.measure.name, list(curve.values()), self.watch.ended,
        )  # fmt: skip


def _recomputing(model: Any, what: str) -> Any:
    """Transformers' method to enable or disable recomputation; newer versions have a new name for it."""
    newer = getattr(model, f"activation_checkpointing_{what}", None)
    return newer or getattr(model, f"gradient_checkpointing_{what}")


def _arguments(model: Any, phase: Phase, measure: Measure, folder: Path) -> TrainingArguments:
    cuda = model.device.type == "cuda"
    made = TrainingArguments(
        output_dir=str(folder), max_steps=phase.steps, gradient_accumulation_steps=phase.accumulate,
        seed=phase.seed, data_seed=phase.seed, use_cpu=not cuda, bf16=phase.bfloat16, max_grad_norm=1.0,
        logging_steps=max(1, phase.steps // 100), logging_nan_inf_filter=False, eval_strategy="steps",
        eval_steps=phase.evaluate_every, save_strategy="steps", save_steps=phase.evaluate_every, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model=f"eval_{measure.name}",
        greater_is_better=not measure.lower_is_better, disable_tqdm=True, log_level="error", log_level_replica="error",
        report_to=phase.report_to or "none", remove_unused_columns=False, dataloader_pin_memory=cuda,
        label_names=["labels", "start_positions", "end_positions"], ddp_find_unused_parameters=phase.mode != "transfer",
    )  # fmt: skip
    shares = made.world_size * phase.accumulate
    if phase.batch_size % shares:
        raise ApproxError(
            f"A step has {phase.batch_size} inputs, which {made.world_size} processes with {phase.accumulate} forward passes each "
            f"cannot share evenly. Give a --batch-size that is a multiple of {shares}."
        )
    made.per_device_train_batch_size = phase.batch_size // shares
    return made
