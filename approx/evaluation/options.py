"""The options of evaluate and bench."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from approx.validation import Count, Counts, Model

BASE, CEILING = "exact", "attention-free"
"""Names of two lines in every report: the base, and the base with its attention replaced by its values."""

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CHOICES = {"device": get_args(Device), "dtype": get_args(Dtype)}
"""The devices and dtypes that measurements run on."""


class EvaluateOptions(Model):
    """Options of an evaluation.

    Attributes:
        split: Split to use; the task's default if not given.
        limit: Use only the first examples, this many; the result is labelled a subset.
        streaming: Read a hub dataset while it downloads, up to the limit, without storing it.
        batch_size: Inputs per batch; `auto` chooses it by their length.
        margin: Acceptable loss: in points, for losses in percent of the base's; the metric's default if not given.
        max_length: Maximum number of tokens to read; the positions of the model if not given.
        truncate: Truncate longer inputs instead of raising an error.
        seeds: Number of random seeds to score for each variant, its own first.
    """

    split: str | None = None
    limit: Count | None = None
    streaming: bool = False
    batch_size: Count | Literal["auto"] = 32
    margin: Annotated[float, Field(ge=0)] | None = None
    max_length: Count | None = None
    truncate: bool = False
    seeds: Count = 1

    @property
    def inputs_per_batch(self) -> int | None:
        """Inputs per batch; None to choose it by their length."""
        return None if self.batch_size == "auto" else self.batch_size


class EvaluateStage(EvaluateOptions):
    """One task to compare base and variants on.

    Attributes:
        task: Name of the task, e.g. `glue/sst2`.
        data: Folder or file in the official layout; the hub or the task's generator if not given.
        settings: Settings of the task, e.g. the length of generated documents.
        fast_products: Run all models within `approx.fast_products()`.
    """

    task: Annotated[str, Field(examples=["glue/sst2"])]
    data: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    fast_products: bool = False


class BenchStage(Model):
    """One grid of lengths and batch sizes to time base and variants at.

    Attributes:
        lengths: Tokens per sequence.
        batches: Sequences per call.
        max_length: Extend the position tables to this many tokens, for timing only.
        inputs: `real` (texts of the first task) or `synthetic` (random tokens).
        rounds: Minimum number of rounds; disturbed ones are repeated, at most doubling the number.
        seconds: Minimum duration of all rounds, for each length and batch size.
        wait_idle: Before each length, wait up to this many seconds until other programs leave the cores free.
        fast_products: Run all models within `approx.fast_products()`.
        mode: `forward`, or `generate` for greedy decoding by a language model after a prompt of each length.
        new_tokens: Tokens to decode after each prompt.
    """

    lengths: Annotated[Counts, Field(examples=["[128, 512]"])]
    batches: Counts = Field(default_factory=lambda: [1])
    max_length: Count | None = None
    inputs: Literal["real", "synthetic"] = "real"
    rounds: Annotated[int, Field(ge=3)] = 12
    seconds: Annotated[float, Field(ge=0)] = 1.0
    wait_idle: Annotated[float, Field(ge=0)] = 0.0
    fast_products: bool = False
    mode: Literal["forward", "generate"] = "forward"
    new_tokens: Count = 16
