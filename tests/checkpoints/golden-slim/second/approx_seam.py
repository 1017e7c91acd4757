# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""The interface to transformers, copied into converted checkpoints: dispatch, cache, model class."""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, is_dynamo_compiling
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .approx_errors import ApproxError, Exit
from .approx_exact import exact_attention
from .approx_mechanisms import MECHANISMS, HeadGroups, Mechanism, unusable_state
from .approx_runtime import capturing, changes, unreadable
from .approx_tokens import beside, sharing

# All private names of transformers in use, each with a fallback for versions that lack it.

_TEMPORARY = "approx_temporary_"


def collects_attentions() -> bool:
    """Whether an output collector, which some families use, requests attention weights; False if there is none."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return "attentions" in (_active_collector.get() or {})


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache in the keywords of a call: `cache` from transformers 5.24 on, `past_key_values` before; None without one."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def attends_temporarily(config: Any) -> bool:
    """Whether models of a config dispatch to a function from `temporary_attention`."""
    return (implementation_of(config) or "").startswith(_TEMPORARY)


def implementation_of(config: Any) -> str | None:
    """The name of the attention implementation that models of a config dispatch to."""
    return config._attn_implementation


def keep_in_float32(model: Any, names: set[str]) -> None:
    """Keep tensors in float32 when a checkpoint is loaded in 16 bits; older versions load them like all others."""
    model._keep_in_fp32_modules_strict = names


def forget_file_layout(model: Any) -> None:
    """Make a model save in its family's layout, not in that of the files it was loaded from."""
    vars(model).pop("_weight_conversions", None)


def is_compiled_in_place(model: Any) -> bool:
    """Whether `model.compile()` was called."""
    return getattr(model, "_compiled_call_impl", None) is not None


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


def _part(part: Mapping[str, Any], heads: int, site: Mapping[str, Any]) -> Mechanism:
    if part["mechanism"] not in MECHANISMS:
        raise ApproxError(f"Unknown mechanism '{part['mechanism']}'. Known: {', '.join(sorted(MECHANISMS))}.")
    kind = MECHANISMS[part["mechanism"]]
    settings = {**kind.earlier, **part["settings"]}
    mechanism = kind(heads, site["head_dim"], causal=site["causal"], scale=site["scale"], **settings)
    mechanism.exact_below = part.get("exact_below", 0)
    mechanism.recompute = part.get("recompute", False)
    return mechanism


# Masks that the seam passes to mechanisms: which keys are real, and which slots of a static cache are in use.

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
        [B, S] bool, True = real token; None when every key is real. For a static cache with free slots, the columns in use,
        or for a single query SDPA's row [B, 1, 1, slots], whose shape is the same at every step; see `in_use`. SDPA's 4-D
        mask for anything that is neither plainly causal nor plainly bidirectional.

    Raises:
        ApproxError: if the mask has fewer columns than there are tokens.
    """
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    seen = kv_length
    if plain and mask_function is causal_mask_function:
        # Compiled code cannot read how many slots are in use: in a static cache it is a tensor.
        followed = isinstance(q_offset, Tensor) and is_dynamo_compiling()
        seen = -1 if followed else int(q_offset) + q_length - int(kv_offset)
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
    # Reading the mask synchronises a GPU once per forward, impossible inside a CUDA graph; every layer then runs unmasked.
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


def dense_mask(mask: Tensor | None, causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Mask for SDPA, or None if it needs none. SDPA's own `is_causal` aligns top-left, so L != S needs a mask."""
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
        if causal and queries > 1:
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    elif mask is None and causal and 1 < queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]
    return mask


# The manifest of a converted folder: the sha256 of its files, written last, so that incomplete folders are detected.

MANIFEST = "approx_manifest.json"
# The model's own files; a tokenizer may be saved in the folder later and is not part of it.
_INDEX = "model.safetensors.index.json"
_MODEL_FILES = ("config.json", "*.safetensors", _INDEX, "*.py")


