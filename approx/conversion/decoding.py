"""Export a decoder as a program that reads tokens and a state, and returns logits and the next state."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers.cache_utils import DynamicCache, DynamicLayer

from approx.checkpoints.exported import first_line
from approx.errors import ApproxError, Exit
from approx.planning import positions
from approx.planning.positions import example_inputs
from approx.seam.decode_cache import StateLayer, keeps_state
from approx.seam.internals import cache_keyword
from approx_kernels.tokens import PARTS, content

FIRST_STATE = "first_state.npz"
"""File of the state before the first token, of one text."""
TOLERANCE = 1e-4
"""Largest difference from PyTorch's decoding, relative to the largest logit."""
# More tokens than a window has, and than any window has that a model is likely to get.
_PADDING = 4096, 2**17
# Sizes of the traced inputs: texts, new tokens, earlier tokens.
_TRACED = 2, 7, 5
# Tokens of the check that are read one at a time, as generation does.
_STEPS = 8


class _Ordinary(DynamicLayer):
    """A layer of an ordinary cache that the seam leaves as it is."""


class _Kept(StateLayer):
    """The state of a layer as a program has it: tensors of fixed sizes. The mask may be of the new tokens alone."""

    def __init__(self, state: dict[str, Tensor], seen: Any) -> None:
        super().__init__()
        self.state, self.seen = state, seen

    def attend(self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Attend with the newest tokens and add them to the state."""
        key_mask = None if key_mask is None else key_mask[:, -k.shape[2] :]
        out, state = mechanism.decode(q, k, v, key_mask, self.state)
        self.state = _without_room(state)
        return out


def _without_room(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state whose rings have no room for later keys; groups of heads have a ring each."""
    held = {name: x for name, x in state.items() if name.rpartition(".")[2] not in (*PARTS, "span")}
    for prefix in [name.removesuffix("k") for name in state if name.rpartition(".")[2] == "k"]:
        ring = {name: state[prefix + name] for name in (*PARTS, "span") if prefix + name in state}
        k, v, real = content(ring)
        assert real is not None, "programs have a mask"
        held |= {f"{prefix}k": k, f"{prefix}v": v, f"{prefix}real": real[:, None, :, None]}
    return held


@dataclass(frozen=True)
class FirstState:
    """The state before the first token.

    Attributes:
        tensors: Input name -> tensor of one text.
        growing: Layers with an ordinary cache, whose keys and values grow with the text.
    """

    tensors: dict[str, Tensor]
    growing: list[int]

    @property
    def bytes(self) -> int:
        """Bytes for each text, without what grows."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())


def refuse_undecodable(model: Any) -> None:
    """Check that a model writes text from tokens alone.

    Raises:
        ApproxError: if it does not.
    """
    able = model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)
    if not (able and model.main_input_name == "input_ids" and "position_ids" in signature(model.forward).parameters):
        raise ApproxError(
            f"--decode exports decoders that write text and take position_ids; this is a {type(model).__name__}. Leave it out "
            "for a program of one forward pass.",
            Exit.UNSUPPORTED,
        )


def continues(mechanism: Any) -> bool:
    """Whether a layer continues from a state of bounded size, rather than from an ordinary cache."""
    return keeps_state(mechanism) and not mechanism.takes_notes


def first_state(model: Any) -> FirstState:
    """The state before the first token: that of a mechanism after padding alone, and ordinary caches without keys."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = _Ordinary
    model(**example_inputs(model, 2), use_cache=True, **{cache_keyword(): cache})
    mechanisms = dict(_keeping(model))
    growing = [number for number in range(len(cache.layers)) if number not in mechanisms]
    tensors = {"past.tokens": torch.zeros(1, dtype=torch.long)}
    if growing:
        tensors["past.mask"] = torch.zeros(1, 0, dtype=torch.long)
    known: dict[str, dict[str, Tensor]] = {}
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        assert isinstance(keys, Tensor), "it has read two tokens"
        assert isinstance(values, Tensor), "it has read two tokens"
        parts = {"key": keys[:, :, :0], "value": values[:, :, :0]}
        if number in mechanisms:
            mechanism = mechanisms[number]
            # Parameters do not matter here.
            kind = f"{mechanism} {mechanism.heads} {keys.shape} {values.shape}"
            parts = known[kind] = known.get(kind) or _after_padding(mechanism, keys, values)
        tensors |= {f"past.{number}.{name}": x.contiguous() for name, x in parts.items()}
    return FirstState(tensors, growing)


def _keeping(model: Any) -> Iterator[tuple[int, Any]]:
    """Number and mechanism of each layer that continues from a state."""
    for module in model.base_model.modules():
        mechanism = getattr(module, "mechanism", None)
        if mechanism is not None and continues(mechanism):
            yield module.layer_idx, mechanism


def _after_padding(mechanism: Any, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """The state of a mechanism that has seen more padding than it holds keys; traced, since programs may keep another one."""

    class AfterPadding(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> dict[str, Tensor]:
            return _without_room(mechanism.decode(q, k, v, key_mask)[1])

    for count in _PADDING:
        k, v = (x.new_zeros(1, x.shape[1], count, x.shape[3]) for x in (keys, values))
        padding = torch.zeros(1, count, dtype=torch.bool)
        inputs = k.new_zeros(1, mechanism.heads, 1, k.shape[3]), k, v, padding
        state = torch.export.export(AfterPadding(), inputs).module()(*inputs)
        if max((x.shape[2] for x in state.values() if x.dim() == 4), default=0) < count:
            return state
    raise ApproxError(
        f"A window of {count:,} tokens or more is too wide for a program with a state. Make these layers exact, or leave out "
        "--decode.",
        Exit.UNSUPPORTED,
    )


class _Step(nn.Module):
    """A model as a function of new tokens and a state."""

    def __init__(self, model: Any, first: FirstState) -> None:
        super().__init__()
        self.model, self.growing = model, set(first.growing)
        self.parts: dict[int, list[str]] = {}
        for name in first.tensors:
            _, layer, *part = name.split(".", 2)
            if part:
                self.parts.setdefault(int(layer), []).append(part[0])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: dict[str, Tensor]) -> dict[str, Tensor]:
        """Logits, [B, L, V], and the state with these tokens; `attention_mask` is that of the new tokens."""
        tokens, mask = past["past.tokens"], attention_mask
        if self.growing:
            mask = torch.cat([past["past.mask"], mask], 1)
        # As generation counts: from the first real token.
        places = (tokens[:, None] + attention_mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache()
        cache.layers = [self._layer(number, past, mask.shape[1] - input_ids.shape[1]) for number in sorted(self.parts)]
        given = {"input_ids": input_ids, "attention_mask": mask, "position_ids": places, "use_cache": True}
        found = {"logits": self.model(**given, **{cache_keyword(): cache}).logits}
        found["present.tokens"] = tokens + attention_mask.sum(1)
        if self.growing:
            found["present.mask"] = mask
        for number, layer in enumerate(cache.layers):
            state: Any = {"key": layer.keys, "value": layer.values} if number in self.growing else layer.state
            found |= {f"present.{number}.{part}": state[part] for part in self.parts[number]}
        return found

    def _layer(self, number: int, past: dict[str, Tensor], seen: Any) -> Any:
        state = {part: past[f"past.{number}.{part}"] for part in self.parts[number]}
        if number not in self.growing:
            return _Kept(state, seen)
        layer = _Ordinary()
        layer.lazy_initialization(state["key"], state["value"])
        layer.keys, layer.values = state["key"], state["value"]
        return layer


def program(model: Any, first: FirstState) -> tuple[ExportedProgram, list[str], list[str]]:
    """The program, and the names of its inputs and outputs.

    Raises:
        ApproxError: if the model cannot be traced.
    """
    batch, count, earlier = _TRACED
    past = {}
    for name, x in first.tensors.items():
        x = x.repeat_interleave(batch, 0)
        grows = x.dim() > 1 and 0 in x.shape
        past[name] = x.new_zeros([size or earlier for size in x.shape]) if grows else x
    inputs = {
        "input_ids": torch.ones(batch, count, dtype=torch.long),
        "attention_mask": torch.ones(batch, count, dtype=torch.long),
        "past": past,
    }
    free: dict[str, Any] = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in ("input_ids", "attention_mask")}
    free["past"] = {
        name: {0: Dim.DYNAMIC} | {place: Dim.DYNAMIC for place, size in enumerate(x.shape) if not size}
        for name, x in first.tensors.items()
    }
    step = _Step(model, first)
    try:
        # States have no room for later keys where gradients may be needed. Shapes of many symbols are slow to look up.
        with torch.enable_grad(), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            made = torch.export.export(step, (), inputs, dynamic_shapes=free)
    except Exception as error:
        # PyTorch raises many kinds here, with reports of many lines.
        raise ApproxError(
            f"A {type(model).__name__} with these mechanisms has no program that continues from a state: {first_line(error)}",
            Exit.UNSUPPORTED,
        ) from error
    names = ["input_ids", "attention_mask", *past]
    return made, names, ["logits", *(name.replace("past", "present", 1) for name in past)]


def compared(
    model: Any, run: Callable[[dict[str, Tensor]], Sequence[Tensor]], first: FirstState, batch: int, length: int
) -> tuple[Tensor, Tensor]:
    """Logits of real tokens from the program and from PyTorch's decoding, [tokens, V].

    The program reads the first half of the prompt, the second half, and single tokens; PyTorch the whole prompt. Of several
    texts, the last is padded on the left.

    Raises:
        ApproxError: if the program does not take these inputs.
    """
    ids = example_inputs(model, length, batch=batch)["input_ids"]
    prompt = length - min(_STEPS, length // 2)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[-1, : prompt // 4] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache, expected = DynamicCache(config=model.config), []
    for begin, end in [(0, prompt), *((place, place + 1) for place in range(prompt, length))]:
        given = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], "position_ids": places[:, begin:end]}
        expected.append(model(**given, use_cache=True, **{cache_keyword(): cache}).logits)
    state, actual = {name: x.repeat_interleave(batch, 0) for name, x in first.tensors.items()}, []
    bounds = [0, *([prompt // 2] if prompt > 1 else []), *range(prompt, length + 1)]
    for begin, end in pairwise(bounds):
        try:
            logits, *after = run({"input_ids": ids[:, begin:end], "attention_mask": mask[:, begin:end], **state})
        except Exception as error:
            # Runtimes raise many kinds here.
            raise ApproxError(
                f"The exported program does not take {batch} times {end - begin} tokens after {begin}: "
                f"{first_line(error)}. Nothing was written.",
                Exit.VERIFICATION,
            ) from error
        actual.append(logits)
        state = dict(zip(state, after, strict=True))
    real = mask.bool()
    return torch.cat(actual, 1)[real], torch.cat(expected, 1)[real]


def lengths(model: Any, first: FirstState, usual: tuple[int, ...]) -> list[int]:
    """The usual lengths of the check, the last one longer than the state's windows if the model takes that many tokens."""
    held = max((x.shape[2] for x in first.tensors.values() if x.dim() == 4), default=0)
    most = positions.limit(model.config)
    wanted = [*usual[:-1], max(usual[-1], held + 3 * _STEPS)]
    return [min(length, most or length) for length in wanted]
