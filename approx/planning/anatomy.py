"""Locate a model's attention, and count what it computes, by observing a forward pass on the meta device instead of a table of families."""

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AttentionInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from approx.errors import ApproxError, Exit, did_you_mean
from approx.planning import positions
from approx.planning.positions import example_inputs, main_input, seconds_per_position
from approx.seam.attention_free import values_only
from approx.seam.dispatch import OWN_KEYWORDS, is_causal
from approx.seam.internals import backbone_of, can_switch_attention, temporary_attention


@dataclass(frozen=True)
class Moment:
    """Memory in use at one moment of a forward pass; linear in the number of positions.

    Attributes:
        fixed: Bytes that are independent of the length.
        per_position: Bytes per position.
    """

    fixed: float
    per_position: float

    def bytes(self, length: int) -> float:
        """Bytes in use if the input has `length` positions."""
        return self.fixed + self.per_position * length

    @classmethod
    def through(cls, lengths: tuple[int, int], sizes: tuple[int, int]) -> "Moment":
        """The moment with these sizes in bytes at these two lengths."""
        slope = (sizes[1] - sizes[0]) / (lengths[1] - lengths[0])
        return cls(sizes[0] - slope * lengths[0], slope)


@dataclass(frozen=True)
class Footprint:
    """The memory of a forward pass of one sequence on top of weights and inputs, in the dtype of the model.

    Attributes:
        outside: The moments outside attention that may be its peak.
        layers: Memory in use when each self-attention layer begins, including its output.
    """

    outside: tuple[Moment, ...]
    layers: tuple[Moment, ...]

    def peak(self, length: int, needed: Iterable[int]) -> int:
        """Peak memory in bytes.

        Args:
            length: Positions of the sequence.
            needed: Temporaries of each self-attention layer in bytes.
        """
        within = (layer.bytes(length) + bytes for layer, bytes in zip(self.layers, needed, strict=True))
        return round(max([*(moment.bytes(length) for moment in self.outside), *within]))


