"""A tiny classifier, its task, and a training of a second."""

from pathlib import Path
from typing import Any

import torch

from approx.conversion import surgery
from approx.finetuning.finetune import finetune
from approx.finetuning.options import FinetuneStage
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
