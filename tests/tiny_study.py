"""A whole study of a few kilobytes: a checkpoint with its tokenizer, a task in the official layout, a recipe."""

from pathlib import Path

import torch

from tiny_classifier import tiny_model, tiny_tokenizer

LABELS = ["negative", "positive"]
SENTENCES = ("the film is good", "the film is bad", "very dull", "not bad", "fine", "the film is not very good")


def tiny_checkpoint(folder: Path, positions: int = 32) -> Path:
    """A BERT of two layers for SST-2 with random weights."""
    torch.manual_seed(0)
    tiny_model(2, LABELS, positions=positions).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = positions
    tokenizer.save_pretrained(folder)
    return folder


def tiny_data(folder: Path, rows: int = 24) -> Path:
    """SST-2 in its official layout, in a folder of that name."""
    lines = [f"{SENTENCES[row % len(SENTENCES)]}\t{row % 2}" for row in range(rows)]
    (folder / "SST-2").mkdir(parents=True)
    (folder / "SST-2" / "dev.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")
    return folder / "SST-2"


def tiny_recipe(file: Path, checkpoint: Path, data: Path) -> Path:
    """One variant, one task, one grid: the fastest complete run."""
    file.write_text(
        f"""title: A tiny study
checkpoint: {checkpoint}
variants: {{linear: {{mechanism: linear, layers: -1}}}}
evaluate: {{task: glue/sst2, data: {data}, margin: 0.5}}
bench: {{lengths: 8, rounds: 3, seconds: 0}}
device: cpu
""",
        encoding="utf-8",
    )
    return file


def small_recipe(file: Path, checkpoint: Path, data: Path) -> Path:
    """Two variants, one task, two grids."""
    file.write_text(
        f"""title: A tiny study
checkpoint: {checkpoint}
variants:
  local 2: {{mechanism: local, settings: {{left: 2, right: 2}}}}
  linear: {{mechanism: linear, layers: -1}}
evaluate:
  - {{task: glue/sst2, data: {data}, margin: 0.5}}
bench:
  - {{lengths: [8, 16], rounds: 3, seconds: 0}}
  - {{lengths: 64, max_length: 64, inputs: synthetic, rounds: 3, seconds: 0}}
device: cpu
""",
        encoding="utf-8",
    )
    return file
