"""The only interface to transformers' attention: dispatcher, mask function, and attaching mechanisms to modules.

Families that call `attention_interface(module, q, k, v, mask, …)` after their projections need no code of their own:
each converted attention module has a child named `mechanism`, which the dispatcher calls; modules without one run exact
attention. This file is copied into converted checkpoints, so it does not depend on plans or on the tool.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, is_dynamo_compiling
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from approx.errors import ApproxError, Exit
from approx.mechanisms.exact import ExactAttention
from approx.seam.decode_cache import (
    drop_states,
    has_notes,
    has_state,
    keep_states,
    keeps_state,
    take_layer,
    wants_weights,
)
from approx.seam.layer_entry import build
from approx.seam.masks import dense_mask, in_use, is_causal, key_mask
from approx.seam.transformers_internals import implementation_of, under_implementation
from approx_kernels.dispatch.one_operator import attend_opaquely, exact_is_one_operator
from approx_kernels.dispatch.opaque import told
from approx_kernels.ops.fastest.api import fastest_attention
from approx_kernels.runtime.custom_op import capturing
from approx_kernels.runtime.observed import unreadable
from approx_kernels.tokens.grouped import beside, sharing

IMPLEMENTATION = "approx_v1"
FORMAT = 1
# Keyword that passes token ids from the model's forward to its attention, for mechanisms that read them.
TOKENS = "approx_tokens"


def _exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    if exact_is_one_operator(query, scale, dropout):
        # The scale may be symbolic, which text cannot hold; one operator implies the default scale.
        text = _exactly(query.shape[1], query.shape[3], causal, query.shape[3] ** -0.5)
        return attend_opaquely(None, text, query, key, value, mask, 0.0, None)
    return fastest_attention(query, key, value, mask, causal=causal, scale=scale, dropout=dropout)


@assume_constant_result
def _exactly(heads: int, head_dim: int, causal: bool, scale: float) -> str:
    return told(ExactAttention, {"heads": heads, "head_dim": head_dim, "causal": causal, "scale": scale})


def _exact_weights(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (beside(query.float() * scale, key) @ key.float().transpose(-1, -2)).view(*query.shape[:3], key.shape[2])
    if causal and mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(
            key.shape[-2] - query.shape[-2]
        )
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0).to(query.dtype)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function of the seam: the module's mechanism if it has one, otherwise exact attention.

    Args:
        module: The attention module of the model.
        query: [B, H, L, D].
        key: [B, G, S, D] with G key heads, each shared by H / G query heads.
        value: [B, G, S, E].
        attention_mask: The result of `key_mask`.
        dropout: Dropout probability of the attention weights; 0 outside training.
        scaling: Factor of the scores, as the model passes it.
        kwargs: Further keywords of the family; only the request for attention weights is read.

    Returns:
        Output [B, L, H, E], and attention weights [B, H, L, S] if requested.

    Raises:
        ApproxError: if a layer with an approximating mechanism gets a mask that is not a plain key mask.
    """
    mechanism = getattr(module, "mechanism", None)
    causal = is_causal(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weighs, slots = wants_weights(kwargs), key.shape[-2]
    layer = take_layer(module)
    # A graph cannot read a mask, so there SDPA takes the mask row of a static cache unchanged.
    followed = is_dynamo_compiling() or capturing()
    if not (followed and (mechanism is None or _always_exact(mechanism))):
        key, value, attention_mask = in_use(query, key, value, attention_mask, causal)
    queries, keys = query.shape[-2], key.shape[-2]

    if mechanism is None or attends_exactly(mechanism, keys, attention_mask):
        if not weighs and (attention_mask is None or attention_mask.dim() == 2):
            return _exact(query, key, value, attention_mask, causal, scale, dropout).transpose(1, 2), None
        mask = dense_mask(attention_mask, causal, queries, keys, query.device)
        how: dict[str, Any] = {
            "dropout_p": dropout,
            "scale": scale,
            "is_causal": causal and mask is None and queries > 1,
        }
        out = F.scaled_dot_product_attention(query, key, value, mask, **how, enable_gqa=sharing(query, key) > 1)
        out = out.transpose(1, 2)
        if not weighs:
            return out, None
        return out, F.pad(_exact_weights(query, key, mask, causal, scale), (0, slots - keys))

    if scale != mechanism.scale:
        raise ApproxError(
            f"The model scales its scores by {scale}, but the converted layer was built for {mechanism.scale}. Convert it again.",
            Exit.VERIFICATION,
        )
    tokens = {}
    if mechanism.reads_tokens:
        if kwargs.get(TOKENS) is None:
            raise ApproxError(
                "A converted layer chooses its global tokens by content, but this forward got embeddings without token ids. "
                "Pass 'input_ids', or convert with global tokens chosen by position."
            )
        tokens["tokens"] = kwargs[TOKENS]
    if has_state(layer) and (weighs or dropout):
        raise ApproxError(
            "Attention weights or dropout were requested in the middle of a generation, but the cache of a converted layer does "
            "not store single keys. Request them from the first token on, or pass use_cache=False.",
            Exit.UNSUPPORTED,
        )
    if has_state(layer):
        return layer.attend(mechanism, query, key, value, attention_mask).transpose(1, 2), None
    # An observer may need the mechanism as one operator, which does not take notes.
    notes = {"notes": layer.notes} if has_notes(layer) and not unreadable(query) else {}
    out = mechanism(query, key, value, attention_mask, dropout=dropout, **tokens, **notes).transpose(1, 2)
    if not weighs:
        return out, None
    return out, F.pad(mechanism.weights(query, key, attention_mask, **tokens), (0, slots - keys))


def attends_exactly(mechanism: Any, keys: int, mask: Tensor | None) -> bool:
    """Whether exact attention replaces a layer's mechanism in a call.

    Args:
        mechanism: The layer's mechanism.
        keys: Number of keys in use.
        mask: The result of `in_use`.

    Raises:
        ApproxError: if the mechanism would get a mask that is not a plain key mask.
    """
    if keys < mechanism.exact_below:
        return True
    if mask is None or mask.dim() == 2:
        return False
    if _always_exact(mechanism):
        return True
    raise ApproxError(
        "A 4-D attention mask (packed sequences, several tokens at once with a compiled static cache, or a custom mask) reached "
        "a converted layer, which takes a [batch, tokens] mask. Unpack the sequences, compile single steps alone or use a dynamic "
        "cache, or keep exact attention in this model.",
        Exit.UNSUPPORTED,
    )


def _always_exact(mechanism: nn.Module) -> bool:
    # Mechanisms do not take 4-D masks, but SDPA computes the same as the exact ones.
    return all(each.always_exact for each in getattr(mechanism, "groups", [mechanism]))


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, key_mask)


