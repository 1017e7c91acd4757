"""The only interface to transformers' attention: dispatcher, masks, and attaching mechanisms to modules.

Families that call `attention_interface(module, q, k, v, mask, …)` after their projections need no code of their own:
each converted attention module has a child named `mechanism`, which the dispatcher calls; modules without one run exact
attention. A static cache has a fixed number of slots, most of them free for later tokens; mechanisms align the last
query with the last key, so free slots are cut off first.

This file is copied into converted checkpoints, so it does not depend on plans or on the tool.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from approx.errors import ApproxError, Exit
from approx.mechanisms.mechanism import MECHANISMS, HeadGroups, Mechanism
from approx.seam.decode_cache import (
    drop_states,
    has_notes,
    has_state,
    keep_states,
    keeps_state,
    take_layer,
    wants_weights,
)
from approx.seam.internals import implementation_of, under_implementation
from approx_kernels.ops.fastest.api import layer_attention
from approx_kernels.runtime.pytorch import capturing, changes, unreadable
from approx_kernels.tokens import beside, sharing

IMPLEMENTATION = "approx_v1"
FORMAT = 1
# Keyword that passes token ids from the model's forward to its attention, for mechanisms that read them.
TOKENS = "approx_tokens"
# Keywords that neither mechanisms nor SDPA read; a layer that is passed one stays exact and runs its family's own attention.
OWN_KEYWORDS = ("softcap", "s_aux", "position_bias")
# Read once per decoding step from the mask that all layers share: slots in use, and whether all of these are real.
_READ = WeakTensorKeyDictionary()


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Mask function of the seam: which keys are real tokens, never an L×S grid for plain masks.

    Returns:
        [B, S] bool, True = real token; None when every key is real. For a static cache with free slots, the columns in
        use, or for a single query SDPA's row [B, 1, 1, slots], whose shape is the same at every step; see `in_use`.
        SDPA's 4-D mask for anything that is neither plainly causal nor plainly bidirectional.

    Raises:
        ApproxError: if the mask has fewer columns than there are tokens.
    """
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    seen = kv_length
    if plain and mask_function is causal_mask_function:
        # Compiled code cannot read how many slots are in use: in a static cache it is a tensor.
        followed = isinstance(q_offset, Tensor) and is_dynamo_compiling()
        offset = int(q_offset) if isinstance(q_offset, Tensor) else q_offset
        seen = -1 if followed else offset + q_length - int(kv_offset)
    if plain and attention_mask is not None and attention_mask.shape[1] < seen:
        raise ApproxError(
            f"The attention mask has {attention_mask.shape[1]} columns for {seen} tokens, including those in the cache. "
            f"Pass the mask of all tokens at every step, here {seen} columns."
        )
    if not plain or seen > kv_length or (seen < kv_length and (q_length == 1 or seen < 0)):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **{**kwargs, "q_offset": q_offset, "allow_is_causal_skip": False},
        )
    if seen < kv_length:
        real = (
            torch.ones(batch_size, seen, dtype=torch.bool)
            if attention_mask is None
            else attention_mask[:, :seen].bool()
        )
        return real.to(kwargs.get("device"))
    if attention_mask is None:
        return None
    real = attention_mask[:, -kv_length:].bool()
    # Reading the mask synchronises a GPU once per forward, impossible inside a CUDA graph; every layer then runs
    # unmasked.
    captured = real.is_cuda and torch.cuda.is_current_stream_capturing()
    if not unreadable(real) and not captured and bool(real.all()):
        return None
    return real


def is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of an attention module is causal, by the family's keyword or else by the module."""
    passed = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", False) if passed is None else passed)


def in_use(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Views of the keys and values without the free slots of a static cache, and their mask, [B, S] or None.

    Other masks are returned unchanged, with their keys.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D].
        value: [B, G, S, E].
        mask: The result of `key_mask`, or a mask passed to the model in its place.
        causal: Whether a query sees only keys at or before its own position.
    """
    row = mask is not None and mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.dtype == torch.bool
    if mask is None or not causal or not ((row and query.shape[2] == 1) or mask.dim() == 2):
        return key, value, mask
    if row:
        mask, (seen, whole) = mask[:, 0, 0], _read(mask)
    elif mask.shape[1] < key.shape[2]:
        seen, whole = mask.shape[1], not unreadable(mask) and _read(mask)[1]
    else:
        return key, value, mask
    return key[:, :, :seen], value[:, :, :seen], None if whole else mask[:, :seen]


def _read(mask: Tensor) -> tuple[int, bool]:
    """Columns up to the last that is real in any sample, and whether all of them are real. Synchronises a GPU once a step."""
    version = changes(mask)
    known = None if unreadable(mask) else _READ.get(mask)
    if known is not None and version is not None and known[0] == version:
        return known[1]
    rows = mask.flatten(1)
    last = int((rows.any(0) * torch.arange(1, rows.shape[1] + 1, device=mask.device)).max())
    extent = (last, bool(rows[:, :last].all()))
    if not unreadable(mask):
        _READ[mask] = version, extent
    return extent


def dense_mask(mask: Tensor | None, causal: bool, query: Tensor, key: Tensor, *, always: bool = False) -> Tensor | None:
    """Mask for SDPA, whose `is_causal` aligns top-left, or None if it needs none; `always` is for other attention."""
    queries, keys, device = query.shape[-2], key.shape[-2], query.device
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
        if causal and queries > 1:
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    elif mask is None and causal and queries > 1 and (always or queries != keys):
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]
    return mask


def parts(site: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of heads of a layer, or the layer itself if it has none.

    Each has `mechanism` and `settings`, and may have `exact_below` and `recompute`; a group also has a list of `heads`.
    """
    return site.get("groups") or [site]


