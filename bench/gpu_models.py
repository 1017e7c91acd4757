"""Models of twelve layers on a GPU with every mechanism: RoBERTa-base and GPT-2-small in size, with random weights."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils import import_utils

from approx.planning.positions import example_inputs
from approx.seam.attention_free import attention_free
from bench.cpu_cases import CEILING, HEADS, SIZE, build, converted, on_tokens, one_token
from bench.gpu_cases import PADDED, of_suite, real_tokens
from bench.gpu_peers import BACK_ENDS

LAYERS = 12
# Positions of the models, enough for all lengths.
LONGEST = 16_384
# What the targets are about; a model is converted in a second or two.
_ENCODER = ("exact", "flash", "linear", "performer", "local", "bigbird", "clustered", "improved-clustered", "lsh")
MEASURED = {
    "roberta": _ENCODER,
    "roberta-padded": tuple(name for name in _ENCODER if name in PADDED),
    "gpt2": ("exact", "flash", "linear", "performer", "local", "sinks"),
    "decode": ("flash", "linear", "sinks"),
}
# The cache of a decoder grows, as transformers creates it by default.
GROWING = "sdpa, growing cache"

Contender = tuple[str, str, Callable[[], object]]


class Held(DynamicLayer):
    """Keys and values in memory that does not grow: every token is written to the last place. Without memory, new ones pass through.

    This is the best case of a static cache, without the mask for unwritten places. Passing through saves a prefill the
    copies of an unused cache, and saves models the search for packed sequences, which synchronises.

    Args:
        keys: [B, H, n, D], the tokens before and a place for the next.
        values: The same for values.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, with the new ones in the last place."""
        if self.keys is None or self.values is None:
            return key_states, value_states
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Number of tokens before the next."""
        return 0 if self.keys is None else self.keys.shape[2] - 1


def contenders(suite: str, length: int, batch: int, dtype: torch.dtype, device: torch.device) -> Iterator[Contender]:
    """Name, role and call of the contenders of a suite: `roberta`, `roberta-padded` (half padding), `gpt2` (prefill) or `decode`
    (one token after `length`). Nothing is built before the first call.
    """
    run = {"roberta": on_tokens, "roberta-padded": _padded, "gpt2": _prefill, "decode": _decoding}[suite]
    unmasked = contextlib.nullcontext if suite == "roberta-padded" else _unmasked
    family = "roberta" if suite.startswith("roberta") else "gpt2"
    made = family, dtype, device, LAYERS, max(length, LONGEST) if device.type == "cuda" else length
    base = functools.partial(_base, *made)
    plain = _within(unmasked, _later(run, base, length, batch, dtype))
    yield "sdpa", "base", plain
    for name, back_end in BACK_ENDS.items():
        # It materialises all pairs; its speed in a model is not of interest.
        if name != "sdpa math" and device.type == "cuda":
            yield name, "exact", _within(lambda back_end=back_end: sdpa_kernel(back_end), plain)
    if suite == "decode":
        yield GROWING, "user", _within(unmasked, _later(one_token, base, length, batch, dtype))
    else:
        yield CEILING, "ceiling", _within(lambda: attention_free(base()), plain)
    for case in of_suite(suite, length):
        if case.mechanism in MEASURED[suite]:
            twin = functools.partial(_twin, *made, case.name)
            # A mechanism with a state needs a cache that can hold it.
            way = one_token if suite == "decode" and case.mechanism != "flash" else run
            yield case.name, "variant", _within(unmasked, _later(way, twin, length, batch, dtype))


@functools.cache
def _base(family: str, dtype: torch.dtype, device: torch.device, layers: int, positions: int) -> Any:
    with torch.device(device):
        return build(family, layers, positions).to(dtype).eval().requires_grad_(False)


@functools.cache
def _twin(family: str, dtype: torch.dtype, device: torch.device, layers: int, positions: int, name: str) -> Any:
    case = next(case for case in of_suite(family, 1) if case.name == name)
    return converted(_base(family, dtype, device, layers, positions), case)


def _later(
    run: Callable[..., tuple[Callable[[], object], Tensor]],
    model: Callable[[], Any],
    length: int,
    batch: int,
    dtype: torch.dtype,
) -> Callable[[], object]:
    """The call that runs a model in a given way, built on first use."""
    built: list[Callable[[], object]] = []

    def call() -> object:
        if not built:
            built.append(run(model(), length, batch, dtype)[0])
        return built[0]()

    return call


@contextlib.contextmanager
def _unmasked() -> Iterator[None]:
    """Inside the context a capture without padding gets no mask; transformers 5.17 would pass a mask of all pairs, since masks
    cannot be read then, and SDPA would use a slower path than elsewhere.
    """
    asked = import_utils.is_cuda_stream_capturing
    import_utils.is_cuda_stream_capturing = lambda: False
    try:
        yield
    finally:
        import_utils.is_cuda_stream_capturing = asked


def _within(context: Callable[[], Any], call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with context():
            return call()

    return run


def _padded(model: Any, length: int, batch: int, dtype: torch.dtype) -> tuple[Callable[[], object], Tensor]:
    words, real = (
        example_inputs(model, length, batch=batch, device=model.device),
        real_tokens(batch, length, model.device),
    )
    words["input_ids"].masked_fill_(~real, model.config.pad_token_id)
    words["attention_mask"] = real.long()
    return lambda: model(**words).last_hidden_state, torch.empty(0)


def _prefill(model: Any, length: int, batch: int, dtype: torch.dtype) -> tuple[Callable[[], object], Tensor]:
    inputs = example_inputs(model, length, batch=batch, device=model.device)
    cache = DynamicCache()
    cache.layers.extend(Held() for _ in range(model.config.num_hidden_layers))
    return lambda: model(**inputs, past_key_values=cache, use_cache=True).last_hidden_state, torch.empty(0)


def _decoding(model: Any, length: int, batch: int, dtype: torch.dtype) -> tuple[Callable[[], object], Tensor]:
    generator = torch.Generator(model.device).manual_seed(length)
    cache, shape = DynamicCache(), (2, batch, HEADS, length + 1, SIZE)
    cache.layers.extend(
        Held(*torch.randn(shape, generator=generator, device=model.device).to(dtype))
        for _ in range(model.config.num_hidden_layers)
    )
    word = example_inputs(model, 1, batch=batch, device=model.device)
    word["position_ids"] = torch.full((batch, 1), length, device=model.device)
    return lambda: model(**word, past_key_values=cache, use_cache=True).last_hidden_state, torch.empty(0)
