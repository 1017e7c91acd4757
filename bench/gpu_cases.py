"""What `bench/gpu.py` measures: its parts, and their contenders: attention of one layer, models, PyTorch's back ends and peers."""

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils import import_utils

from approx.mechanisms import MECHANISMS
from approx.planning.positions import example_inputs
from approx.seam.attention_free import attention_free
from approx_kernels.ops.flash.library import library, library_attention
from bench.cpu_cases import (
    CEILING,
    HEADS,
    SIZE,
    Case,
    build,
    cases,
    converted,
    mechanism_of,
    on_tokens,
    one_token,
    settings_of,
)

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Tokens per step, in samples of any length; shorter steps are bound by launches.
TOKENS = 16_384
SUITES = ATTENTION, CAUSAL, PADDED = ("attention", "attention-causal", "attention-padded")
# Mechanisms that read a padding mask without synchronising.
READ_PADDING = (
    "exact",
    "flash",
    "linear",
    "performer",
    "clustered",
    "improved-clustered",
    "local",
    "lsh",
    "exact-topk",
)
# Settings that replace those timed on a CPU; the targets name them.
SETTINGS: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "local": ({"left": 128, "right": 128}, {"left": 256, "right": 256}),
        "lsh": ({"rounds": 1}, {"rounds": 4}),
    }
)
CAUSAL_SETTINGS: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "local": ({"left": 512, "right": 0},),
        "sinks": ({"window": 508},),
    }
)
# Forms with separate kernels that are not measured in models, besides the settings above or the defaults; the last form
# of linear attention is that of LoLCATs.
FORMS: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "lsh": ({"dedup": True}, {"variant": "shared"}),
        # The default is fitted per head and runs no kernel.
        "performer": ({"estimator": "positive"},),
        "linear": (
            {"feature_map": "t2r"},
            {"feature_map": "hedgehog"},
            {"feature_map": "hedgehog", "window": 64},
        ),
    }
)
# Also measured in float16 and float32.
FEW = (
    "flash",
    "linear",
    "local left=128 right=128",
    "bigbird",
    "clustered iterations=3",
    "improved-clustered iterations=3",
)
# Measured before the other mechanisms, since the targets are about them.
FIRST = (
    "linear",
    "clustered iterations=3",
    "improved-clustered iterations=3",
    "local left=128 right=128",
    "bigbird",
    "performer",
    "lsh rounds=1",
    "sinks window=508",
)
# Bytes of the second-level cache if unknown.
_CACHE = 64 * 2**20
_MOST_SETS = 48
BACK_ENDS: Mapping[str, SDPBackend] = MappingProxyType(
    {
        "sdpa math": SDPBackend.MATH,
        "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
        "sdpa flash": SDPBackend.FLASH_ATTENTION,
        "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    }
)
PACKAGES = ("fla", "flash_attn.cute", "flash_attn_interface", "xformers")
# Contenders that must be compiled for each shape.
COMPILED = ("FlexAttention", "FlexAttention, window")
# Compiling takes half a minute, and longer backward, so these are timed only at these tokens, at all tokens of a step.
COMPILED_TRAIN = (2048, 8192)
# Keys in a window before and after the query.
WINDOW, CAUSAL_WINDOW = (128, 128), (512, 0)
LAYERS = 12
# Positions of the models, enough for all lengths.
LONGEST = 16_384
# What the targets are about; a model is converted in a second or two.
_ENCODER = ("exact", "flash", "linear", "performer", "local", "bigbird", "clustered", "improved-clustered", "lsh")
MEASURED = {
    "roberta": _ENCODER,
    "roberta-padded": tuple(name for name in _ENCODER if name in READ_PADDING),
    "gpt2": ("exact", "flash", "linear", "performer", "local", "sinks"),
    "decode": ("flash", "linear", "sinks"),
}
# The cache of a decoder grows, as transformers creates it by default.
GROWING = "sdpa, growing cache"


class Part(NamedTuple):
    """A race: the contenders of a suite on one kind of inputs, `eager` or as a `graph`."""

    suite: str
    mode: str
    dtype: str
    length: int
    batch: int
    way: str

    @property
    def id(self) -> str:
        """The name that `--only` matches, and that of its file."""
        return f"{self.suite}/{self.mode}/{self.dtype}/{self.length}x{self.batch}/{self.way}"


def importance(name: str, role: str) -> int:
    """Place of a contender in the order in which a part measures them."""
    if role in ("base", "exact"):
        return 0
    return {"ceiling": 1, "user": 1, "peer": 3}.get(role, 2 if name in FIRST else 4)


def compiled_for(part: Part) -> bool:
    """Whether it includes contenders that must be compiled for its shape."""
    whole = part.batch * part.length == TOKENS and part.dtype == "bfloat16"
    return whole and part.suite in SUITES and (part.mode == "forward" or part.length in COMPILED_TRAIN)


class Inputs(NamedTuple):
    """Inputs of attention: q, k and v, [B, H, N, D] with the heads of a token contiguous in memory, possibly requiring
    gradients; the gradient of the output; and the real keys, [B, N] bool, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    mask: Tensor | None


# A forward pass, the tensors to differentiate it in, and the gradient of its outputs.
Step = tuple[Callable[[], Tensor], tuple[Tensor, ...], Tensor]


class Attention(NamedTuple):
    """A contender.

    Attributes:
        name: Its name on pages.
        role: `base`, `exact` for the other back ends of SDPA, `variant` for one of our mechanisms, or `peer`.
        like: Our contender that computes the same, by its name in `gpu_cases`.
        make: From inputs to a forward pass on them, in [B, H, N, D], or [real tokens, H, D] if packed.
        packed: Whether it has only the real tokens.
    """

    name: str
    role: str
    like: str
    make: Callable[[Inputs], Step]
    packed: bool = False


def of_suite(suite: str, length: int) -> list[Case]:
    """The mechanisms of a suite, except SDPA; those that materialise all pairs only on short inputs."""
    causal = suite in ("attention-causal", "gpt2", "decode")
    chosen = CAUSAL_SETTINGS if causal else SETTINGS
    if suite in SUITES:
        chosen = {
            **chosen,
            **{
                name: (*(chosen.get(name) or settings_of(MECHANISMS[name], causal)), *forms)
                for name, forms in FORMS.items()
            },
        }
    if suite == "decode":
        chosen = {**chosen, "performer": ({}, *FORMS["performer"])}
    selected = cases(causal, length, decoding=suite == "decode", chosen=chosen, short=("full",))
    return [case for case in selected if not suite.endswith("-padded") or case.mechanism in READ_PADDING]


def contenders(
    suite: str,
    mode: str,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    compiled: bool = True,
    every: bool = False,
) -> Iterator[Attention]:
    """The contenders of a suite, the base first; only a few in dtypes other than bfloat16 unless `every`; `train` is forward and backward."""
    causal, padded, whole = suite == "attention-causal", suite == "attention-padded", dtype == torch.bfloat16
    yield scaled(causal)
    for case in of_suite(suite, length):
        if not (whole or every or case.name in FEW):
            continue
        make = _made(case, causal, dtype, device, mode == "train")
        yield Attention(case.name, "variant", case.name, make)
    if device.type == "cuda":
        yield from (one for one in peers(causal, padded, compiled) if whole or one.role == "exact")


def built(case: Case, causal: bool, dtype: torch.dtype, device: torch.device, values: Inputs) -> Any:
    """The mechanism on the device, with as many heads as the inputs, and calibrated on them if necessary."""
    mechanism = mechanism_of(case, causal, values.q.shape[1]).to(device, dtype)
    if mechanism.takes_calibration:
        with torch.no_grad():
            mechanism.calibrate(values.q, values.k, values.v)
    return mechanism


def _made(case: Case, causal: bool, dtype: torch.dtype, device: torch.device, train: bool) -> Callable[[Inputs], Step]:
    built_once: list[Any] = []

    def make(values: Inputs) -> Step:
        if not built_once:
            built_once.append(built(case, causal, dtype, device, values).train(train))
        return lambda: built_once[0](values.q, values.k, values.v, values.mask), values[:3], values.grad

    return make


def inputs(
    suite: str,
    *,
    batch: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    heads: int | None = None,
    sets: int = 1,
    train: bool = False,
    seed: int = 0,
) -> list[Inputs]:
    """Random inputs laid out as in a model; those of `attention-padded` are half padding."""
    generator = torch.Generator(device).manual_seed(seed)
    mask = real_tokens(batch, length, device) if suite == "attention-padded" else None
    batches = []
    for _ in range(sets):
        q, k, v, grad = (
            torch.randn(batch, length, heads or HEADS, SIZE, generator=generator, device=device)
            .to(dtype)
            .transpose(1, 2)
            for _ in range(4)
        )
        # Outputs of padded queries are undefined and get no gradient.
        grad = grad if mask is None else grad * mask[:, None, :, None]
        batches.append(Inputs(q.requires_grad_(train), k.requires_grad_(train), v.requires_grad_(train), grad, mask))
    return batches


def real_tokens(batch: int, length: int, device: torch.device) -> Tensor:
    """Which tokens are real, [batch, length] bool: half of them, unevenly over the samples."""
    share = torch.linspace(0.25, 0.75, batch) if batch > 1 else torch.tensor([0.5])
    real = (share * length).ceil().long().to(device)
    return torch.arange(length, device=device) < real[:, None]


def sets_for(batch: int, length: int, dtype: torch.dtype, device: torch.device) -> int:
    """Sets of inputs used in turns, so that none is still in the cache when it is used again; at least three."""
    size = 4 * batch * length * HEADS * SIZE * dtype.itemsize
    cache = _CACHE
    if device.type == "cuda":
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _CACHE)
    return max(3, min(-(-2 * cache // size), _MOST_SETS))


def peers(causal: bool, padded: bool, compiled: bool) -> Iterator[Attention]:
    """All installed peers with this form; those that cannot run report it when they are built or called.

    `compiled` adds those that must be compiled for each shape.
    """
    for name, back_end in BACK_ENDS.items():
        yield Attention(name, "exact", "sdpa", _scaled(causal, back_end))
    window = "local left=512 right=0" if causal else "local left=128 right=128"
    reach = CAUSAL_WINDOW if causal else WINDOW
    yield Attention("varlen_attn", "peer", "sdpa", _variable((-1, 0) if causal else (-1, -1)), packed=padded)
    if compiled:
        yield Attention(COMPILED[0], "peer", "sdpa", _compiled(causal, None))
    if padded:
        return
    yield Attention("varlen_attn, window", "peer", window, _variable(reach))
    if compiled:
        yield Attention(COMPILED[1], "peer", window, _compiled(causal, reach))
    if torch.cuda.is_available() and library(torch.cuda.get_device_capability()) is not None:
        yield Attention("FlashAttention", "exact", "sdpa", _flash_library(causal))
    if _installed("xformers.ops"):
        yield Attention("xFormers", "peer", "sdpa", _xformers(causal))
    if causal and _installed("fla.ops.linear_attn"):
        for name in ("chunk_linear_attn", "fused_chunk_linear_attn"):
            yield Attention(f"fla {name}", "peer", "linear", _fla(name))


def scaled(causal: bool) -> Attention:
    """PyTorch's default SDPA as models call it, the base of all comparisons."""
    return Attention("sdpa", "base", "sdpa", _scaled(causal, None))


def versions() -> dict[str, str | None]:
    """Versions of the optional packages."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = str(getattr(importlib.import_module(name), "__version__", "installed"))
        except Exception:  # a broken package is as good as none
            installed[name] = None
    return installed


def _installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # a broken package is as good as none
        return False
    return True


def _scaled(causal: bool, back_end: SDPBackend | None) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        mask = None if values.mask is None else values.mask[:, None, None, :]

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(values.q, values.k, values.v, attn_mask=mask, is_causal=causal)

        def forced() -> Tensor:
            assert back_end is not None, "it is what is forced"
            with sdpa_kernel(back_end):
                return forward()

        return forward if back_end is None else forced, (values.q, values.k, values.v), values.grad

    return make


def _variable(window: tuple[int, int]) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        from torch.nn.attention.varlen import varlen_attn

        batch, heads, length, _ = values.q.shape

        def attend(rows: Sequence[Tensor], starts: Tensor, longest: int) -> Tensor:
            q, k, v = rows
            out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=window)
            assert isinstance(out, Tensor), "nothing besides was asked for"
            return out

        if values.mask is None:
            starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=values.q.device)

            def forward() -> Tensor:
                rows = [x.transpose(1, 2).flatten(0, 1) for x in values[:3]]
                return attend(rows, starts, length).view(batch, length, heads, -1).transpose(1, 2)

            return forward, values[:3], values.grad
        # Only real tokens, with the samples concatenated; packing is not timed.
        *rows, grad = (x.detach().transpose(1, 2)[values.mask] for x in (values.q, values.k, values.v, values.grad))
        leaves = tuple(x.requires_grad_(values.q.requires_grad) for x in rows)
        lengths = values.mask.sum(1)
        starts, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
        return lambda: attend(leaves, starts, longest), leaves, grad

    return make


def _compiled(causal: bool, window: tuple[int, int] | None) -> Callable[[Inputs], Step]:
    compiled_once: dict[str, Any] = {}

    def make(values: Inputs) -> Step:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batch, _, length, _ = values.q.shape
        lengths = None if values.mask is None else values.mask.sum(1)

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # At least one comparison, as the tracer requires.
            allowed = j >= 0
            if lengths is not None:
                allowed = allowed & (j < lengths[b])
            if window is not None:
                allowed = allowed & (j >= i - window[0]) & (j <= i + window[1])
            return allowed & (j <= i) if causal else allowed

        if not compiled_once:
            # One function for all inputs of a shape: the compiler gives up on a function after too many shapes.
            compiled_once["attend"] = torch.compile(flex_attention, dynamic=False)
            compiled_once["mask"] = None
            if causal or window is not None or lengths is not None:
                samples = None if lengths is None else batch
                compiled_once["mask"] = create_block_mask(seen, samples, None, length, length, device=values.q.device)
        return (
            lambda: compiled_once["attend"](values.q, values.k, values.v, block_mask=compiled_once["mask"]),
            values[:3],
            values.grad,
        )

    return make


def _flash_library(causal: bool) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        scale = values.q.shape[3] ** -0.5
        return lambda: library_attention(*values[:3], causal=causal, scale=scale), values[:3], values.grad

    return make


def _xformers(causal: bool) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        ops = importlib.import_module("xformers.ops")
        bias = ops.LowerTriangularMask() if causal else None

        def forward() -> Tensor:
            rows = (x.transpose(1, 2) for x in values[:3])
            return ops.memory_efficient_attention(*rows, attn_bias=bias).transpose(1, 2)

        return forward, values[:3], values.grad

    return make


def _fla(name: str) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        attend = getattr(importlib.import_module("fla.ops.linear_attn"), name)

        def forward() -> Tensor:
            # The feature map is not part of its kernels.
            q, k = (F.elu(x).add(1.0).transpose(1, 2) for x in values[:2])
            return attend(q, k, values.v.transpose(1, 2), normalize=True)[0].transpose(1, 2)

        return forward, values[:3], values.grad

    return make


def rotating(make: Callable[[Inputs], Step], inputs: Sequence[Inputs], train: bool) -> Callable[[], object]:
    """Runs on different inputs at each call, so that they are not in the cache."""
    steps: list[Step] = []
    places = itertools.cycle(range(len(inputs)))

    def call() -> object:
        if not steps:
            steps.extend(make(each) for each in inputs)
        forward, leaves, grad = steps[next(places)]
        out = forward()
        return torch.autograd.grad(out, leaves, grad) if train else out

    return call


Contender = tuple[str, str, Callable[[], object]]


class FixedLayer(DynamicLayer):
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


def of_models(suite: str, length: int, batch: int, dtype: torch.dtype, device: torch.device) -> Iterator[Contender]:
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
    cache.layers.extend(FixedLayer() for _ in range(model.config.num_hidden_layers))
    return lambda: model(**inputs, past_key_values=cache, use_cache=True).last_hidden_state, torch.empty(0)


def _decoding(model: Any, length: int, batch: int, dtype: torch.dtype) -> tuple[Callable[[], object], Tensor]:
    generator = torch.Generator(model.device).manual_seed(length)
    cache, shape = DynamicCache(), (2, batch, model.config.num_attention_heads, length + 1, SIZE)
    cache.layers.extend(
        FixedLayer(*torch.randn(shape, generator=generator, device=model.device).to(dtype))
        for _ in range(model.config.num_hidden_layers)
    )
    word = example_inputs(model, 1, batch=batch, device=model.device)
    word["position_ids"] = torch.full((batch, 1), length, device=model.device)
    return lambda: model(**word, past_key_values=cache, use_cache=True).last_hidden_state, torch.empty(0)