class LiveMemory(TorchDispatchMode):
    """Tracks the bytes of all tensors created inside the context, also on the meta device.

    Attributes:
        now: Bytes at present.
        moments: Bytes after each allocation.
        draws: Whether random numbers were drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.draws = False
        self.moments: list[int] = []
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags  # type: ignore[attr-defined]  # every operator has tags
        before = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in before and storage._cdata not in self._alive:
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def released(_: Any) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, released)
        self.now += size
        self.moments.append(self.now)


def _storages(values: Any) -> Iterable[torch.UntypedStorage]:
    return (value.untyped_storage() for value in tree_iter(values) if isinstance(value, Tensor))


def observed(lengths: tuple[int, int], shorter: Sequence[int], longer: Sequence[int]) -> Iterator[Moment]:
    """Fit moments to two runs; if the longer run has more operations, take its moments as proportional to the length."""
    if len(shorter) != len(longer):
        return (Moment(0, size / lengths[1]) for size in longer)
    return (Moment.through(lengths, size) for size in zip(shorter, longer, strict=True))


def highest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """The moments that can be the peak at some length."""
    envelope: list[Moment] = []
    for moment in sorted(set(moments), key=lambda one: (one.per_position, one.fixed), reverse=True):
        if not envelope or moment.fixed > envelope[-1].fixed:
            envelope.append(moment)
    return tuple(envelope)


_PROBE_LENGTH = 48
# Keywords that families pass to their attention but that do not change its result.
_HARMLESS = {
    "cache_position",
    "deterministic",
    "encoder_hidden_states",
    "is_causal",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True)
class Site:
    """One self-attention module of a model, as the model calls it.

    Attributes:
        layer: Running number of the self-attention layers, encoder before decoder.
        path: Path of the module inside the base model, e.g. `encoder.layer.0.attention.self`.
        heads: Query heads.
        key_heads: Key and value heads; fewer than `heads` if query heads share them.
        head_dim: Size of a head.
        causal: Whether a query sees only its past.
        scale: Factor of the scores.
        fixed_length: Number of positions if it is independent of the input, as for images and 30 s of speech; else
            None.
        window: Tokens that a query of a layer with a sliding window sees: the last ones with its own if it is causal,
            otherwise so many on either side. None without one.
        kept: What its attention has that no mechanism can reproduce, so that it stays as it is; None if it can be
            converted.
    """

    layer: int
    path: str
    heads: int
    key_heads: int
    head_dim: int
    causal: bool
    scale: float
    fixed_length: int | None = None
    window: int | None = None
    kept: str | None = None


@dataclass(frozen=True)
class Anatomy:
    """The attention of a model, derived from its config alone.

    Attributes:
        family: `model_type` of the base checkpoint.
        architecture: Name of the model class.
        sites: Self-attention layers in order.
        cross_attention: Number of cross-attention modules; they always stay exact.
        parameters: Number of parameters.
        positions: Longest input the position table allows; None if there is no limit.
        seconds: Seconds of sound in a position; None if it does not read sound of any length.
        flops_per_position: Floating-point operations outside self-attention, per position.
        flops_per_pair: The same per pair of positions: cross-attention between two parts that both grow with the
            length.
        flops_fixed: The same, independent of the length.
        footprint: Memory of its forward pass.
    """

    family: str
    architecture: str
    sites: tuple[Site, ...]
    cross_attention: int
    parameters: int
    positions: int | None
    seconds: float | None
    flops_per_position: float
    flops_per_pair: int
    flops_fixed: float
    footprint: Footprint

    @property
    def convertible(self) -> tuple[Site, ...]:
        """The layers that can be converted; never empty."""
        return tuple(site for site in self.sites if site.kept is None)

    @property
    def stays(self) -> list[str]:
        """A sentence for each kind of layers that cannot be converted."""
        return [
            f"{_layers(sites)} {'stay as they are' if len(sites) > 1 else 'stays as it is'}: {kept}."
            for kept, sites in _by_reason(self.sites).items()
        ]

    @property
    def fixed_length(self) -> int | None:
        """Number of positions of every input if it is one for all layers, as for images; else None."""
        lengths = {site.fixed_length for site in self.sites}
        return lengths.pop() if len(lengths) == 1 else None

    def flops_outside(self, length: int) -> float:
        """Floating-point operations of one forward pass of `length` positions, without self-attention."""
        return self.flops_fixed + self.flops_per_position * length + self.flops_per_pair * length**2


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as text: `0-3,8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


# Parts of a config that do not affect the attention, but differ between copies of one checkpoint.
_ORIGINS = ("_name_or_path", "architectures")


@dataclass(frozen=True)
class _Kind:
    """A model class with a config; equal ones are observed once."""

    model_class: type
    said: str
    config: Any = field(compare=False)


# What keeps a layer from being converted, as the object of "has".
_RESTRICTED = "a custom mask (chunks, or one that the model builds itself)"
_BIASED = "a custom mask or bias on the scores (as relative positions have, or the shifted windows of a Swin model)"
# A state that one layer decodes from has no keys for the others.
_SHARED = "keys that it shares with other layers"
_UNANNOUNCED = "another form of mask than its module announces"
_PECULIAR = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks with learned scores",
    "position_bias": "position_bias, a bias for each pair of positions",
}


class _Call(NamedTuple):
    """One call of an attention module. Storing tensors would keep their memory in use.

    Attributes:
        module: The module.
        query: Shape of the queries.
        key: Shape of the keys.
        scaling: Factor of the scores.
        kwargs: Further keywords.
        window: Size of the sliding window that its mask has.
        kept: What its mask has that no mechanism supports.
    """

    module: nn.Module
    query: torch.Size
    key: torch.Size
    scaling: float | None
    kwargs: dict[str, Any]
    window: int | None
    kept: str | None


def _by_reason(sites: Iterable[Site]) -> dict[str, list[Site]]:
    found: dict[str, list[Site]] = {}
    for site in sites:
        if site.kept is not None:
            found.setdefault(site.kept, []).append(site)
    return found


def _layers(sites: Sequence[Site]) -> str:
    return f"Layer{'s' * (len(sites) > 1)} {ranges(site.layer for site in sites)}"


class _Observer:
    """Replaces attention: returns the values, and records how each module calls it and the memory in use then."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.memory = LiveMemory()
        self.begun: list[int] = []
        # Masks that the model asked for and that mechanisms cannot take, with the sizes of their windows.
        self.masks: list[tuple[Tensor, int | None]] = []
        # The keys of each call, to find those that several layers share.
        self.keys: list[weakref.ref[Tensor]] = []
        # Dimensions of plain masks, for models that work on them: 2 for [B, S], as converted models get, 4 for [B, 1, L, S]; 0 for None.
        self.plain = 0
        # Those that were made, with whether they are causal.
        self.plain_masks: list[tuple[Tensor, bool]] = []
        # Config -> whether the plain masks of its models are causal.
        self.forms: dict[int, set[bool]] = {}

    def run(self, model: Any, inputs: dict[str, Tensor]) -> None:
        """Observe one forward pass, and discard earlier observations."""
        self.calls, self.begun, self.masks, self.keys, self.memory = [], [], [], [], LiveMemory()
        self.plain_masks = []
        with torch.no_grad(), self.memory:
            model(**inputs)
        if self.memory.draws:
            raise ApproxError(
                f"{type(model).__name__} draws random numbers in its forward pass, also when it does not train, so no two of its outputs "
                "can be compared. It cannot be converted.",
                Exit.UNSUPPORTED,
            )

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        window, kept = None, None
        if (form := next((causal for mask, causal in self.plain_masks if mask is attention_mask), None)) is not None:
            # Moonshine passes is_causal only where there is no mask.
            kept = None if form in (is_causal(module, kwargs), is_causal(module, {})) else _UNANNOUNCED
        elif attention_mask is not None:
            window = next((size for mask, size in self.masks if mask is attention_mask), None)
            kept = _BIASED if attention_mask.is_floating_point() else _RESTRICTED
        elif self.forms.get(id(getattr(module, "config", None))) == {not is_causal(module, kwargs)}:
            kept = _UNANNOUNCED
        if (owner := next((number for number, one in enumerate(self.keys) if one() is key), None)) is not None:
            kept = _SHARED
            self.calls[owner] = self.calls[owner]._replace(kept=_SHARED)
        self.keys.append(weakref.ref(key))
        self.calls.append(_Call(module, query.shape, key.shape, scaling, kwargs, window, kept))
        self.begun.append(self.memory.now + query.numel() * query.element_size())
        return values_only(module, query, key, value)

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        *args: Any,
        mask_function: Any = causal_mask_function,
        local_size: int | None = None,
        config: Any = None,
        **kwargs: Any,
    ) -> Tensor | None:
        if mask_function in (causal_mask_function, bidirectional_mask_function):
            # The two halves of an encoder-decoder share a config, and one of them may ask for no mask.
            if not config.is_encoder_decoder:
                self.forms.setdefault(id(config), set()).add(mask_function is causal_mask_function)
            shape = {0: None, 2: (batch_size, kv_length), 4: (batch_size, 1, q_length, kv_length)}[self.plain]
            if shape is None:
                return None
            self.plain_masks.append(
                (torch.ones(shape, dtype=torch.bool, device="meta"), mask_function is causal_mask_function)
            )
            return self.plain_masks[-1][0]
        # Chunks have a size too, under another name in the config.
        window = local_size if local_size == getattr(config, "sliding_window", None) else None
        # One byte stands for all pairs: only which layers get this mask matters.
        mask = torch.ones((), dtype=torch.bool, device="meta").expand(batch_size, 1, q_length, kv_length)
        self.masks.append((mask, window))
        return mask