def build(site: Mapping[str, Any]) -> Mechanism:
    """The mechanism of a layer.

    Args:
        site: heads, head_dim, causal and scale, and either the keys of one part or a list of `groups`.

    Raises:
        ApproxError: if a mechanism is unknown, its settings are invalid, or the groups do not name every head once.
    """
    if "groups" not in site:
        return _part(site, site["heads"], site)
    named = sorted(head for group in site["groups"] for head in group["heads"])
    if named != list(range(site["heads"])):
        raise ApproxError(
            f"The groups of a converted layer name the heads {named}, but must name each of 0-{site['heads'] - 1} once. "
            "Its config.json is damaged: convert the base checkpoint again."
        )
    return HeadGroups([(group["heads"], _part(group, len(group["heads"]), site)) for group in site["groups"]])


def refuse_unknown(part: Mapping[str, Any]) -> None:
    """Refuse a group of heads, or a layer without groups, whose mechanism is unknown here.

    Raises:
        ApproxError: naming the package that has the mechanism, if the config names one.
    """
    name, package = part["mechanism"], str(part.get("package"))
    if name in MECHANISMS:
        return
    if re.fullmatch(r"[\w.-]+==[\w.+!]+", package, re.ASCII):
        raise ApproxError(
            f"The mechanism '{name}' of this checkpoint is code of the package {package}, which is not installed. If you "
            f"trust that package: pip install {package}",
            Exit.MISSING,
        )
    raise ApproxError(f"Unknown mechanism '{name}'. Known: {', '.join(sorted(MECHANISMS))}.")


def _part(part: Mapping[str, Any], heads: int, site: Mapping[str, Any]) -> Mechanism:
    refuse_unknown(part)
    kind = MECHANISMS[part["mechanism"]]
    settings = {**kind.earlier, **part["settings"]}
    mechanism = kind(heads, site["head_dim"], causal=site["causal"], scale=site["scale"], **settings)
    mechanism.exact_below = part.get("exact_below", 0)
    mechanism.recompute = part.get("recompute", False)
    return mechanism


def _exact_weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (beside(query.float() * scale, key) @ key.float().transpose(-1, -2)).view(*query.shape[:3], key.shape[2])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
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

    own = mechanism is None and any(kwargs.get(name) is not None for name in OWN_KEYWORDS)
    if mechanism is None or attends_exactly(mechanism, keys, attention_mask):
        if not (weighs or own) and (attention_mask is None or attention_mask.dim() == 2):
            out = layer_attention(query, key, value, attention_mask, causal=causal, scale=scale, dropout=dropout)
            return out.transpose(1, 2).contiguous(), None
        mask = dense_mask(attention_mask, causal, query, key, always=weighs or own)
        if own:
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
            attend = sys.modules[type(module).__module__].eager_attention_forward
            out, weights = attend(module, query, key, value, mask, scaling=scale, dropout=dropout, **kwargs)
            return out, F.pad(weights, (0, slots - keys)) if weighs else None
        alone = causal and mask is None and queries > 1
        how: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "is_causal": alone}
        out = F.scaled_dot_product_attention(query, key, value, mask, **how, enable_gqa=sharing(query, key) > 1)
        out = out.transpose(1, 2).contiguous()
        return out, F.pad(_exact_weights(query, key, mask, scale), (0, slots - keys)) if weighs else None

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
        return layer.attend(mechanism, query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    # An observer may need the mechanism as one operator, which does not take notes.
    notes = {"notes": layer.notes} if has_notes(layer) and not unreadable(query) else {}
    out = mechanism(query, key, value, attention_mask, dropout=dropout, **tokens, **notes).transpose(1, 2).contiguous()
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
        read = any(getattr(getattr(inner, "mechanism", None), "reads_tokens", False) for inner in module.modules())
        if "token_hook" in vars(module) and not read:
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
