"""The options of a comparison from scratch, and the sizes that they begin with."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from approx.finetuning.options import Rate
from approx.validation import Count, Duration, Model, listed, seconds

TaskName = Literal["listops", "text", "retrieval", "image", "pathfinder", "pathfinder-128"]
SizeName = Literal["tiny", "small", "full"]
Pool = Literal["first", "mean"]
EXACT = "exact"
"""The control: the same encoder with the softmax attention that it was built with."""


@dataclass(frozen=True)
class Size:
    """Everything about one task that decides how long it takes.

    Attributes:
        length: Symbols of an input at most; of each document in retrieval, and of an image all of its pixels.
        examples: Training examples, of which some are held out to choose the best step.
        test_examples: Examples that scores are of.
        steps: Steps of each training.
        batch: Inputs of a step.
        layers: Layers of the encoder.
        hidden: Its width; the feed-forward layers are twice as wide.
        heads: Its heads.
        learning_rate: The highest rate.
        rounds: Rounds in which a training step of all mechanisms is timed.
    """

    length: int
    examples: int
    test_examples: int
    steps: int
    batch: int
    layers: int = 2
    hidden: int = 64
    heads: int = 2
    learning_rate: float = 1e-3
    rounds: int = 8


_TINY = {"layers": 1, "hidden": 16, "rounds": 3}
_FULL: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4, "learning_rate": 3e-4}
SIZES: dict[SizeName, dict[TaskName, Size]] = {
    "tiny": {
        "listops": Size(32, 80, 40, 6, 8, **_TINY),
        "text": Size(64, 80, 40, 6, 8, **_TINY),
        "retrieval": Size(32, 80, 40, 6, 8, **_TINY),
        "image": Size(256, 40, 20, 3, 4, **_TINY),
        "pathfinder": Size(1024, 20, 10, 2, 2, **_TINY),
        "pathfinder-128": Size(16_384, 10, 4, 1, 1, **_TINY),
    },
    "small": {
        "listops": Size(256, 8000, 1000, 600, 16),
        "text": Size(512, 8000, 1000, 500, 16),
        "retrieval": Size(256, 8000, 1000, 500, 16),
        "image": Size(1024, 4000, 500, 300, 8),
        "pathfinder": Size(1024, 4000, 500, 300, 8),
        "pathfinder-128": Size(16_384, 100, 50, 20, 1),
    },
    "full": {
        "listops": Size(2000, 96_000, 2000, 5000, 32, **_FULL),
        "text": Size(4000, 25_000, 25_000, 20_000, 32, **_FULL),
        "retrieval": Size(4000, 147_000, 17_000, 5000, 32, **_FULL),
        "image": Size(1024, 50_000, 10_000, 35_000, 256, **_FULL),
        "pathfinder": Size(1024, 160_000, 20_000, 62_000, 512, **_FULL),
        "pathfinder-128": Size(16_384, 160_000, 20_000, 62_000, 64, **_FULL),
    },
}
"""`tiny` takes seconds, `small` about half an hour a task on two cores by estimate, `full` has the paper's lengths and needs a GPU."""


class ArenaStage(Model):
    """What is trained from scratch and compared.

    Attributes:
        tasks: Tasks: listops, text, retrieval, image, pathfinder (32 × 32 pixels), pathfinder-128.
        mechanisms: Mechanisms, separated by commas; `approx mechanisms` lists them. Exact attention is always trained too, as
            the control.
        seeds: Trainings of each mechanism, which differ in first weights, order of examples and the mechanism's own seed.
        size: Lengths, examples, steps and encoder: tiny (seconds), small (about half an hour a task on two cores, by estimate) or full (the
            paper's lengths, for a GPU). The next options change single values.
        length: Symbols of an input at most, in listops, text and retrieval.
        examples: Training examples.
        test_examples: Examples that scores are of.
        steps: Steps of each training.
        batch_size: Inputs of a step.
        learning_rate: The highest rate.
        time_budget: Time of each training, e.g. 5m; it ends when steps or time run out. Without it, all have the same steps.
        layers: Layers of the encoder.
        hidden: Its width.
        heads: Its heads.
        pool: What is classified: the first token as in the paper, or the mean of all.
        data: Task -> its files; what has none is generated, or comes from the hub.
        settings: Mechanism -> its settings. Windows have by default a sixteenth of the length at most.
    """

    tasks: Annotated[list[TaskName], Field(min_length=1), BeforeValidator(listed)] = Field(
        default_factory=lambda: ["listops"]
    )
    mechanisms: Annotated[list[str], Field(min_length=1), BeforeValidator(listed)] = Field(
        default_factory=lambda: [EXACT, "linear", "performer", "clustered", "local"]
    )
    seeds: Annotated[int, Field(ge=1, le=100)] = 3
    size: SizeName = "small"
    length: Annotated[int | None, Field(ge=16, le=131_072)] = None
    examples: Annotated[int | None, Field(ge=10)] = None
    test_examples: Count | None = None
    steps: Count | None = None
    batch_size: Count | None = None
    learning_rate: Rate | None = None
    time_budget: Duration | None = None
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    pool: Pool = "first"
    data: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        """The time budget of a training in seconds."""
        return None if self.time_budget is None else seconds(self.time_budget)

    @property
    def contenders(self) -> list[str]:
        """The mechanisms, each once, exact attention first."""
        return list(dict.fromkeys([EXACT, *self.mechanisms]))

    def of(self, task: TaskName) -> Size:
        """The size of a task, with what these options change."""
        usual = SIZES[self.size][task]
        changes: dict[str, Any] = {
            "length": self.length if task in ("listops", "text", "retrieval") else None,
            "batch": self.batch_size,
            **{
                name: getattr(self, name)
                for name in ("examples", "test_examples", "steps", "learning_rate", "layers", "hidden", "heads")
            },
        }
        return replace(usual, **{name: value for name, value in changes.items() if value is not None})