def anatomy(config: Any, model_class: type) -> Anatomy:
    """Observe where and how a model of this config and class attends, without weights.

    Args:
        config: Config of a stock transformers model.
        model_class: The stock class.

    Raises:
        ApproxError: if the family does not dispatch its attention, or passes it something that no mechanism supports.
    """
    if not can_switch_attention(model_class):
        raise ApproxError(
            f"{model_class.__name__} (family '{config.model_type}') computes its attention inside its own modules instead of "
            "dispatching it, so it cannot be replaced. Families that dispatch, such as BERT, RoBERTa, "
            "DistilBERT, ELECTRA, GPT-2, Llama, Wav2Vec2, HuBERT, ViT and Whisper, can be converted.",
            Exit.UNSUPPORTED,
        )
    if config.is_encoder_decoder and _parts(config):
        raise _of_several(config, model_class)
    settings = {name: value for name, value in config.to_dict().items() if name not in _ORIGINS}
    return _observe(_Kind(model_class, repr(settings), copy.deepcopy(config)))


def _parts(config: Any) -> list[str]:
    """Names of the configs of its own that a model's parts have; other settings may be grouped in configs too."""
    return [
        name for name in config.sub_configs if getattr(getattr(config, name, None), "model_type", "") in CONFIG_MAPPING
    ]


