"""What can be asked of a comparison: options of evaluate and of bench, each said once."""

from typing import Annotated, Any, Literal

from pydantic import Field

from approx.validation import Count, Counts, Model


class EvaluateOptions(Model):
    """How models are scored.

    Attributes:
        split: Which split; the task's own default without it.
        limit: Use only the first so many examples; the result is then labelled a subset.
        streaming: Whether a hub dataset is read as it is downloaded, no further than the limit, and not kept.
        batch_size: Inputs per batch, or `auto`: as many as fit, by their length.
        margin: Loss in points that would be acceptable.
        max_length: Read no more tokens than this, with `truncate`; as many as the positions allow without it.
        truncate: Whether inputs that are longer are cut instead of refused.
        seeds: How many draws of each variant's mechanisms are scored, its own first.
    """

    split: str | None = None
    limit: Count | None = None
    streaming: bool = False
    batch_size: Count | Literal["auto"] = 32
    margin: Annotated[float, Field(ge=0)] = 1.0
    max_length: Count | None = None
    truncate: bool = False
    seeds: Count = 1

    @property
    def inputs_per_batch(self) -> int | None:
        """Inputs a batch; None where their length decides."""
        return None if self.batch_size == "auto" else self.batch_size


class EvaluateStage(EvaluateOptions):
    """One task on which base and variants are compared.

    Attributes:
        task: Name of the task, e.g. `glue/sst2`.
        data: Folder or file in the official layout; the hub or the task's generator without it.
        settings: Of the task itself, e.g. the length of generated documents.
        fast_products: Whether all models run within `approx.fast_products()`.
    """

    task: Annotated[str, Field(examples=["glue/sst2"])]
    data: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    fast_products: bool = False


class BenchStage(Model):
    """One grid of lengths and batch sizes at which base and variants are timed.

    Attributes:
        lengths: Tokens per sequence.
        batches: Sequences per call.
        max_length: Extend the position tables to so many tokens, for the timing only.
        inputs: `real` (texts of the first task) or `synthetic` (random tokens).
        rounds: Rounds at least; disturbed ones are made up for by at most as many again.
        seconds: Seconds of rounds at least, for each length and batch size.
        fast_products: Whether all models run within `approx.fast_products()`.
    """

    lengths: Annotated[Counts, Field(examples=["[128, 512]"])]
    batches: Counts = Field(default_factory=lambda: [1])
    max_length: Count | None = None
    inputs: Literal["real", "synthetic"] = "real"
    rounds: Annotated[int, Field(ge=3)] = 12
    seconds: Annotated[float, Field(ge=0)] = 1.0
    fast_products: bool = False
