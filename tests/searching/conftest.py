"""A tiny classifier to search in, and a clock that says how long a model takes by what its layers run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from approx.checkpoints.checkpoint import Checkpoint
from approx.evaluation.options import BASE
from approx.evaluation.record import Speed
from approx.measuring.measure import in_memory
from approx.planning.anatomy import Anatomy, anatomy
from approx.planning.rule import Rule
from approx.searching import cost
from approx.searching.cost import Candidate
from tiny_classifier import WORDS, tiny_tokenizer
from typed import part_of
from zoo import tiny

CANDIDATES = (
    Candidate("local 1", Rule("local", settings={"left": 1, "right": 1})),
    Candidate("local 4", Rule("local", settings={"left": 4, "right": 4})),
    Candidate("block 4", Rule("block", settings={"size": 4})),
)


class Clock:
    """In place of `measure_speed`: milliseconds by the mechanism of each layer, so that a search repeats exactly.

    Attributes:
        saved: Mechanism and first setting -> milliseconds that it saves in each layer.
        rest: Milliseconds without attention.
        exact: Milliseconds of exact attention in a layer, at its fastest; the base as it is takes `unchanged` more in
            all.
        crowded: Whether other programs used the machine.
        out_of_memory: Whether exact attention has no room.
        late: Milliseconds by which plans are slower in the proof than predicted.
        raced: The models, the grid and the texts of each call.
        seeds: Its seed.
    """

    def __init__(self) -> None:
        self.saved: dict[tuple[str, Any], float] = {("local", 1): 3.0, ("local", 4): 1.5, ("block", 4): 2.0}
        self.rest, self.exact, self.unchanged, self.crowded = 20.0, 5.0, 1.0, False
        self.out_of_memory = False
        self.late = 0.0
        self.raced: list[tuple[dict[str, Checkpoint], Any, Any]] = []
        self.seeds: list[int] = []

    def milliseconds(self, one: Checkpoint) -> float | None:
        """One forward pass of a checkpoint; None where its memory runs out."""
        config: Any = one.model.config
        total = self.rest + self.exact * config.num_hidden_layers + self.unchanged
        for site in (getattr(config, "approx", None) or {}).get("sites", {}).values():
            parts = site.get("groups", [site])
            heads = [len(part["heads"]) for part in parts] if "groups" in site else [config.num_attention_heads]
            for part, count in zip(parts, heads, strict=True):
                first = next(iter(part["settings"].values()), None)
                saved = self.saved.get((part["mechanism"], first), 0.0)
                total -= saved * count / config.num_attention_heads
        return total

    def __call__(self, opened: Any, stage: Any, texts: Any, *, seed: int, progress: Any) -> list[Speed]:
        progress("bench", 0, 1)
        self.raced.append((dict(opened), stage, texts))
        self.seeds.append(seed)
        base = self.rest + self.exact * opened[BASE].model.config.num_hidden_layers
        proof = any(name.startswith("finalist") for name in opened)

        def timed(milliseconds: float | None) -> dict[str, Any]:
            milliseconds = milliseconds and milliseconds + self.late * proof
            ratio = None if milliseconds is None else base / milliseconds
            interval = None if ratio is None else [0.99 * ratio, 1.01 * ratio]
            status = "ok" if milliseconds else "out of memory"
            return {"median_ms": milliseconds, "ratio": ratio, "interval": interval, "status": status}

        variants = [
            {"name": name, "share_of_ceiling": 0.5, "verdict": "faster", **timed(self.milliseconds(one))}
            for name, one in opened.items()
            if name != BASE
        ]
        row = part_of(
            Speed,
            length=stage.lengths[0],
            batch=stage.batches[0],
            crowded=self.crowded,
            base={"median_ms": None if self.out_of_memory else base, "status": "ok"},
            ceiling={"median_ms": self.rest, "ratio": base / self.rest, "interval": None, "status": "ok"},
            variants=variants,
        )
        return [row]


@pytest.fixture
def clock(monkeypatch, own_cache) -> Clock:
    made = Clock()
    monkeypatch.setattr(cost, "measure_speed", made)
    return made


@pytest.fixture(scope="session")
def base() -> Checkpoint:
    """A classifier of three layers, whose attention matters: its weights are large."""
    torch.manual_seed(0)
    model = tiny(
        "BertForSequenceClassification",
        0,
        vocab_size=len(WORDS),
        num_hidden_layers=3,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return in_memory(model, tiny_tokenizer())


@pytest.fixture(scope="session")
def facts(base) -> Anatomy:
    return anatomy(base.model.config, type(base.model))


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Four thousand words in random order."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(np.random.default_rng(0).choice(WORDS[4:], 4000)), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def sentences(tmp_path_factory) -> Path:
    """120 sentences of random words in the layout of SST-2, with random labels."""
    folder = tmp_path_factory.mktemp("sentences") / "SST-2"
    folder.mkdir()
    random = np.random.default_rng(1)
    rows = [f"{' '.join(random.choice(WORDS[4:], random.integers(6, 40)))}\t{random.integers(2)}" for _ in range(120)]
    (folder / "dev.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    return folder