@contextmanager
def fastest_exact(model: Any) -> Iterator[None]:
    """Run an unconverted model with the fastest exact attention on this machine."""
    with under_implementation(model.config, IMPLEMENTATION):
        yield


def attach(model: Any, sites: Mapping[str, Mapping[str, Any]]) -> None:
    """Attach a mechanism to each named attention module of `model` and switch its dispatch to the seam.

    Args:
        model: A transformers model.
        sites: Path of the attention module inside the base model -> the arguments of `build`.

    Raises:
        ApproxError: if there are no sites, a mechanism is unknown, or the switch has no effect.
    """
    if not sites:
        raise ApproxError("No attention layer was selected, so nothing would change. Select at least one layer.")
    # Everything is built first, so that an error leaves the model unchanged.
    built = {path: build(site) for path, site in sites.items()}
    for reader in {_reader(path, model) for path, mechanism in built.items() if mechanism.reads_tokens}:
        reader.token_hook = reader.register_forward_pre_hook(_with_tokens, with_kwargs=True)
    for path, mechanism in built.items():
        module = model.base_model.get_submodule(path)
        module.mechanism = mechanism.to(next(module.parameters()).device).train(module.training)
        if keeps_state(mechanism):
            keep_states(module)
    switch(model, IMPLEMENTATION)


def detach(model: Any, paths: Iterable[str]) -> None:
    """Undo `attach` on the named attention modules of `model`, except for the switch of its dispatch."""
    for path in paths:
        module = model.base_model.get_submodule(path)
        del module.mechanism
        drop_states(module)
    for module in model.base_model.modules():
        if "token_hook" in vars(module):
            vars(module).pop("token_hook").remove()


def _reader(path: str, model: Any) -> Any:
    """The innermost module around `path` whose forward takes the token ids."""
    while path:
        path = path.rpartition(".")[0]
        module = model.base_model.get_submodule(path)
        if next(iter(inspect.signature(module.forward).parameters), None) == "input_ids":
            return module
    raise ApproxError(
        f"{type(model).__name__} reads no token ids, so global tokens cannot be chosen by content. Choose them by position.",
        Exit.UNSUPPORTED,
    )


def _with_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Passing them with the call, not storing them, gives a layer recomputed in the backward pass its own ids.
    ids = kwargs.get("input_ids", args[0] if args else None)
    return None if ids is None else (args, {**kwargs, TOKENS: ids})


def switch(model: Any, implementation: str) -> None:
    """Switch the attention dispatch of `model`, and check that the switch had an effect.

    Raises:
        ApproxError: if the model's family does not dispatch its attention.
    """
    set_implementation = getattr(model, "_set_implementation_unguarded", model.set_attn_implementation)
    set_implementation(implementation)
    if implementation_of(model.config) != implementation:
        raise ApproxError(
            f"{type(model).__name__} computes its attention itself instead of dispatching it, so it cannot be replaced.",
            Exit.UNSUPPORTED,
        )
