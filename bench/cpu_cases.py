"""What `bench/cpu.py` lets run side by side: mechanisms with their settings, models to put them in, and peers."""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from approx.conversion import surgery
from approx.conversion.anatomy import attention_free
from approx.conversion.inputs import example_inputs
from approx.conversion.plan import Plan
from approx.mechanisms import MECHANISMS

HEADS, SIZE, LAYERS = 12, 64, 2
# These save nothing, and hold or sort all pairs: they are measured for reference, not beyond this length.
REFERENCES, LONGEST_REFERENCE = ("full", "exact-topk"), 2048
SDPA, CEILING = "sdpa", "no attention"

# Settings that are measured in place of the defaults; the targets name them.
_SETTINGS: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "clustered": ({"iterations": 3}, {"iterations": 10}),
        "improved-clustered": ({"iterations": 3}, {"iterations": 10}),
        "local": ({"left": 128, "right": 128},),
        "adaptive-span": ({"max_span": 256},),
        "fixed": ({"stride": None},),
    }
)
_CAUSAL_SETTINGS: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "local": ({"left": 128, "right": 0},),
        "sinks": ({"window": 252},),
        "adaptive-span": ({"max_span": 256},),
        "fixed": ({"stride": None},),
    }
)


class Case(NamedTuple):
    """A mechanism with the settings that it is measured at; `name` says both."""

    name: str
    mechanism: str
    settings: dict[str, Any]


class Contender(NamedTuple):
    """One that runs: `role` is base, ceiling, variant or peer."""

    name: str
    role: str
    call: Callable[[], object]


def cases(causal: bool, length: int, *, decoding: bool = False) -> list[Case]:
    """Every mechanism that has this form, but SDPA, which is the base."""
    found = []
    for name, kind in MECHANISMS.items():
        able = (kind.supports_causal if causal else kind.supports_bidirectional) and (
            kind.supports_decode or not decoding
        )
        if name == SDPA or not able or (name in REFERENCES and length > LONGEST_REFERENCE):
            continue
        for settings in (_CAUSAL_SETTINGS if causal else _SETTINGS).get(name, ({},)):
            told = " ".join(f"{key}={value}" for key, value in settings.items())
            found.append(Case(f"{name} {told}".strip(), name, settings))
    return found


def mechanism_of(case: Case, causal: bool) -> Any:
    """The mechanism itself, for one layer of the models here."""
    return MECHANISMS[case.mechanism](HEADS, SIZE, causal=causal, scale=SIZE**-0.5, **case.settings)


def attention(length: int, dtype: torch.dtype, *, causal: bool, train: bool) -> Iterator[Contender]:
    """One layer's attention on random q, k and v, laid out as a model lays them out; and peers where they are bidirectional."""
    generator = torch.Generator().manual_seed(length)
    q, k, v, grad = (
        torch.randn(1, length, HEADS, SIZE, generator=generator).to(dtype).transpose(1, 2) for _ in range(4)
    )
    q, k, v = (x.detach().requires_grad_(train) for x in (q, k, v))
    for case in [Case(SDPA, SDPA, {}), *cases(causal, length)]:
        mechanism = mechanism_of(case, causal).to(dtype).train(train)
        if mechanism.needs_calibration:
            with torch.no_grad():
                mechanism.calibrate(q, k, v)
        forward = lambda mechanism=mechanism: mechanism(q, k, v)  # noqa: E731  # one of many
        yield Contender(case.name, "base" if case.name == SDPA else "variant", _step(forward, (q, k, v), grad, train))
    hidden, outer = (x.detach().transpose(1, 2).flatten(2) for x in (q, grad))
    hidden.requires_grad_(train)
    if not causal:
        for name, forward in _transformers_peers(hidden):
            yield Contender(name, "peer", _step(forward, (hidden,), outer, train))
    for name, forward in _fast_transformers_peers(q, k, v, causal):
        yield Contender(name, "peer", _step(forward, (q, k, v), grad.transpose(1, 2), train))


