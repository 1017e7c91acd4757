"""Decoding for timing: a language model generates the same number of tokens after the same prompt, again and again."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from approx.errors import ApproxError, Exit
from approx.evaluation.bench import Contender
from approx.recipe import BASE, CEILING
from approx.seam.attention_free import attention_free
from approx.seam.dispatch import fastest_exact
from approx.seam.transformers_internals import cache_keyword


class Decoder:
    """Greedy decoding by one model, each time from a copy of the cache that holds the prompt.

    Args:
        model: A decoder of text.
        new_tokens: Tokens to decode.
        within: Context of all calls of the model, such as `attention_free`.
    """

    def __init__(
        self,
        model: Any,
        new_tokens: int,
        within: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._model, self._new_tokens, self._within = model, new_tokens, within
        self._inputs: Any = None
        self._read: tuple[Tensor, Any] | None = None
        self._cache: Any = None
        self._bytes = 0

    def begin(self, inputs: dict[str, Tensor]) -> None:
        """Read the prompt `inputs["input_ids"]` [B, L], once for each object, and copy its cache."""
        if self._read is None or inputs is not self._inputs:
            self._read = None
            cache = DynamicCache(config=self._model.config)
            self._inputs, self._read = inputs, (self._generated(inputs["input_ids"], cache, 1), cache)
        self._cache = copy.deepcopy(self._read[1])

    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        """Decode the new tokens; `begin` must precede every call.

        Returns:
            The prompt, the token after it, and the new tokens, [B, L + 1 + new].
        """
        if self._read is None or self._cache is None:
            raise RuntimeError("`begin` must precede every `run`.")
        ids = self._generated(self._read[0], self._cache, self._new_tokens)
        self._bytes, self._cache = cache_bytes(self._cache), None
        return ids

    def cache_mb(self) -> float:
        """Megabytes of the cache after the last token of the last `run`."""
        return self._bytes / 1e6

    def _generated(self, ids: Tensor, cache: Any, count: int) -> Tensor:
        with self._within(self._model):
            # No row ends early, so nothing is padded.
            return self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                num_beams=1, pad_token_id=0, **{cache_keyword(): cache},
            )  # fmt: skip


def decoders(models: Mapping[str, Any], new_tokens: int) -> list[Contender]:
    """Contenders that decode: the first model is the base, in its own ways and without attention.

    Raises:
        ApproxError: if a model does not continue a text.
    """
    for model in models.values():
        refuse(model)

    def contender(name: str, decoder: Decoder, **role: Any) -> Contender:
        return Contender(name, decoder.run, begin=decoder.begin, cache_mb=decoder.cache_mb, **role)

    base = models[BASE]
    own = Decoder(base, new_tokens)

    def fastest(inputs: Any) -> Tensor:
        with fastest_exact(base):
            return own.run(inputs)

    return [
        contender(BASE, own, role="base"),
        Contender("fastest way", fastest, "exact", begin=own.begin),
        contender(CEILING, Decoder(base, new_tokens, attention_free), role="ceiling"),
        *(contender(label, Decoder(model, new_tokens)) for label, model in models.items() if label != BASE),
    ]


def refuse(model: Any) -> None:
    """Raise if a model does not continue a text.

    Raises:
        ApproxError: naming what it is.
    """
    causal = model.can_generate() and not model.config.is_encoder_decoder and model.main_input_name == "input_ids"
    if not causal:
        raise ApproxError(
            f"A {type(model).__name__} does not continue a text. Only decoders with a language-modelling head do, such as "
            "GPT-2 and Llama; for other models there are `approx predict` and `approx bench` without --mode.",
            Exit.UNSUPPORTED,
        )


def cache_bytes(cache: Any) -> int:
    """Bytes of the tensors in a KV cache of transformers, with the states and notes of converted layers."""
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)

    # The cache of an encoder-decoder holds one for each kind of attention.
    parts = [part for name in ("self_attention_cache", "cross_attention_cache") if (part := getattr(cache, name, None))]
    for one in parts or [cache]:
        for layer in one.layers:
            visit(vars(layer))
    return sum(storages.values())
