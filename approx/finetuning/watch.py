"""Callback of the Trainer: time, tokens, random features, progress, and reasons to stop."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from transformers import TrainerCallback

from approx.errors import ApproxError, Exit
from approx.finetuning.phase import Progress


class _Kept(BaseModel):
    """What a checkpoint keeps besides the Trainer's files; an earlier version kept no hashes."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    seconds: float
    tokens: int
    files: dict[str, str] = {}


class Watch(TrainerCallback):
    """Tracks time and tokens, redraws random features, reports progress, and stops training."""

    def __init__(self, trainer: Any, progress: Progress) -> None:
        self._trainer, self._progress = trainer, progress
        self._began, self._before, self.tokens = time.monotonic(), 0.0, 0
        self.stopped, self.ended = False, "steps"
        self._loss = self._validation = float("nan")

    def seconds(self) -> float:
        """Training time so far, including interrupted attempts."""
        return self._before + time.monotonic() - self._began

    def share_of_time(self) -> float:
        """Used share of the time budget; 0 without one."""
        limit = self._trainer.phase.seconds
        return 0.0 if limit is None else self.seconds() / limit

    def count(self, inputs: dict[str, Tensor]) -> None:
        """Count the tokens of a batch."""
        main = next((x for name, x in inputs.items() if name.startswith("input_")), None)
        mask = inputs.get("attention_mask")
        counted = mask.sum().item() if mask is not None else 0 if main is None else main.shape[:2].numel()
        self.tokens += int(counted) // self._trainer.data.task.input_per_token * self._trainer.args.world_size

    def kept(self, files: dict[str, str]) -> str:
        """State to store in a checkpoint, with the hashes of other files in it."""
        return _Kept(seconds=self.seconds(), tokens=self.tokens, files=files).model_dump_json()

    def take(self, text: bytes, files: dict[str, str]) -> None:
        """Restore the state of a checkpoint, whose files have these hashes.

        Raises:
            ValueError: if it or one of the files is damaged.
        """
        kept = _Kept.model_validate_json(text)
        if changed := [name for name, digest in kept.files.items() if files.get(name) != digest]:
            raise ValueError(f"{', '.join(changed)} is not as it was written")
        self._before, self.tokens, self._began = kept.seconds, kept.tokens, time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the best checkpoint in the folder as it is named now; the state names it as it was."""
        if not state.best_global_step:
            return
        best = Path(args.output_dir, f"checkpoint-{state.best_global_step}")
        if not best.is_dir():
            raise ApproxError(
                f"{best}, which has the best weights so far, is missing. Start over with --force instead of --resume.",
                Exit.UNAVAILABLE,
            )
        state.best_model_checkpoint = str(best)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Store the loss for the progress line."""
        self._loss = (logs or {}).get("loss", self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Redraw random features, report progress, and stop on a signal or at the time limit."""
        inner = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if hasattr(inner, "step_attention"):
            inner.step_attention(state.global_step)
        self._say(state)
        late = self.share_of_time() >= 1.0
        if self._agreed(late or self.stopped):
            control.should_training_stop = control.should_save = True
            if late and not self.stopped:
                self.ended = "time"
                control.should_evaluate = True
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> Any:
        """Stop if the budget is met."""
        self._validation = float((metrics or {}).get(f"eval_{self._trainer.measure.name}", float("nan")))
        if self._trainer.measure.suffices(self._validation):
            self.ended = "budget"
            control.should_training_stop = control.should_save = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record early stopping as the reason."""
        if self.ended == "steps" and state.global_step < state.max_steps:
            self.ended = "patience"

    def _agreed(self, stop: bool) -> bool:
        """Return whether any process wants to stop."""
        if self._trainer.args.world_size == 1:
            return stop
        return bool(self._trainer.accelerator.reduce(torch.tensor(float(stop), device=self._trainer.args.device)) > 0)

    def _say(self, state: Any) -> None:
        phase = self._trainer.phase
        rate = self._trainer._get_learning_rate()
        share = max(state.global_step / phase.steps, self.share_of_time(), 1e-9)
        left = self.seconds() * (1 - share) / share
        figures = {"loss": f"{self._loss:.4g}", f"held-out {self._trainer.measure.name}": f"{self._validation:.4g}"}
        told = [f"{name} {value}" for name, value in figures.items() if value != "nan"]
        told += [f"rate {rate:.1e}", f"{self.tokens / self.seconds():,.0f} tokens/s", f"{_told(left)} left"]
        self._progress(" | ".join([phase.mode, *told]), state.global_step, phase.steps)


def _told(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@contextmanager
def signals(watch: Watch) -> Iterator[None]:
    """End training after the current step on Ctrl-C or SIGTERM; a second signal ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if watch.stopped:
            raise KeyboardInterrupt
        watch.stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError):
                signal.signal(number, handler)
