"""How a decoder reads a text that is longer than its window: what it keeps of the tokens before.

Source: `segments` is the memory of Dai et al., 2019, "Transformer-XL: Attentive Language Models beyond a Fixed-Length
Context", arXiv 1901.02860; departs from it in keeping keys and values, not hidden states, in the model's own positions,
and in keeping first tokens as well, after Xiao et al., 2023, "Efficient Streaming Language Models with Attention
Sinks", arXiv 2309.17453.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.cache_utils import DynamicLayer

from approx.errors import ApproxError, Exit
from approx.tasks.task import Encoding

# Rounding of keys that were rotated twice; keys of other positions differ by more.
_SAME = {torch.float32: 1e-3, torch.float64: 1e-3}
_SAME_IN_HALVES = 3e-2
# First tokens that are kept with segments, as many as Xiao et al. 2023, arXiv 2309.17453, keep.
_SINKS = 4


class Carried:
    """A model that reads one text in order, some tokens at a time, and what it keeps in between.

    - `recompute`: the last `window - 1 - stride` tokens, which are read again; needs no cache.
    - `flush`: keys and values, until the window is full; then nothing.
    - `segments`: keys and values of `window - stride` tokens, without gradient: of the first ones of the text, to which
      models give the weight that they have left over, and of the last ones.
    - `state`: whatever the model's cache keeps: of a converted model rings and recurrent states, of others all keys.

    Rotary positions stay within those the model has: keys that are kept are rotated back when the end is reached, which
    changes no distance but that to the first tokens. A position table is read in turn, so that a token keeps the row it was read with.

    Args:
        model: A causal model of transformers.
        carry: What it keeps.
        window: Tokens that attention sees at most; of `recompute` the last is predicted, as in transformers' own loop.
            `state` has none.
        stride: Tokens read at a time; of `segments` those that are not kept.
        sinks: First tokens among those that `segments` keeps, s; None for 4, or half of what it keeps if that is less.

    Raises:
        ApproxError: if the model cannot carry this.
    """

    def __init__(self, model: Any, carry: str, window: int, stride: int, sinks: int | None = None) -> None:
        self._model, self.carry, self._window = model, carry, window
        self._sinks = 0
        if carry == "segments":
            self._sinks = min(_SINKS, (window - stride) // 2) if sinks is None else sinks
        self._known = set(inspect.signature(model.forward).parameters)
        # `cache` from transformers 5.24 on, `past_key_values` before.
        self._keyword = next((name for name in ("cache", "past_key_values") if name in self._known), None)
        self._rotary = _rotary(model)
        self._positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._kept = {"recompute": window - 1 - stride, "flush": 0, "segments": window - stride}.get(carry)
        self.first = window - 1 if carry == "recompute" else window if carry == "flush" else stride
        self.next = window if carry == "flush" else stride
        self.forget()
        self._check()

    def forget(self, model: Any = None) -> None:
        """Begin another text, with the same model in a wrapper if one is given."""
        self._model = self._model if model is None else model
        self._cache: Any = None
        self._tokens: Tensor | None = None
        # Tokens in the cache, and the position of the next one.
        self._held = self._place = 0

    def read(self, tokens: Tensor) -> Tensor:
        """The logits after each of the next tokens, [B, n, V].

        Args:
            tokens: The next tokens of each text, [B, n]; at most as many as the window has room for.
        """
        count = tokens.shape[1]
        if self.carry == "recompute" and self._kept is not None:
            known = tokens if self._tokens is None else torch.cat([self._tokens, tokens], 1)
            self._tokens = known[:, max(known.shape[1] - self._kept, 0) :].clone()
            less = {"logits_to_keep": count, "use_cache": False}
            fewer = {name: value for name, value in less.items() if name in self._known}
            return self._model(input_ids=known, **fewer).logits[:, -count:]
        if self.carry == "flush" and self._held + count > self._window:
            self.forget()
        self._cache, logits = self._call(tokens, self._cache, self._position_ids(count, tokens.device))
        self._held += count
        self._place += count
        if self.carry == "flush" and self._held >= self._window:
            self.forget()
        elif self._kept is not None:
            self._keep(self._kept if self.carry == "segments" else self._window)
        return logits

    def write(self, tokens: Tensor, count: int) -> Tensor:
        """The prompt and the most likely tokens after it, [1, n + count]; as long as you like.

        Args:
            tokens: The prompt, [1, n].
            count: Tokens to write.
        """
        self.forget()
        with torch.inference_mode():
            logits = None
            for some in tokens.split([*self.steps(tokens.shape[1])], 1):
                logits = self.read(some)
            assert logits is not None
            written = [tokens]
            for _ in range(count):
                written.append(logits[:, -1:].argmax(-1))
                logits = self.read(written[-1])
        return torch.cat(written, 1)

    def steps(self, count: int) -> Iterator[int]:
        """How many of so many tokens to read at a time."""
        size = self.first
        while count > 0:
            yield min(size, count)
            count, size = count - size, self.next

    @property
    def state_bytes(self) -> int:
        """Bytes of what is kept now."""
        found: dict[int, int] = {}
        _storages([self._cache, self._tokens], found, set())
        return sum(found.values())

    @property
    def grows(self) -> bool:
        """Whether the cache keeps something of every token."""
        layers = getattr(self._cache, "layers", [])
        return self._kept is None and any(
            isinstance(layer, DynamicLayer) and not getattr(layer, "is_sliding", False) for layer in layers
        )

    @property
    def most(self) -> int | None:
        """Longest text, in tokens; None for any."""
        return self._positions if self.grows else None

    def _call(self, tokens: Tensor, cache: Any, positions: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """The cache after some tokens, None if the model has none, and their logits."""
        if self._keyword is None:
            return None, tokens
        outputs = self._model(input_ids=tokens, use_cache=True, **{self._keyword: cache}, **positions)
        return getattr(outputs, self._keyword, None), outputs.logits

    def _position_ids(self, count: int, device: torch.device) -> dict[str, Tensor]:
        if "position_ids" not in self._known:
            return {}
        if self._rotary is not None and self._kept is not None:
            self._turn_back(count)
        places = torch.arange(self._place, self._place + count, device=device)
        if self._rotary is None and self._positions:
            places %= self._positions
        return {"position_ids": places[None]}

    def _keep(self, count: int) -> None:
        """Keep the first and the last tokens, and let no gradient reach them."""
        last = count - self._sinks
        for layer in self._cache.layers:
            layer.keys, layer.values = (
                x.detach()
                if x.shape[-2] <= count
                else torch.cat([x[..., : self._sinks, :], x[..., x.shape[-2] - last :, :]], -2).detach()
                for x in (layer.keys, layer.values)
            )
        self._held = min(self._held, count)

    def _turn_back(self, count: int) -> None:
        """Rotate the kept keys to the first positions, after the sinks, if the next tokens would reach beyond the last."""
        back = self._place - self._held
        if not back or not self._positions or self._place + count <= self._positions:
            return
        for layer in self._cache.layers:
            sinks, later = layer.keys[..., : self._sinks, :], layer.keys[..., self._sinks :, :]
            layer.keys = torch.cat([sinks, rotated(self._rotary, later, -back, self._halves)], -2)
        self._place = self._held

    def _check(self) -> None:
        """Raise if the model cannot carry this."""
        if self.carry == "recompute":
            return
        name = type(self._model).__name__
        cache, keys, training = None, [], self._model.training
        self._model.eval()
        with torch.inference_mode():
            tokens = torch.tensor([[1, 2]], device=self._model.device)
            for start in (0, 3):
                places = {"position_ids": torch.arange(start, start + 2, device=tokens.device)[None]}
                cache, _ = self._call(tokens, None, places if "position_ids" in self._known else {})
                keys.append(getattr((getattr(cache, "layers", None) or [None])[0], "keys", None))
        self._model.train(training)
        if cache is None:
            raise ApproxError(
                f"carry={self.carry} reads on from a cache, but {name} keeps none. Use carry=recompute.",
                Exit.UNSUPPORTED,
            )
        if self.carry == "state":
            return
        others = sorted({type(layer).__name__ for layer in getattr(cache, "layers", [cache])} - {"DynamicLayer"})
        if others:
            raise ApproxError(
                f"carry={self.carry} cuts keys and values off a cache, but layers of {name} have a {', '.join(others)}. "
                "Use carry=state, which keeps what these keep, or recompute.",
                Exit.UNSUPPORTED,
            )
        if self._rotary is None:
            if "position_ids" not in self._known:
                raise ApproxError(
                    f"carry={self.carry} sets the positions of tokens, but {name} takes none. Use carry=recompute.",
                    Exit.UNSUPPORTED,
                )
            return
        same = _SAME.get(keys[0].dtype, _SAME_IN_HALVES) * keys[0].abs().max()
        for self._halves in (True, False):
            if (rotated(self._rotary, keys[1], -3, self._halves) - keys[0]).abs().max() <= same:
                return
        raise ApproxError(
            f"carry={self.carry} rotates kept keys to other positions, but those of {name} do not follow its "
            f"{type(self._rotary).__name__}. Use carry=recompute.",
            Exit.UNSUPPORTED,
        )


def rotated(rotary: Any, keys: Tensor, by: int, halves: bool) -> Tensor:
    """Keys at positions `by` further on.

    Args:
        rotary: The model's rotary embedding.
        keys: Rotated keys, [B, G, n, D].
        by: Positions, also negative.
        halves: Whether the two numbers of a pair lie half a head apart, as in Llama, or side by side, as in Cohere.
    """
    wide = keys.float()
    cos, sin = (
        x.float() / getattr(rotary, "attention_scaling", 1.0)
        for x in rotary(wide, torch.tensor([[by]], device=keys.device))
    )
    size = cos.shape[-1]
    if size > keys.shape[-1]:
        return torch.full_like(keys, torch.inf)
    turned, rest = wide[..., :size], wide[..., size:]
    if halves:
        across = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
    else:
        across = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    return torch.cat([turned * cos + across * sin, rest], -1).to(keys.dtype)


def _rotary(model: nn.Module) -> Any:
    """The model's rotary embedding; None if it has none."""
    return next((module for module in model.modules() if hasattr(module, "inv_freq")), None)


