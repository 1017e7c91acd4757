"""What `bench/cpu.py` measures: its parts, and their contenders: mechanisms with their settings, models that use them, and peers."""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache, DynamicLayer

from approx.conversion import surgery
from approx.mechanisms import MECHANISMS, Mechanism
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.seam.attention_free import attention_free

LENGTHS, DTYPES, THREADS = (512, 1024, 2048, 4096, 8192), ("float32", "bfloat16"), (1, 2)
# Frames of 10, 30 and 60 s of sound.
FRAMES = (499, 1499, 2999)
LONGEST = 65_536
HEADS, SIZE, LAYERS = 12, 64, 2
EXACT = tuple(name for name, kind in MECHANISMS.items() if kind.always_exact)
# These save nothing, and are measured up to this length, as are peers that hold or sort all pairs.
REFERENCES = tuple(name for name, kind in MECHANISMS.items() if kind.quadratic)
LONGEST_REFERENCE = 2048
SDPA, CEILING = "sdpa", "no attention"
# One token of a layer of a Llama, whose query heads share the keys of fewer heads; head size by the name of the suite.
GROUPED = {"attention-grouped-64": 64, "attention-grouped-128": 128}
QUERY_HEADS, GROUPS, GROUPED_LENGTHS, BATCHES = 32, 8, (1024, 4096), (1, 4)
REPEATED = "sdpa, keys repeated"


class Part(NamedTuple):
    """A race, or another kind of measurement."""

    suite: str
    mode: str
    dtype: str
    threads: int
    length: int
    batch: int = 1

    @property
    def id(self) -> str:
        """The name that `--only` matches, and that of its file."""
        length = f"{self.length}" if self.batch == 1 else f"{self.length}x{self.batch}"
        return f"{self.suite}/{self.mode}/{self.dtype}/{self.threads}/{length}"

    @property
    def causal(self) -> bool:
        """Whether a query sees only its past."""
        return self.suite in ("attention-causal", "gpt2") or self.decoding

    @property
    def decoding(self) -> bool:
        """Whether one token follows others."""
        return self.suite == "decode" or self.suite in GROUPED

    @property
    def layers(self) -> int:
        """Number of layers."""
        return 1 if self.suite.startswith("attention") else LAYERS


def planned(threads: tuple[int, ...], dtypes: tuple[str, ...], lengths: tuple[int, ...]) -> Iterator[Part]:
    """All parts. Training is timed only on all threads, and not at the greatest length."""
    for count in threads:
        for dtype in dtypes:
            for length in lengths:
                for suite in ("attention", "attention-causal", "roberta", "gpt2"):
                    yield Part(suite, "forward", dtype, count, length)
                    if count == max(threads) and length <= 4096:
                        yield Part(suite, "train", dtype, count, length)
                if length <= 4096 and (dtype == "float32" or count == max(threads)):
                    for batch in (1, 8):
                        yield Part("decode", "forward", dtype, count, length, batch)
                    for suite in GROUPED if length in GROUPED_LENGTHS else ():
                        for batch in BATCHES:
                            yield Part(suite, "forward", dtype, count, length, batch)
            for frames in FRAMES:
                yield Part("wav2vec2", "forward", dtype, count, frames)
                if count == max(threads):
                    yield Part("wav2vec2", "train", dtype, count, frames)


class Case(NamedTuple):
    """A mechanism with its settings; `name` contains both."""

    name: str
    mechanism: str
    settings: dict[str, Any]

    @property
    def whole(self) -> dict[str, Any]:
        """The settings over those of the paper's form."""
        return {**MECHANISMS[self.mechanism].published, **self.settings}


class Contender(NamedTuple):
    """A contender: `role` is base, ceiling, variant or peer."""

    name: str
    role: str
    call: Callable[[], object]


def cases(
    causal: bool,
    length: int,
    *,
    decoding: bool = False,
    chosen: Mapping[str, tuple[dict[str, Any], ...]] | None = None,
    short: Sequence[str] = REFERENCES,
) -> list[Case]:
    """Every mechanism with this form, except SDPA, which is the base; `chosen` are settings that replace those of the
    mechanism, and mechanisms in `short` run only on short inputs.
    """
    chosen = {} if chosen is None else chosen
    variants = []
    for name, kind in MECHANISMS.items():
        able = (kind.supports_causal if causal else kind.supports_bidirectional) and (
            kind.supports_decode or not decoding
        )
        if name == SDPA or not able or (name in short and length > LONGEST_REFERENCE):
            continue
        for settings in chosen.get(name) or settings_of(kind, causal):
            described = " ".join(f"{key}={value}" for key, value in settings.items())
            variants.append(Case(f"{name} {described}".strip(), name, settings))
    return variants


def settings_of(kind: type[Mechanism], causal: bool) -> tuple[dict[str, Any], ...]:
    """The settings of a mechanism that are timed in this form, which targets name; its defaults if it names none."""
    return kind.timed.get("causal" if causal else "bidirectional", ({},))


def mechanism_of(case: Case, causal: bool, heads: int = HEADS) -> Any:
    """The mechanism itself, for one layer of the models here or for fewer heads."""
    return MECHANISMS[case.mechanism](heads, SIZE, causal=causal, scale=SIZE**-0.5, **case.whole)


def attention(length: int, dtype: torch.dtype, *, causal: bool, train: bool) -> Iterator[Contender]:
    """Attention of one layer on random q, k and v, laid out as in a model; with peers if bidirectional."""
    generator = torch.Generator().manual_seed(length)
    q, k, v, grad = (
        torch.randn(1, length, HEADS, SIZE, generator=generator).to(dtype).transpose(1, 2) for _ in range(4)
    )
    q, k, v = (x.detach().requires_grad_(train) for x in (q, k, v))
    for case in [Case(SDPA, SDPA, {}), *cases(causal, length)]:
        mechanism = mechanism_of(case, causal).to(dtype).train(train)
        if mechanism.takes_calibration:
            with torch.no_grad():
                mechanism.calibrate(q, k, v)
        forward = lambda mechanism=mechanism: mechanism(q, k, v)  # noqa: E731  # one of many
        yield Contender(case.name, "base" if case.name == SDPA else "variant", _step(forward, (q, k, v), grad, train))
    hidden, outer = (x.detach().transpose(1, 2).flatten(2) for x in (q, grad))
    hidden.requires_grad_(train)
    if not causal:
        for name, forward in transformers_peers(hidden):
            yield Contender(name, "peer", _step(forward, (hidden,), outer, train))
    for name, forward in fast_transformers_peers(q, k, v, causal):
        yield Contender(name, "peer", _step(forward, (q, k, v), grad.transpose(1, 2), train))


def model(suite: str, length: int, dtype: torch.dtype, *, batch: int, train: bool) -> Iterator[Contender]:
    """`LAYERS` layers of a base-sized model with random weights, with every mechanism, exact attention and no attention."""
    base = build(suite, LAYERS, length).to(dtype).train(train)
    causal = suite in ("gpt2", "decode")
    run = {"roberta": on_tokens, "gpt2": on_tokens, "decode": one_token, "wav2vec2": _frames}[suite]

    def contender(name: str, role: str, one: nn.Module) -> Contender:
        forward, grad = run(one, length, batch, dtype)
        leaves = tuple(parameter for parameter in one.parameters() if parameter.requires_grad)

        def without() -> object:
            with attention_free(one):
                return forward()

        return Contender(name, role, _step(without if role == "ceiling" else forward, leaves, grad, train))

    yield contender(SDPA, "base", base)
    yield contender(CEILING, "ceiling", base)
    for case in cases(causal, length, decoding=suite == "decode"):
        yield contender(case.name, "variant", converted(base, case))


def build(suite: str, layers: int, length: int) -> Any:
    """A base-sized model with random weights, a small vocabulary and no dropout; only its layers are trained.

    Embedding tables and the convolutions of speech are excluded from the timing.
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
        # The positional convolution costs most of a layer; over two layers it would hide the cost of attention.
        made.encoder.pos_conv_embed = nn.Identity()
        learning = made.encoder.layers
    else:
        # Decoded tokens follow those in the cache.
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
    """The same model with shared weights and another attention."""
    twin = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    inputs = example_inputs(twin, 512, device=next(base.parameters()).device)
    # Calibration runs the model in its own precision.
    inputs = {name: x.to(twin.dtype) if x.is_floating_point() else x for name, x in inputs.items()}  # type: ignore[arg-type]  # a dtype
    surgery.convert(twin, Plan.of(case.mechanism, **case.whole), calibration=inputs)
    return twin.train(base.training)


Forward = tuple[Callable[[], object], Tensor]


def on_tokens(model: Any, length: int, batch: int, dtype: torch.dtype) -> Forward:
    """A forward pass of that many tokens, and a tensor of the shape of its outputs."""
    inputs = example_inputs(model, length, batch=batch, device=model.device)
    more = {"use_cache": False} if model.config.model_type.endswith("gpt2") else {}
    return lambda: model(**inputs, **more).last_hidden_state, torch.ones(
        batch, length, HEADS * SIZE, dtype=dtype, device=model.device
    )


def _frames(model: Any, length: int, batch: int, dtype: torch.dtype) -> Forward:
    hidden = torch.randn(batch, length, HEADS * SIZE, generator=torch.Generator().manual_seed(length)).to(dtype)
    return lambda: model.encoder(hidden).last_hidden_state, torch.ones_like(hidden)


def one_token(model: Any, length: int, batch: int, dtype: torch.dtype) -> Forward:
    """One token after `length` others; a KV cache is cropped afterwards, a state or a cache with notes grows."""
    generator = torch.Generator().manual_seed(length)
    cache = DynamicCache()
    for layer in range(model.config.num_hidden_layers):
        k, v = torch.randn(2, batch, HEADS, length, SIZE, generator=generator).to(model.device, dtype)
        cache.update(k, v, layer)
    word = example_inputs(model, 1, batch=batch, device=model.device)
    # A state counts the tokens seen, which exceed the number of positions.
    word["position_ids"] = torch.full((batch, 1), length, device=model.device)

    def step() -> Tensor:
        out = model(**word, past_key_values=cache, use_cache=True).last_hidden_state
        for layer in cache.layers:
            if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        return out

    return step, torch.empty(0)


def _step(forward: Callable[[], Any], leaves: tuple[Tensor, ...], grad: Tensor, train: bool) -> Callable[[], object]:
    if not train:
        return forward

    def both() -> None:
        out = forward()
        out.backward(grad.view_as(out))
        # Otherwise the next call would free them, which would distort its memory.
        for leaf in leaves:
            leaf.grad = None

    return both


def grouped(suite: str, length: int, dtype: torch.dtype, batch: int) -> Iterator[Contender]:
    """One query per head with a cache or a state of `length` tokens: PyTorch's own grouped-query attention, which is the base,
    copies of the keys for every query head, and every mechanism that decodes.
    """
    size, generator = GROUPED[suite], torch.Generator().manual_seed(length)
    q = torch.randn(batch, QUERY_HEADS, 1, size, generator=generator).to(dtype)
    k, v = torch.randn(2, batch, GROUPS, length, size, generator=generator).to(dtype)
    yield Contender(SDPA, "base", lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))

    def repeated() -> Tensor:
        keys, values = (x.repeat_interleave(QUERY_HEADS // GROUPS, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, keys, values)

    yield Contender(REPEATED, "variant", repeated)
    for case in cases(True, length, decoding=True):
        kind = MECHANISMS[case.mechanism]
        mechanism = kind(QUERY_HEADS, size, causal=True, scale=size**-0.5, **case.whole).to(dtype).eval()
        if mechanism.takes_calibration:
            with torch.no_grad():
                # A few queries represent the prompt.
                prompt = torch.randn(batch, QUERY_HEADS, 512, size, generator=generator).to(dtype)
                mechanism.calibrate(prompt, k[:, :, :512], v[:, :, :512])
        yield Contender(case.name, "variant", _decoded(mechanism, q, k, v))


def _decoded(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    if mechanism.decode_state != "cache":
        newest = k[:, :, -1:], v[:, :, -1:]
        _, state = mechanism.decode(q, k, v)

        def go_on() -> None:
            # As in generation, each step continues from the state of the last.
            nonlocal state
            _, state = mechanism.decode(q, *newest, None, state)

        return go_on
    if not mechanism.takes_notes:
        return lambda: mechanism(q, k, v)
    noted: dict[str, Any] = {}
    mechanism(q, k[:, :, :-1], v[:, :, :-1], notes=noted)

    def note() -> Tensor:
        # Restore what the last token overwrote in place.
        return mechanism(q, k, v, notes={name: x if name == "codes" else x.clone() for name, x in noted.items()})

    return note


def transformers_peers(hidden: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Longformer and BigBird of transformers with copies in place of their projections, to measure only attention."""
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
    # With too few blocks for its draws, BigBird is exact attention.
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
    """Projections return new memory, which the peers then write to."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def fast_transformers_peers(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The mechanisms of idiap's fast-transformers, if installed; it supports only float32.

    Without `conditional-full`, which picks one of the others by length.
    """
    try:
        made = importlib.import_module("fast_transformers.attention")
        masking = importlib.import_module("fast_transformers.masking")
    except ImportError:
        return
    if q.dtype != torch.float32:
        return
    length, size = q.shape[2:]
    everything = masking.TriangularCausalMask(length) if causal else masking.FullMask(length)
    lengths = masking.LengthMask(torch.tensor([length]))
    clusters = 25 if length <= 512 else 100
    # As many keys per query, in as many rounds, as ours.
    peers = {"idiap reformer": made.ReformerAttention(chunk_size=32, bits=8, rounds=4)} if length % 32 == 0 else {}
    if length <= LONGEST_REFERENCE:
        peers |= {"idiap full": made.FullAttention(), "idiap exact-topk": made.ExactTopKAttention(topk=32)}
    if causal:
        peers |= {
            "idiap causal linear": made.CausalLinearAttention(size),
            "idiap causal improved-clustered": made.ImprovedClusteredCausalAttention(
                clusters, iterations=10, bits=63, topk=32
            ),
        }
    else:
        peers |= {
            "idiap linear": made.LinearAttention(size),
            "idiap clustered": made.ClusteredAttention(clusters, iterations=10, bits=63),
            "idiap improved-clustered": made.ImprovedClusteredAttention(clusters, iterations=10, bits=63, topk=32),
            "idiap local": made.LocalAttention(256),
        }
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    for name, peer in peers.items():
        yield name, lambda peer=peer: peer.eval()(queries, keys, values, everything, lengths, lengths)


# Our counterpart of each peer.
COUNTERPARTS: Mapping[str, str] = MappingProxyType(
    {
        "idiap full": "exact",
        "idiap exact-topk": "exact-topk",
        "idiap reformer": "lsh",
        "idiap causal improved-clustered": "improved-clustered",
        "transformers Longformer": "longformer",
        "transformers BigBird": "bigbird",
        "idiap linear": "linear",
        "idiap causal linear": "linear",
        "idiap clustered": "clustered iterations=10",
        "idiap improved-clustered": "improved-clustered iterations=10",
        "idiap local": "local left=128 right=128",
    }
)