def _of_several(config: Any, model_class: type) -> ApproxError:
    return ApproxError(
        f"{model_class.__name__} (family '{config.model_type}') is made of several models ({', '.join(_parts(config))}), each with a "
        "config of its own, which cannot be converted together. Save one of them as a checkpoint of its own, and convert that.",
        Exit.UNSUPPORTED,
    )


class _KnownIntegers(TorchFunctionMode):
    """Computes whole numbers and what follows from them alone with their values; all else has only shapes.

    Some models read such values: dynamic rotary positions compare the length with that of training.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return func(*tree_map(_shape_alone, args), **tree_map(_shape_alone, kwargs))
        here = tree_map(_on_cpu, args), tree_map(_on_cpu, kwargs)
        if tensors or here == (args, kwargs):
            return func(*here[0], **here[1])
        made = func(*args, **kwargs)
        whole = isinstance(made, Tensor) and not (made.is_floating_point() or made.is_complex())
        return func(*here[0], **here[1]) if whole else made


def _shape_alone(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, torch.device | str) and str(value) == "meta"
    return torch.device("cpu") if named else value


class _Passes(NamedTuple):
    """Observations of forward passes of two lengths.

    Attributes:
        model: The model, on the meta device.
        lengths: Positions of each pass.
        flops: Floating-point operations of each.
        calls: Attention calls of each.
        moments: Memory in use over the course of each.
        begun: Memory in use in each when each call began.
        last: Calls of the longer pass, with fewer tokens in the decoder if there is one.
    """

    model: Any
    lengths: tuple[int, int]
    flops: list[int]
    calls: list[list[_Call]]
    moments: list[Any]
    begun: list[list[int]]
    last: list[_Call]


def _passes(kind: _Kind, observer: _Observer, name: str, *, whole_numbers: bool) -> _Passes:
    """Run a model without weights under the observer.

    Args:
        kind: The model.
        observer: Replaces its attention.
        name: Name of that attention.
        whole_numbers: Whether whole numbers have values, for models that read them.
    """
    model_class, config = kind.model_class, kind.config
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(config).eval()
    if not any(map(_dispatches, {type(module) for module in model.modules()})):
        raise ApproxError(f"{model_class.__name__} has no self-attention that could be replaced.", Exit.UNSUPPORTED)
    model.set_attn_implementation(name)
    # Grouped expert products do not run on the meta device; batched ones need as many operations.
    model.set_experts_implementation("batched_mm")
    longest = min(_PROBE_LENGTH, positions.limit(config) or _PROBE_LENGTH)
    lengths, flops, calls, moments, begun = (longest // 2, longest), [], [], [], []
    with _KnownIntegers() if whole_numbers else nullcontext():
        for length in lengths:
            inputs = example_inputs(model, length, device="meta")
            if whole_numbers:
                whole = {key: x.shape for key, x in inputs.items() if not x.is_floating_point()}
                real = {key: torch.full(shape, 1 if key.endswith("mask") else 5) for key, shape in whole.items()}
                inputs = {**inputs, **real}
            if "input_ids" in inputs:
                # Without a mask some families search the ids for padding, but meta tensors have no values.
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            with FlopCounterMode(display=False) as counter:
                observer.run(model, inputs)
            flops.append(counter.get_total_flops())
            calls.append(observer.calls)
            moments.append(observer.memory.moments)
            begun.append(observer.begun)
        if "decoder_input_ids" in inputs:
            # With equal lengths, cross-attention would look like self-attention. The masks tell causal modules that are not marked.
            observer.plain, before = 4, observer.plain
            observer.run(model, {**inputs, "decoder_input_ids": inputs["decoder_input_ids"][:, 1:]})
            observer.plain = before
    return _Passes(model, lengths, flops, calls, moments, begun, observer.calls)


def _takes_padding(seen: _Passes, observer: _Observer) -> bool:
    """Whether a model of spectrograms runs with padding, whose mask converted models give their modules as [B, S]."""
    if main_input(seen.model) != "input_features":
        return True
    inputs = example_inputs(seen.model, seen.lengths[1], padded=seen.lengths[1] // 4, device="meta")
    observer.plain = 2
    try:
        observer.run(seen.model, inputs)
    except Exception as error:
        return _lacks_values(error)
    finally:
        observer.plain = 0
    return True


def _dispatches(module_class: type) -> bool:
    """Whether the code of a module's class knows the interface of transformers that dispatches attention."""
    files = (
        vars(sys.modules[kind.__module__])
        for kind in module_class.__mro__
        if kind.__module__.startswith("transformers.models.")
    )
    return any(isinstance(value, AttentionInterface) for names in files for value in names.values())