def _storages(value: Any, found: dict[int, int], seen: set[int]) -> None:
    """Note the bytes of all tensors in an object, each storage once."""
    if isinstance(value, Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return
    parts = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else None
    if parts is None:
        parts = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    if id(value) not in seen:
        seen.add(id(value))
        for part in list(parts):
            _storages(part, found, seen)


def losses_in_order(model: Any, pieces: Sequence[Encoding], carry: str) -> Iterator[tuple[Tensor, int, float]]:
    """Read a text from its first piece to its last.

    Args:
        model: A causal model.
        pieces: Consecutive pieces of one text, as `LanguageModelling.encode` makes them.
        carry: See `Carried`.

    Yields:
        For each piece the losses of its scored tokens, the bytes of what is kept after it, and the seconds since the
        piece before.

    Raises:
        ApproxError: if the model cannot carry this, or the text is longer than it allows.
    """
    carried = Carried(model, carry, pieces[0]["window"], pieces[0]["stride"], pieces[0]["sinks"])
    before, *_ = pieces[0]["input_ids"]
    tokens = torch.tensor([[before, *(token for one in pieces for token in one["input_ids"][-one["scored"] :])]])
    length, read = tokens.shape[1], 0
    waiting, losses = iter(pieces), torch.empty(0)
    one = next(waiting)
    began = time.perf_counter()
    for count in carried.steps(length - 1):
        logits = carried.read(tokens[:, read : read + count].to(model.device))
        if carried.most is not None and length > carried.most:
            raise ApproxError(
                f"carry={carry} keeps all keys of {type(model).__name__}, which has {carried.most:,} positions, and the "
                f"text has {length:,} tokens. Use carry=segments or recompute, a smaller --limit, or convert every layer "
                "to sinks, local, linear or performer.",
                Exit.UNSUPPORTED,
            )
        targets = tokens[0, read + 1 : read + count + 1].to(logits.device)
        losses = torch.cat([losses, cross_entropy(logits[0].float(), targets, reduction="none").cpu()])
        read += count
        if carry == "flush":
            # The last window may not be full.
            carried.forget()
        while one is not None and len(losses) >= one["scored"]:
            now = time.perf_counter()
            yield losses[: one["scored"]], carried.state_bytes, now - began
            losses, began, one = losses[one["scored"] :], now, next(waiting, None)
