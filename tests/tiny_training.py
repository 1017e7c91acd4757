"""A tiny classifier, its task, and a training of a second, which may be interrupted."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from approx.conversion import surgery
from approx.finetuning.finetune import finetune
from approx.finetuning.options import FinetuneStage
from approx.finetuning.trainer import Interrupted
from approx.planning.plan import Plan
from forms import HEDGEHOG
from tiny_classifier import tiny_model, tiny_tokenizer
from tiny_study import LABELS

# The first word decides, so that two layers can learn it in a few steps, whatever they see besides.
ROWS = [f"{word} the film is\t{label}" for word, label in [("good", 1), ("bad", 0), ("fine", 1), ("dull", 0)] * 20]


def write_sst2(folder: Path) -> str:
    (folder / "SST-2").mkdir()
    (folder / "SST-2" / "train.tsv").write_text("\n".join(["sentence\tlabel", *ROWS]) + "\n", encoding="utf-8")
    return str(folder / "SST-2")


def model_of(mechanism: str | None = "linear", **settings: Any) -> Any:
    torch.manual_seed(0)
    model = tiny_model(2, LABELS)
    if mechanism is not None:
        settings = {**HEDGEHOG, "window": 1} if mechanism == "linear" and not settings else settings
        surgery.convert(model, Plan.of(mechanism, **settings))
    return model


def options_of(data: str, **more: Any) -> FinetuneStage:
    usual = {"recover": ["task"], "steps": 20, "batch_size": 8, "learning_rate": 1e-2, "evaluate_every": 5}
    usual["mechanism_learning_rate"] = 1e-2
    return FinetuneStage(task="glue/sst2", data=data, **{**usual, **more})


def trained(model: Any, folder: Path, options: FinetuneStage, **more: Any) -> Any:
    return finetune(model, tiny_tokenizer(), options, folder=folder, **more)


def stopping(at: int | None = None, by: int = signal.SIGINT) -> Callable[[str, int, int], None]:
    """Progress that sends a signal after a step, or after the first one."""

    def progress(what: str, n: int, total: int) -> None:
        if " | " in what and at in (None, n):
            signal.raise_signal(by)

    return progress


def interrupt(
    model: Any, folder: Path, options: FinetuneStage, at: int | None = None, by: int = signal.SIGINT, **more: Any
) -> None:
    """Train until a signal ends it after a step."""
    with pytest.raises(Interrupted):
        trained(model, folder, options, progress=stopping(at, by), **more)


def set_dropout(model: Any, share: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = share


def masking_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer
