"""The contenders of `bench/cpu.py`: mechanisms with their settings, models that use them, and peers."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from approx.conversion import surgery
from approx.mechanisms import MECHANISMS, Mechanism
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.seam.attention_free import attention_free
from bench.cpu_peers import LONGEST_REFERENCE, fast_transformers_peers, transformers_peers

HEADS, SIZE, LAYERS = 12, 64, 2
EXACT = tuple(name for name, kind in MECHANISMS.items() if kind.always_exact)
# These save nothing.
REFERENCES = tuple(name for name, kind in MECHANISMS.items() if kind.quadratic)
SDPA, CEILING = "sdpa", "no attention"


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