@lru_cache(maxsize=64)
def _observe(kind: _Kind) -> Anatomy:
    model_class, config = kind.model_class, kind.config
    observer = _Observer()
    try:
        # In inference mode, dropout that does nothing would count as a draw.
        with torch.inference_mode(False), temporary_attention(observer.attention, observer.mask) as name:
            try:
                seen = _passes(kind, observer, name, whole_numbers=False)
            except Exception as error:
                if observer.forms and "NoneType" in str(error):
                    observer.plain = 4
                elif not _lacks_values(error):
                    raise
                seen = _passes(kind, observer, name, whole_numbers=_lacks_values(error))
            works_on_mask = bool(observer.plain) or not _takes_padding(seen, observer)
    except ApproxError:
        raise
    except Exception as error:
        if _parts(config):
            # A model that reads only text is converted through its text model; this one needs its other parts.
            raise _of_several(config, model_class) from error
        what = f"{model_class.__name__} (family '{config.model_type}')"
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if _lacks_values(error):
            raise ApproxError(
                f"{what} reads values in its forward pass with this config, but planning knows only shapes ({why}). It cannot be converted.",
                Exit.UNSUPPORTED,
            ) from error
        raise ApproxError(
            f"{what} could not be run on example inputs to locate its attention: {why}. If stock transformers runs this model, the "
            "family is not supported; otherwise fix its config.json.",
            Exit.UNSUPPORTED,
        ) from error

    model, lengths, flops, calls, moments, begun, last_calls = seen
    cross, self_attention, layers, per_pair = [], [], [], 0
    for *pair, starts, last in zip(*calls, zip(*begun, strict=True), last_calls, strict=True):
        if _is_cross(*pair, last):
            cross.append(pair)
        else:
            self_attention.append([pair[0], pair[1]._replace(kept=_UNANNOUNCED)] if last.kept is _UNANNOUNCED else pair)
            layers.append(Moment.through(lengths, starts))
    for pair in cross:
        if not _is_cross(*pair):
            query = pair[0].query
            per_pair += 4 * query.numel() // query[-2]
            continue
        for number, call in enumerate(pair):
            flops[number] += 4 * call.query.numel() * call.key[-2]
    per_position = (flops[1] - flops[0]) / (lengths[1] - lengths[0])
    sites = _sites(model, self_attention)
    if works_on_mask:
        raise ApproxError(
            f"{model_class.__name__} works on the mask of its attention itself, to choose keys or to blank padding, which the mechanisms "
            "do not support. It cannot be converted.",
            Exit.UNSUPPORTED,
        )
    return Anatomy(
        family=config.model_type,
        architecture=model_class.__name__,
        sites=sites,
        cross_attention=len(cross),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        positions=positions.limit(config),
        seconds=seconds_per_position(config, main_input(model)),
        flops_per_position=per_position,
        flops_per_pair=per_pair,
        flops_fixed=flops[0] - per_position * lengths[0],
        footprint=Footprint(highest(observed(lengths, *moments)), tuple(layers)),
    )


