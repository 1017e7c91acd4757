"""The one meeting point with transformers: attention dispatcher, mask function, and what hangs mechanisms on modules.

Families that call `attention_interface(module, q, k, v, mask, …)` after their projections need no code of their own:
each converted attention module carries a child named `mechanism`; the dispatcher calls it, and modules without one run
exact attention. This file travels with converted checkpoints, so it knows nothing of plans or of the tool.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, is_exporting
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_torchdynamo_compiling

from approx.conversion.cache import StateLayer, drop_states, keep_states, take_layer, wants_weights
from approx.conversion.sites import build
from approx.errors import ApproxError, Exit
from approx.mechanisms.exact import ExactAttention
from approx_kernels.exact import fastest_attention
from approx_kernels.opaque import attend_opaquely, told

IMPLEMENTATION = "approx_v1"
FORMAT = 1
# Keyword under which token ids travel from the model's forward to its attention, for mechanisms that read them.
_TOKENS = "approx_tokens"


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Mask function of the seam: the keys that are real tokens, never an L×S grid for plain masks.

    Returns:
        [B, S] bool, True = real token; None when every key is real; the 4-D mask of SDPA for anything that is neither
        plainly causal nor plainly bidirectional, and for static caches, which layers that are not exact refuse.
    """
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    # A static cache has slots for tokens to come, so the last query does not see the last key; without a grid SDPA would
    # begin at the first key, and everything here ends at the last.
    if not plain or (mask_function is causal_mask_function and int(q_offset) + q_length != kv_length + int(kv_offset)):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **{**kwargs, "allow_is_causal_skip": False},
        )
    if attention_mask is None:
        return None
    real = attention_mask[:, -kv_length:].bool()
    # Reading the mask synchronises a GPU once per forward, which no graph can hold; it buys the unmasked path in every layer.
    captured = real.is_cuda and torch.cuda.is_current_stream_capturing()
    if not is_torchdynamo_compiling() and not captured and bool(real.all()):
        return None
    return real


def _dense_mask(mask: Tensor | None, causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Mask for SDPA, or None where SDPA needs none. SDPA's own `is_causal` aligns top-left, so L != S is spelled out."""
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
        if causal and queries > 1:
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    elif mask is None and causal and 1 < queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]
    return mask


def _exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    compiling = is_torchdynamo_compiling() and not is_exporting() and query.device.type == "cpu"
    # In a graph only an operator looks up the fastest way. Its gradient computes it again, and dropout leaves but one way.
    if compiling and not dropout and not (torch.is_grad_enabled() and query.requires_grad):
        # The scale may be a symbol, which no text can hold; compared with the usual one it is known.
        usual = query.shape[3] ** -0.5
        if scale == usual:
            text = _exactly(query.shape[1], query.shape[3], causal, usual)
            return attend_opaquely(None, text, query, key, value, mask, 0.0, None)
    return fastest_attention(query, key, value, mask, causal=causal, scale=scale, dropout=dropout)


@assume_constant_result
def _exactly(heads: int, head_dim: int, causal: bool, scale: float) -> str:
    return told(ExactAttention, {"heads": heads, "head_dim": head_dim, "causal": causal, "scale": scale})


def _exact_weights(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
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
    """Attention function of the seam: the module's mechanism where it has one, exact attention elsewhere.

    Args:
        module: The attention module of the model.
        query: [B, H, L, D].
        key: [B, G, S, D] with G key heads, each shared by H / G query heads.
        value: [B, G, S, E].
        attention_mask: What `key_mask` returned.
        dropout: Dropout probability of the attention weights; 0 outside training.
        scaling: Factor of the scores, as the model passes it.
        kwargs: What the family passes besides; only the wish for attention weights is read.

    Returns:
        Output [B, L, H, E], and attention weights [B, H, L, S] if they were asked for.

    Raises:
        ApproxError: if a layer that is not exact by its mechanism meets a mask that is not a plain key mask.
    """
    mechanism = getattr(module, "mechanism", None)
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries, keys = query.shape[-2], key.shape[-2]
    weighs, layer = wants_weights(kwargs), take_layer(module)

    grid = attention_mask is not None and attention_mask.dim() != 2
    if mechanism is None or keys < mechanism.exact_below or (grid and _always_exact(mechanism, keys)):
        if not weighs and (attention_mask is None or attention_mask.dim() == 2):
            key, value = _per_query_head(key, query), _per_query_head(value, query)
            return _exact(query, key, value, attention_mask, causal, scale, dropout).transpose(1, 2), None
        mask = _dense_mask(attention_mask, causal, queries, keys, query.device)
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scale, is_causal=causal
        )
        if not weighs:
            return out, None
        return out, _exact_weights(query, _per_query_head(key, query), mask, causal, scale)

    if grid:
        raise ApproxError(
            "A 4-D attention mask (packed sequences, a static cache, or a mask of your own) reached a converted layer; it takes "
            "a [batch, tokens] mask. Unpack the sequences, use the default dynamic cache, or keep exact attention in this model.",
            Exit.UNSUPPORTED,
        )
    if scale != mechanism.scale:
        raise ApproxError(
            f"The model scales its scores by {scale}, the converted layer was made for {mechanism.scale}. Convert it again.",
            Exit.VERIFICATION,
        )
    tokens = {}
    if mechanism.reads_tokens:
        if kwargs.get(_TOKENS) is None:
            raise ApproxError(
                "A converted layer chooses its global tokens by content, but this forward was given embeddings and no token "
                "ids to find them by. Pass 'input_ids', or convert with global tokens chosen by position."
            )
        tokens["tokens"] = kwargs[_TOKENS]
    if isinstance(layer, StateLayer) and (weighs or dropout):
        raise ApproxError(
            "Attention weights, or dropout, were asked for in the middle of a generation whose cache keeps no single keys of a "
            "converted layer. Ask for them from its first token on, or pass use_cache=False.",
            Exit.UNSUPPORTED,
        )
    key, value = _per_query_head(key, query), _per_query_head(value, query)
    if isinstance(layer, StateLayer):
        return layer.attend(mechanism, query, key, value, attention_mask).transpose(1, 2), None
    # A compiler takes such a mechanism as one operator, which has no notes.
    notes = {} if layer is None or is_torchdynamo_compiling() else {"notes": layer.notes}
    out = mechanism(query, key, value, attention_mask, dropout=dropout, **tokens, **notes).transpose(1, 2)
    return out, mechanism.weights(query, key, attention_mask, **tokens) if weighs else None


def _always_exact(mechanism: nn.Module, keys: int) -> bool:
    # Mechanisms take no grid of queries and keys, but SDPA does what these would do.
    return all(each.exact_settings(keys) == {} for each in getattr(mechanism, "groups", [mechanism]))


def _per_query_head(shared: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, dim=1)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, key_mask)


@contextmanager
def fastest_exact(model: Any) -> Iterator[None]:
    """Run a model that is not converted with exact attention in the way that is the fastest on this machine."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation_internal = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def attach(model: Any, sites: Mapping[str, Mapping[str, Any]]) -> None:
    """Hang a mechanism on each named attention module of `model` and switch its dispatch to the seam.

    Args:
        model: A transformers model.
        sites: Path of the attention module inside the base model -> what `build` makes its mechanism of.

    Raises:
        ApproxError: if nothing would be swapped, a mechanism is unknown, or the switch did not take.
    """
    if not sites:
        raise ApproxError("No attention layer was chosen, so nothing would be swapped. Choose at least one layer.")
    # What is refused is refused before anything is hung on the model.
    built = {path: build(site) for path, site in sites.items()}
    for reader in {_reader(path, model) for path, mechanism in built.items() if mechanism.reads_tokens}:
        reader.token_hook = reader.register_forward_pre_hook(_with_tokens, with_kwargs=True)
    for path, mechanism in built.items():
        module = model.base_model.get_submodule(path)
        module.mechanism = mechanism.to(next(module.parameters()).device).train(module.training)
        keep_states(module)
    switch(model, IMPLEMENTATION)


def detach(model: Any, paths: Iterable[str]) -> None:
    """Take from the named attention modules of `model` what `attach` hung on them; its dispatch stays as it is."""
    for path in paths:
        module = model.base_model.get_submodule(path)
        del module.mechanism
        drop_states(module)
    for module in model.base_model.modules():
        if "token_hook" in vars(module):
            vars(module).pop("token_hook").remove()


def _reader(path: str, model: Any) -> Any:
    """The module around `path` that is given the token ids."""
    while path:
        path = path.rpartition(".")[0]
        module = model.base_model.get_submodule(path)
        if next(iter(inspect.signature(module.forward).parameters), None) == "input_ids":
            return module
    raise ApproxError(
        f"{type(model).__name__} reads no token ids, so no global tokens can be chosen by content. Choose them by position.",
        Exit.UNSUPPORTED,
    )


def _with_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # They travel with the call, and nothing keeps them: a layer that is recomputed in the backward gets its own again.
    ids = kwargs.get("input_ids", args[0] if args else None)
    return None if ids is None else (args, {**kwargs, _TOKENS: ids})


def switch(model: Any, implementation: str) -> None:
    """Switch the attention dispatch of `model`, and make sure that the switch took.

    Raises:
        ApproxError: if the model's family does not dispatch its attention.
    """
    set_implementation = getattr(model, "_set_implementation_unguarded", model.set_attn_implementation)
    set_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise ApproxError(
            f"{type(model).__name__} computes its attention itself instead of dispatching it, so it cannot be exchanged.",
            Exit.UNSUPPORTED,
        )
