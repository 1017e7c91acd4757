"""The options of evaluate and bench."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from approx.validation import Count, Counts, Duration, Model

BASE, CEILING = "exact", "attention-free"
"""Names of two lines in every report: the base, and the base with its attention replaced by its values."""

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantize = Literal["int8"]
CHOICES = {"device": get_args(Device), "dtype": get_args(Dtype), "quantize": get_args(Quantize)}
"""The devices and dtypes that measurements run on, and the precisions that they round weights to."""


class EvaluateOptions(Model):
    """Options of an evaluation.

    Attributes:
        split: Split to use. Default: the task's default.
        limit: Use only the first examples, this many; the result is labelled a subset.
        streaming: Read a hub dataset while it downloads, up to the limit, without storing it.
        min_length: Use only examples with an input of at least this many tokens; mechanisms may be exact on shorter ones.
        batch_size: Inputs per batch; auto chooses it by their length.
        margin: Acceptable loss: in points; of losses and bits per byte in percent of the base's. Default: 1, of error
            rates 0.5.
        max_length: Tokens that both models read of an input; `evaluate --max-length` truncates longer ones and counts
            them. Default: the positions of the model.
        truncate: Truncate inputs longer than the position table, and count them.
        seeds: Score this many random seeds of the mechanisms, the checkpoint's own first, and report how the scores
            vary.
        ablate: Score each converted model once more with its estimates switched off, so that only its exact keys (window,
            first and global tokens) are left, and say what the estimates add.
    """

    split: str | None = None
    limit: Count | None = None
    streaming: bool = False
    min_length: Count | None = None
    batch_size: Count | Literal["auto"] = 32
    margin: Annotated[float, Field(ge=0)] | None = None
    max_length: Count | None = None
    truncate: bool = False
    seeds: Count = 1
    ablate: bool = False

    @property
    def inputs_per_batch(self) -> int | None:
        """Inputs per batch; None to choose it by their length."""
        return None if self.batch_size == "auto" else self.batch_size


class EvaluateStage(EvaluateOptions):
    """One task to compare base and variants on.

    Attributes:
        task: A task, e.g. glue/sst2. `approx tasks` lists them.
        data: The task's files in their official layout, a table (.csv, .tsv, .jsonl, .json, .parquet), or
            hub:OWNER/NAME. Default: the hub, or the task's generator.
        settings: Settings of the task; `approx tasks NAME` lists them.
        fast_products: Use PyTorch's faster float32 matrix products on the CPU, in all models; `approx doctor --probe`
            shows the gain.
    """

    task: Annotated[str, Field(examples=["glue/sst2"])]
    data: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    fast_products: bool = False


class BenchStage(Model):
    """One grid of lengths and batch sizes to time base and variants at.

    Attributes:
        lengths: Tokens per sequence, or per prompt; of Whisper those that it writes, as all recordings are padded to one length.
        batches: Sequences per call.
        max_length: Extend the position table to this many tokens, for timing only.
        inputs: `real` (texts of the first task) or `synthetic` (random tokens).
        rounds: Minimum number of rounds; disturbed ones are repeated, at most doubling the number.
        seconds: Minimum time, in seconds, per length and batch size.
        time_budget: Begin no further length that would probably end after this time, e.g. 10m, and after it no further
            round; three rounds of the first length are always timed.
        wait_idle: Before each length, wait up to this many seconds until other programs leave the cores free.
        fast_products: Use PyTorch's faster float32 matrix products on the CPU, in all models; `approx doctor --probe`
            shows the gain.
        mode: Time one forward pass, or generate: the greedy decoding of new tokens after prompts of these lengths.
        new_tokens: With generate: tokens to decode after each prompt.
    """

    lengths: Annotated[Counts, Field(examples=["[128, 512]"])]
    batches: Counts = Field(default_factory=lambda: [1])
    max_length: Count | None = None
    inputs: Literal["real", "synthetic"] = "real"
    rounds: Annotated[int, Field(ge=3)] = 12
    seconds: Annotated[float, Field(ge=0)] = 1.0
    time_budget: Duration | None = None
    wait_idle: Annotated[float, Field(ge=0)] = 0.0
    fast_products: bool = False
    mode: Literal["forward", "generate"] = "forward"
    new_tokens: Count = 16