def attends_causally(family: str) -> bool:
    """Whether any self-attention of a family is causal in its default config.

    Raises:
        ApproxError: if the family is unknown or cannot be converted.
    """
    if family not in CONFIG_MAPPING:
        hint = did_you_mean(family, CONFIG_MAPPING)
        raise ApproxError(
            f"Unknown family '{family}'.{hint} Families are named as in config.json: bert, gpt2, whisper."
        )
    config = CONFIG_MAPPING[family]()
    return any(site.causal for site in anatomy(config, backbone_of(type(config))).sites)


def _lacks_values(error: Exception) -> bool:
    return any(sign in str(error) for sign in ("meta tensor", "register_meta"))


def _is_cross(*calls: _Call) -> bool:
    return any(call.query[-2] != call.key[-2] for call in calls)


def _sites(model: Any, pairs: list[list[_Call]]) -> tuple[Site, ...]:
    name = type(model).__name__
    paths = {module: path for path, module in model.base_model.named_modules()}
    sites: list[Site] = []
    for shorter, call in pairs:
        module, query, kwargs = call.module, call.query, call.kwargs
        passed = {key for key, value in kwargs.items() if value is not None}
        # These layers stay exact by their family's own attention, if it has one.
        own = {*OWN_KEYWORDS} if hasattr(sys.modules[type(module).__module__], "eager_attention_forward") else set()
        if extras := sorted(passed - _HARMLESS - own - {"sliding_window"}):
            raise ApproxError(
                f"{name} passes {', '.join(extras)} to its attention, which the mechanisms do not support. Only models with "
                "plain softmax attention can be converted.",
                Exit.UNSUPPORTED,
            )
        if any(site.path == paths[module] for site in sites):
            raise ApproxError(
                f"{name} runs one attention module, {paths[module]}, in several layers, so layers cannot be selected "
                "separately. Only models with one attention module per layer can be converted.",
                Exit.UNSUPPORTED,
            )
        causal = is_causal(module, kwargs)
        if call.kept is _UNANNOUNCED:
            raise ApproxError(
                f"The attention of {name} has {'no' if causal else 'a'} causal mask, although its module {paths[module]} is "
                f"{'' if causal else 'not '}marked as causal, so its form is not certain. It cannot be converted.",
                Exit.UNSUPPORTED,
            )
        window = call.window or kwargs.get("sliding_window")
        reasons = [_PECULIAR[key] for key in OWN_KEYWORDS if key in passed]
        if window is not None:
            reasons.append(f"a sliding window of {window:,} tokens{'' if causal else ' on either side'}")
        elif call.kept is not None:
            reasons.append(call.kept)
        sites.append(
            Site(
                layer=len(sites),
                path=paths[module],
                heads=query[1],
                key_heads=call.key[1],
                head_dim=query[-1],
                causal=causal,
                scale=query[-1] ** -0.5 if call.scaling is None else float(call.scaling),
                fixed_length=query[-2] if query[-2] == shorter.query[-2] else None,
                window=window,
                kept=" and ".join(reasons) or None,
            )
        )
    if not sites:
        raise ApproxError(f"{name} has no self-attention that could be replaced.", Exit.UNSUPPORTED)
    if all(site.kept is not None for site in sites):
        raise _all_kept(model, sites)
    return tuple(sites)


def _all_kept(model: Any, sites: Sequence[Site]) -> ApproxError:
    name = type(model).__name__
    reasons = [f"{_layers(alike).lower()} {_have(alike)} {kept}" for kept, alike in _by_reason(sites).items()]
    like = "ViT" if model.main_input_name == "pixel_values" else "BERT, GPT-2 and Llama"
    remedy = f"Only layers with plain causal or bidirectional attention can, such as those of {like}."
    window = next(iter({site.window for site in sites})) if len(reasons) == 1 else None
    if window is not None and getattr(model.config, "sliding_window", None) == window:
        remedy += (
            f" Inputs of at most {window:,} tokens do not reach beyond such a window: for these, set sliding_window to null in the "
            "config.json of a copy, and convert that."
        )
    return ApproxError(f"No layer of {name} can be converted: {'; '.join(reasons)}. {remedy}", Exit.UNSUPPORTED)


def _have(sites: Sequence[Site]) -> str:
    return "have" if len(sites) > 1 else "has"