def seal_model(folder: Path) -> None:
    """Write the manifest of weights, config and code only."""
    _write(folder, (path for pattern in _MODEL_FILES for path in folder.glob(pattern)))


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or a folder's directory entry, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(folder: Path, files: Iterable[Path]) -> None:
    manifest = folder / MANIFEST
    manifest.unlink(missing_ok=True)
    chosen = sorted(set(files) - {manifest})
    for path in chosen:
        flush(path)
    hashes = {path.relative_to(folder).as_posix(): sha256(path) for path in chosen}
    manifest.write_text(json.dumps({"files": hashes}, indent=1) + "\n", encoding="utf-8")
    flush(manifest)
    flush(folder)


# Decoding from a mechanism's state or notes, as layers of the KV cache. Copied into converted checkpoints.


class StateLayer(CacheLayerMixin):
    """A mechanism's state of the tokens seen, in place of their keys and values.

    Args:
        keys: Keys of tokens already in an ordinary layer, [B, G, n, D]; None if there are none.
        values: Their values, [B, G, n, E].
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.seen = 0 if keys is None else keys.shape[-2]
        self.state: dict[str, Tensor] | None = None
        # `_trace` of the last mask, [B]; None until one is given.
        self.padding: Tensor | None = None

    def attend(self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Attend with the newest tokens and add them to the state.

        Args: q, k, v as for `Mechanism.decode`, key_mask [B, tokens seen] or None.

        Raises:
            ApproxError: if the mask does not match the tokens seen, or has changed for earlier tokens.
        """
        earlier = self.seen - k.shape[2]
        if key_mask is not None or self.padding is not None:
            key_mask = k.new_ones(k.shape[0], self.seen, dtype=torch.bool) if key_mask is None else key_mask
            then, now = self.padding, _trace(key_mask[:, :earlier])
            # This synchronises a GPU in padded batches, but without the check results would be silently wrong.
            if key_mask.shape[1] != self.seen or bool((now != (0 if then is None else then)).any()):
                raise ApproxError(
                    f"After {earlier} tokens the attention mask has {key_mask.shape[1]} columns, or differs from before for "
                    "earlier tokens, which a bounded cache cannot change. Pass the mask of all tokens at every step, here "
                    f"{self.seen} columns, and leave earlier columns unchanged."
                )
            self.padding, key_mask = _trace(key_mask), key_mask[:, earlier:]
        out, self.state = mechanism.decode(q, k, v, key_mask, self.state)
        return out

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the mechanism creates its state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values not yet in the state: those given, after those of an ordinary layer."""
        self.seen += key_states.shape[-2]
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], -2)
            value_states = torch.cat([self.values, value_states], -2)
            self.keys = self.values = None
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Number of tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask and their offset, as in an ordinary layer: one mask may serve both kinds."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1, for no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.__init__()

    def crop(self, tokens_to_remove: int) -> None:
        """Not supported.

        Raises:
            ApproxError: always.
        """
        raise ApproxError(
            "Assisted and prompt-lookup decoding remove the last tokens from the cache, but a converted layer keeps a ring "
            "or a recurrent state, which cannot remove them. Generate without assistance, or convert with mechanisms whose "
            "decode state is an ordinary cache.",
            Exit.UNSUPPORTED,
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the samples, as beam search does."""
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sample."""
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these samples."""
        self._change(lambda x: x[indices.to(x.device)])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.keys, self.values, self.padding = (
            None if x is None else change(x) for x in (self.keys, self.values, self.padding)
        )
        if self.state is not None:
            self.state = {name: change(x) for name, x in self.state.items()}


def wants_weights(kwargs: dict[str, Any]) -> bool:
    """Whether attention weights are requested, by keyword or by an output collector."""
    return bool(kwargs.get("output_attentions")) or collects_attentions()


def has_state(layer: Any) -> TypeGuard[StateLayer]:
    """Whether a cache layer holds a mechanism's state."""
    return isinstance(layer, StateLayer)