def model(suite: str, length: int, dtype: torch.dtype, *, batch: int, train: bool) -> Iterator[Contender]:
    """`LAYERS` layers of a base-sized model with random weights under every mechanism, with exact attention and without any."""
    base = build(suite, LAYERS, length).to(dtype).train(train)
    causal = suite in ("gpt2", "decode")
    run = {"roberta": _tokens, "gpt2": _tokens, "decode": _decoding, "wav2vec2": _frames}[suite]

    def contender(name: str, role: str, one: nn.Module) -> Contender:
        forward, grad = run(one, length, batch, dtype)
        leaves = tuple(parameter for parameter in one.parameters() if parameter.requires_grad)
        if role != "ceiling":
            return Contender(name, role, _step(forward, leaves, grad, train))

        def free() -> object:
            with attention_free(one):
                return forward()

        return Contender(name, role, _step(free, leaves, grad, train))

    yield contender(SDPA, "base", base)
    yield contender(CEILING, "ceiling", base)
    for case in cases(causal, length, decoding=suite == "decode"):
        yield contender(case.name, "variant", converted(base, case))


def build(suite: str, layers: int, length: int) -> Any:
    """A base-sized model with random weights, few words and no dropout; only its layers learn.

    The tables of words and the convolutions of speech are not what is timed.
    """
    torch.manual_seed(0)
    if suite == "roberta":
        made: Any = transformers.RobertaModel(
            transformers.RobertaConfig(
                vocab_size=1000,
                num_hidden_layers=layers,
                max_position_embeddings=max(length, 512) + 2,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            ),
            add_pooling_layer=False,
        )
        learning = made.encoder.layer
    elif suite == "wav2vec2":
        made = transformers.Wav2Vec2Model(
            transformers.Wav2Vec2Config(
                num_hidden_layers=layers,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                layerdrop=0.0,
            )
        )
        # The convolution over positions costs most of a layer; over two layers it would hide what attention costs.
        made.encoder.pos_conv_embed = nn.Identity()
        learning = made.encoder.layers
    else:
        # Tokens that are decoded stand behind those in the cache.
        made = transformers.GPT2Model(
            transformers.GPT2Config(
                vocab_size=1000,
                bos_token_id=0,
                eos_token_id=0,
                n_layer=layers,
                n_positions=length + 2048,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
        learning = made.h
    made.requires_grad_(False)
    learning.requires_grad_(True)
    return made


def converted(base: nn.Module, case: Case) -> nn.Module:
    """The same model, its weights shared, with another attention."""
    twin = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    inputs = example_inputs(twin, 512)
    # Fitting runs the model, in the precision that it has.
    inputs = {name: x.to(twin.dtype) if x.is_floating_point() else x for name, x in inputs.items()}  # type: ignore[arg-type]  # a dtype
    surgery.convert(twin, Plan.of(case.mechanism, **case.settings), calibration=inputs)
    return twin.train(base.training)


_Forward = tuple[Callable[[], object], Tensor]


def _tokens(model: Any, length: int, batch: int, dtype: torch.dtype) -> _Forward:
    inputs = example_inputs(model, length, batch=batch)
    more = {"use_cache": False} if model.config.model_type.endswith("gpt2") else {}
    return lambda: model(**inputs, **more).last_hidden_state, torch.ones(batch, length, HEADS * SIZE, dtype=dtype)


def _frames(model: Any, length: int, batch: int, dtype: torch.dtype) -> _Forward:
    hidden = torch.randn(batch, length, HEADS * SIZE, generator=torch.Generator().manual_seed(length)).to(dtype)
    return lambda: model.encoder(hidden).last_hidden_state, torch.ones_like(hidden)


def _decoding(model: Any, length: int, batch: int, dtype: torch.dtype) -> _Forward:
    """One token on top of `length`; a cache of tokens is cut back afterwards, a state goes on."""
    generator = torch.Generator().manual_seed(length)
    cache = DynamicCache()
    for layer in range(LAYERS):
        k, v = torch.randn(2, batch, HEADS, length, SIZE, generator=generator).to(dtype)
        cache.update(k, v, layer)
    word = example_inputs(model, 1, batch=batch)

    def step() -> None:
        model(**word, past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    return step, torch.empty(0)


def _step(forward: Callable[[], Any], leaves: tuple[Tensor, ...], grad: Tensor, train: bool) -> Callable[[], object]:
    if not train:
        return forward

    def both() -> None:
        out = forward()
        out.backward(grad.view_as(out))
        # Left for the next call, they would be its to free, and missing in its memory.
        for leaf in leaves:
            leaf.grad = None

    return both


def _transformers_peers(hidden: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Longformer and BigBird of transformers, their projections exchanged for copies, so that attention alone is left."""
    from transformers.models.big_bird import modeling_big_bird as big_bird
    from transformers.models.longformer import modeling_longformer as longformer

    length = hidden.shape[1]
    config = transformers.LongformerConfig(
        attention_window=[512], num_hidden_layers=1, attention_probs_dropout_prob=0.0
    )
    windowed = _without_projections(longformer.LongformerSelfAttention(config, 0))
    is_global = torch.zeros(1, length, dtype=torch.bool)
    is_global[:, 0] = True
    state = {
        "attention_mask": is_global.to(hidden.dtype),
        "is_index_masked": torch.zeros_like(is_global),
        "is_index_global_attn": is_global,
        "is_global_attn": True,
    }
    if length % 512 == 0:
        yield "transformers Longformer", lambda: windowed(hidden, **state)[0]
    # With fewer blocks than it needs for its draws, BigBird is exact attention.
    if length % 64 == 0 and length >= 1024:
        config = transformers.BigBirdConfig(block_size=64, num_random_blocks=3, attention_probs_dropout_prob=0.0)
        blocked = _without_projections(big_bird.BigBirdBlockSparseAttention(config, seed=0))
        names = ("from_blocked_mask", "band_mask", "from_mask", "to_mask")
        made = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(torch.ones_like(hidden[..., 0]), 64)
        masks: dict[str, Tensor] = dict(zip(names, made, strict=True))
        masks["to_blocked_mask"] = masks["from_blocked_mask"]
        yield "transformers BigBird", lambda: blocked(hidden, **masks)[0]


def _without_projections(module: nn.Module) -> nn.Module:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, _Copy())
    return module


class _Copy(nn.Module):
    """What a projection leaves is new memory, into which the peers then write."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def _fast_transformers_peers(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The mechanisms of idiap's fast-transformers, where it is installed; it computes in float32 alone."""
    try:
        made = importlib.import_module("fast_transformers.attention")
        masking = importlib.import_module("fast_transformers.masking")
    except ImportError:
        return
    if q.dtype != torch.float32:
        return
    length = q.shape[2]
    everything = masking.TriangularCausalMask(length) if causal else masking.FullMask(length)
    lengths = masking.LengthMask(torch.tensor([length]))
    if causal:
        peers = {"idiap causal linear": made.CausalLinearAttention(SIZE)}
    else:
        clusters = 25 if length <= 512 else 100
        peers = {
            "idiap linear": made.LinearAttention(SIZE),
            "idiap clustered": made.ClusteredAttention(clusters, iterations=10, bits=63),
            "idiap improved-clustered": made.ImprovedClusteredAttention(clusters, iterations=10, bits=63, topk=32),
            "idiap local": made.LocalAttention(256),
        }
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    for name, peer in peers.items():
        yield name, lambda peer=peer: peer.eval()(queries, keys, values, everything, lengths, lengths)


# Which of ours each peer is held against.
COUNTERPARTS: Mapping[str, str] = MappingProxyType(
    {
        "transformers Longformer": "longformer",
        "transformers BigBird": "bigbird",
        "idiap linear": "linear",
        "idiap causal linear": "linear",
        "idiap clustered": "clustered iterations=10",
        "idiap improved-clustered": "improved-clustered iterations=10",
        "idiap local": "local left=128 right=128",
    }
)
