"""The contenders of `bench/gpu.py` for the attention of one layer: mechanisms with their settings, SDPA, and peers."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from approx.mechanisms import MECHANISMS
from bench.cpu_cases import HEADS, SIZE, Case, cases, mechanism_of, settings_of
from bench.gpu_peers import Attention, Inputs, Step, peers, scaled

# Tokens per step, in samples of any length; shorter steps are bound by launches.
TOKENS = 16_384
SUITES = ("attention", "attention-causal", "attention-padded")
# Mechanisms that read a padding mask without synchronising.
PADDED = ("exact", "flash", "linear", "performer", "clustered", "improved-clustered", "local", "lsh", "exact-topk")
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
    return [case for case in selected if not suite.endswith("-padded") or case.mechanism in PADDED]


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