def keeps_state(mechanism: Any) -> bool:
    """Whether a mechanism decodes from a state or from notes, rather than from an ordinary cache alone."""
    return mechanism.causal and (mechanism.decode_state != "cache")


def keep_states(module: Any) -> None:
    """Let the mechanism of an attention module decode from its state or its notes."""
    module.decode_hook = module.register_forward_pre_hook(_find_layer, with_kwargs=True)


def take_layer(module: nn.Module) -> CacheLayerMixin | None:
    """The cache layer that this call of an attention module decodes from; None for an ordinary one or no cache.

    The hook stores it on the attention module, since the mechanism may be wrapped; it stays there only until this call.
    """
    layer: Any = getattr(module, "state_layer", None)
    if layer is not None:
        module.state_layer = None  # type: ignore[assignment]  # no tensor or module
    return layer


def _find_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # An interrupted call may have left one.
    take_layer(module)
    cache = cache_of(kwargs)
    # Other caches were requested explicitly, or other code reads their keys, as Whisper's generation does.
    if type(cache) is not DynamicCache:
        return
    # As `Cache.update` does when it creates layers lazily.
    while len(cache.layers) <= module.layer_idx and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[module.layer_idx]
    known = (layer.keys, layer.values) if type(layer) is DynamicLayer and layer.get_seq_length() else ()
    # Observers and hooks need the mechanism's forward over all keys, which is possible until a state was used.
    watched = attends_temporarily(module.config) or any(
        each._forward_hooks or each._forward_pre_hooks for each in module.mechanism.modules()
    )
    if type(layer) is DynamicLayer and not (watched or module.training or wants_weights(kwargs)):
        layer = StateLayer(*known)
    cache.layers[module.layer_idx] = layer
    module.state_layer = layer if has_state(layer) else None


def _trace(key_mask: Tensor) -> Tensor:
    """A fingerprint of the padding in each sample's mask, [B, n]; 0 without padding."""
    columns = torch.arange(1, key_mask.shape[1] + 1, device=key_mask.device)
    return (~key_mask * columns.square()).sum(1)


# The only interface to transformers' attention: dispatcher, mask function, and attaching mechanisms to modules.

IMPLEMENTATION = "approx_v1"
FORMAT = 1
# Keyword that passes token ids from the model's forward to its attention, for mechanisms that read them.
TOKENS = "approx_tokens"


def _exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    return exact_attention(query, key, value, mask, causal=causal, scale=scale, dropout=dropout)


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
    notes = {}
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


class ApproxModel:
    """Mixin of every converted model: builds the mechanisms from the config, and fails loudly if they are missing."""

    config: Any
    modules: Any
    state_dict: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Some heads build their backbone with AutoModel.from_config, which must return the stock one.
        converted = type(config)
        stock = next(kind for kind in converted.__mro__ if kind.__module__.startswith("transformers."))
        config.__class__ = stock
        # Whisper's generation and pipelines read the family from the config object. Saving reads it from the class, which
        # keeps its own name, so that a converted model is never loaded with exact attention.
        config.model_type = stock.model_type
        try:
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # the stock class follows in the MRO
        finally:
            config.__class__ = converted
        if not config.approx or config.approx.get("format") != FORMAT:
            raise ApproxError(
                f"{type(self).__name__} needs a config whose field 'approx' has format {FORMAT}, not: {config.approx}. "
                "Load a folder that `approx convert` wrote, or convert the base checkpoint again.",
                Exit.UNAVAILABLE,
            )
        attach(self, config.approx["sites"])
        # Random features and learned maps need more than 16 bits; mechanisms cast their output instead. Each tensor is named,
        # because transformers would otherwise convert integers to float32 too.
        own = {name for name, t in self.state_dict().items() if ".mechanism." in name and t.is_floating_point()}
        keep_in_float32(self, own)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, and check that the mechanisms' tensors are usable.

        Raises:
            ApproxError: if tensors of a mechanism are missing, which transformers would leave uninitialised, or do not
                match its settings: wrong shape or dtype, NaN or infinity, or integers out of range.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]  # the stock class follows in the MRO
        lost = sorted(name for name in info["missing_keys"] if ".mechanism." in name)
        if lost:
            raise ApproxError(
                f"The checkpoint lacks {len(lost)} tensors of its attention mechanisms, e.g. {lost[0]}. "
                "It was saved incompletely; convert the base checkpoint again.",
                Exit.UNAVAILABLE,
            )
        for name, module in model.named_modules():
            if isinstance(module, Mechanism) and not isinstance(module, HeadGroups) and (why := unusable_state(module)):
                raise ApproxError(
                    f"The checkpoint is damaged: {name}.{why}. Convert the base checkpoint again.", Exit.UNAVAILABLE
                )
        # A reverted model is saved in its family's layout, not in that of this folder's files.
        forget_file_layout(model)
        return (model, info) if wants_info else model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the stock class."""
        # `model.compile()` starts the graph inside this call, so it must be prepared for here.
        if (unreadable() or is_compiled_in_place(self)) and self._causal():
            kwargs = _with_mask(args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # the stock class follows in the MRO

    @assume_constant_result
    def _causal(self) -> bool:
        return any(module.causal for module in self.modules() if isinstance(module, Mechanism))

    def attention_penalty(self) -> Tensor:
        """The sum of the mechanisms' penalties, such as their spans, as a scalar; 0 if there are none.

        Training adds it to its loss, times a weight.
        """
        wanted = (module.penalty() for module in self.modules() if isinstance(module, Mechanism))
        return sum((each for each in wanted if each is not None), torch.zeros(()))

    def step_attention(self, step: int) -> None:
        """Tell the mechanisms that a training step, counted from 1, is done: some redraw their random state."""
        for module in self.modules():
            if isinstance(module, Mechanism):
                module.after_step(step)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """Save as transformers does, in the layout that converted classes load, with the code and the manifest.

        Raises:
            ApproxError: if `push_to_hub` is set: only a complete folder is pushed.
        """
        if kwargs.pop("push_to_hub", False):
            raise ApproxError(
                "push_to_hub=True would upload this folder before it is complete. Save it, then call push_to_hub on the model."
            )
        kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, **kwargs)  # type: ignore[misc]  # the stock class follows in the MRO
        if is_main_process:
            self._write_code(Path(save_directory))
            seal_model(Path(save_directory))

    def _write_code(self, folder: Path) -> None:
        """Nothing to do: transformers already copied the code of remote classes."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        """Refuse continuous batching, to which `generate_batch` and paged caches lead too, with an ApproxError."""
        raise ApproxError(
            "Continuous batching (generate_batch, a paged cache) lays several texts into one row, which converted layers cannot keep "
            "apart. Call generate() with the texts as one left-padded batch and its attention_mask, or `approx revert` the model.",
            Exit.UNSUPPORTED,
        )

    def _set_implementation_unguarded(self, implementation: str) -> None:
        super().set_attn_implementation(implementation)  # type: ignore[misc]  # the stock class follows in the MRO

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Allow only the seam's attention: any other would silently undo the conversion.

        Raises:
            ApproxError: for any other implementation.
        """
        if attn_implementation != IMPLEMENTATION:
            raise ApproxError(
                f"Attention implementation '{attn_implementation}' was requested, but this model is converted: the switch "
                "would silently remove its mechanisms. Use `approx revert` to get the base checkpoint back.",
                Exit.REFUSED,
            )
        self._set_implementation_unguarded(attn_implementation)


def _with_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with a mask of all real tokens, unless a mask, positions or a cache is given.

    Compiled code cannot check positions for packed sequences, so without a mask transformers assumes packing.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    said = [kwargs.get("attention_mask"), kwargs.get("position_ids"), cache_of(kwargs)]
    if len(args) > 1 or not isinstance(ids, Tensor) or any(each is not None for each in said):
        return kwargs
    return {**kwargs, "attention_mask": torch.ones_like(ids)}
