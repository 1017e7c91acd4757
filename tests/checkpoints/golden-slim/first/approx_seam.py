# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""The meeting point with transformers, which travels with converted checkpoints: dispatch, cache, model class."""

import hashlib
import inspect
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, is_dynamo_compiling
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .approx_errors import ApproxError, Exit
from .approx_exact import exact_attention
from .approx_mechanisms import MECHANISMS, HeadGroups, Mechanism, unusable_state
from .approx_runtime import capturing, changes, unreadable
from .approx_tokens import beside, sharing

# The private names of transformers that are used here, all of them, each with what stands in where a version lacks it.


def collects_attentions() -> bool:
    """Whether attention weights are asked for by a collector of outputs, which some families use; False where none is known."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return "attentions" in (_active_collector.get() or {})


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache in the keywords of a call: `cache` from transformers 5.24 on, `past_key_values` before; None without one."""
    found = kwargs.get("cache")
    return kwargs.get("past_key_values") if found is None else found


def implementation_of(config: Any) -> str | None:
    """The name of the attention implementation that models of a config dispatch to."""
    return config._attn_implementation


def keep_in_float32(model: Any, names: set[str]) -> None:
    """Let tensors stay float32 when a checkpoint is loaded in 16 bits; older versions load them as all others."""
    model._keep_in_fp32_modules_strict = names


def forget_file_layout(model: Any) -> None:
    """Let a model be saved in its family's own layout, not in that of the files it was loaded from."""
    vars(model).pop("_weight_conversions", None)


def is_compiled_in_place(model: Any) -> bool:
    """Whether `model.compile()` was called."""
    return getattr(model, "_compiled_call_impl", None) is not None


def build(site: Mapping[str, Any]) -> Mechanism:
    """The mechanism of a layer.

    Args:
        site: heads, head_dim, causal and scale, and either what one part has or a list of `groups`.

    Raises:
        ApproxError: if a mechanism is unknown, its settings are refused, or the groups are not all of the heads, once each.
    """
    if "groups" not in site:
        return _part(site, site["heads"], site)
    named = sorted(head for group in site["groups"] for head in group["heads"])
    if named != list(range(site["heads"])):
        raise ApproxError(
            f"The groups of a converted layer name the heads {named}; each of 0-{site['heads'] - 1} belongs to one of them. "
            "Its config.json is damaged: convert the base checkpoint again."
        )
    return HeadGroups([(group["heads"], _part(group, len(group["heads"]), site)) for group in site["groups"]])


def _part(part: Mapping[str, Any], heads: int, site: Mapping[str, Any]) -> Mechanism:
    if part["mechanism"] not in MECHANISMS:
        raise ApproxError(f"Mechanism '{part['mechanism']}' is not known here. Known: {', '.join(sorted(MECHANISMS))}.")
    kind = MECHANISMS[part["mechanism"]]
    settings = {**kind.earlier, **part["settings"]}
    mechanism = kind(heads, site["head_dim"], causal=site["causal"], scale=site["scale"], **settings)
    mechanism.exact_below = part.get("exact_below", 0)
    mechanism.checkpoint = part.get("checkpoint", False)
    return mechanism


# Masks as the seam hands them to mechanisms: which keys are real, and of a cache with free slots which are in use.


# What was read of the mask of a decoding step, which all layers share: slots in use, and whether all of these are real.
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
    """Mask function of the seam: the keys that are real tokens, never an L×S grid for plain masks.

    Returns:
        [B, S] bool, True = real token; None when every key is real. Of a static cache with free slots the columns of those in
        use, or for a single query SDPA's row [B, 1, 1, slots], whose shape no step changes; see `in_use`. The 4-D mask of SDPA
        for anything that is neither plainly causal nor plainly bidirectional.

    Raises:
        ApproxError: if the mask has fewer columns than there are tokens.
    """
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    seen = kv_length
    if plain and mask_function is causal_mask_function:
        # A compiler would have to read how many slots are in use; a static cache has it as a tensor.
        followed = isinstance(q_offset, Tensor) and is_dynamo_compiling()
        seen = -1 if followed else int(q_offset) + q_length - int(kv_offset)
    if plain and attention_mask is not None and attention_mask.shape[1] < seen:
        raise ApproxError(
            f"An attention mask of {attention_mask.shape[1]} columns was given for {seen} tokens, those in the cache among them. "
            f"Give the mask of all tokens at every step, here {seen} columns."
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
    # Reading the mask synchronises a GPU once per forward, which no graph can hold; it buys the unmasked path in every layer.
    captured = real.is_cuda and torch.cuda.is_current_stream_capturing()
    if not unreadable(real) and not captured and bool(real.all()):
        return None
    return real


def in_use(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values without the free slots of a static cache, views of it, and the mask of what is left, [B, S] or None.

    Other masks, with other keys, are given back as they are.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D].
        value: [B, G, S, E].
        mask: What `key_mask` returned, or what the model was given in its place.
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
    """Columns up to the last that is real in any sample, and whether all of them are in all. Waits for a GPU once a step."""
    version = changes(mask)
    known = None if unreadable(mask) else _READ.get(mask)
    if known is not None and version is not None and known[0] == version:
        return known[1]
    rows = mask.flatten(1)
    last = int((rows.any(0) * torch.arange(1, rows.shape[1] + 1, device=mask.device)).max())
    found = (last, bool(rows[:, :last].all()))
    if not unreadable(mask):
        _READ[mask] = version, found
    return found


def dense_mask(mask: Tensor | None, causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Mask for SDPA, or None where SDPA needs none. SDPA's own `is_causal` aligns top-left, so L != S is spelled out."""
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
        if causal and queries > 1:
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    elif mask is None and causal and 1 < queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]
    return mask


# The manifest of a converted folder: the sha256 of its files, written last, so that half a folder is never taken for one.


MANIFEST = "approx_manifest.json"
# What makes the model; a tokenizer may be saved beside it later and is not part of it.
_MODEL_FILES = ("config.json", "*.safetensors", "model.safetensors.index.json", "*.py")


def seal_model(folder: Path) -> None:
    """Write the manifest over weights, config and code alone."""
    _write(folder, (path for pattern in _MODEL_FILES for path in folder.glob(pattern)))


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Make sure that a file, or the list of files of a folder, is on the disk."""
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


def wants_weights(kwargs: dict[str, Any]) -> bool:
    """Whether attention weights are asked for, by keyword or, where a family passes none, by a collector of outputs."""
    return bool(kwargs.get("output_attentions")) or collects_attentions()


# The one meeting point with transformers: attention dispatcher, mask function, and what hangs mechanisms on modules.


IMPLEMENTATION = "approx_v1"
FORMAT = 1
# Keyword under which token ids travel from the model's forward to its attention, for mechanisms that read them.
_TOKENS = "approx_tokens"


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
    weighs, slots = wants_weights(kwargs), key.shape[-2]
    # In a graph, which nobody may leave to read a mask, SDPA takes the row of a static cache as it is.
    followed = is_dynamo_compiling() or capturing()
    if not (followed and (mechanism is None or _always_exact(mechanism))):
        key, value, attention_mask = in_use(query, key, value, attention_mask, causal)
    queries, keys = query.shape[-2], key.shape[-2]

    grid = attention_mask is not None and attention_mask.dim() != 2
    if mechanism is None or keys < mechanism.exact_below or (grid and _always_exact(mechanism)):
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

    if grid:
        raise ApproxError(
            "A 4-D attention mask (packed sequences, several tokens at once on a compiled static cache, or a mask of your own) reached "
            "a converted layer; it takes a [batch, tokens] mask. Unpack the sequences, compile single steps alone or use a dynamic "
            "cache, or keep exact attention in this model.",
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
    # An observer may need the mechanism as one operator, which has no notes.
    notes = {}
    out = mechanism(query, key, value, attention_mask, dropout=dropout, **tokens, **notes).transpose(1, 2)
    if not weighs:
        return out, None
    return out, F.pad(mechanism.weights(query, key, attention_mask, **tokens), (0, slots - keys))


def _always_exact(mechanism: nn.Module) -> bool:
    # Mechanisms take no grid of queries and keys, but SDPA does what these would do.
    return all(each.always_exact for each in getattr(mechanism, "groups", [mechanism]))


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, key_mask)


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
    switch(model, IMPLEMENTATION)


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
    if implementation_of(model.config) != implementation:
        raise ApproxError(
            f"{type(model).__name__} computes its attention itself instead of dispatching it, so it cannot be exchanged.",
            Exit.UNSUPPORTED,
        )


class ApproxModel:
    """What every converted model adds to its stock class: mechanisms from the config, loud failure where they are lost."""

    config: Any
    modules: Any
    state_dict: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Some heads make their backbone with AutoModel.from_config, which must give the stock one.
        converted = type(config)
        stock = next(kind for kind in converted.__mro__ if kind.__module__.startswith("transformers."))
        config.__class__ = stock
        # In places transformers asks the object for its family by name: Whisper's generation, pipelines. Saving asks its
        # class, which keeps a name of its own, so that nobody loads it as exact attention.
        config.model_type = stock.model_type
        try:
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # the stock class follows in the MRO
        finally:
            config.__class__ = converted
        if not config.approx or config.approx.get("format") != FORMAT:
            raise ApproxError(
                f"{type(self).__name__} needs a config whose field 'approx' has format {FORMAT}, found: {config.approx}. "
                "Load a folder that `approx convert` wrote, or convert the base checkpoint again.",
                Exit.UNAVAILABLE,
            )
        attach(self, config.approx["sites"])
        # Random features and learned maps lose their meaning in 16 bits; the mechanisms cast their output instead. Each tensor
        # is named, for transformers would turn integers among them into float32 as well.
        own = {name for name, t in self.state_dict().items() if ".mechanism." in name and t.is_floating_point()}
        keep_in_float32(self, own)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, and refuse a checkpoint whose mechanisms could not attend with what it holds.

        Raises:
            ApproxError: if tensors of a mechanism are missing, which transformers would fill with uninitialised memory, or
                are not such as its settings make: of another shape or dtype, not finite, or places that there cannot be.
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
        # What was found in this folder is not how the base's files were laid out; reverted, the family's own layout counts.
        forget_file_layout(model)
        return (model, info) if wants_info else model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the stock class."""
        # Compiled in place, the graph begins further in.
        if (unreadable() or is_compiled_in_place(self)) and self._causal():
            kwargs = _with_mask(args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # the stock class follows in the MRO

    @assume_constant_result
    def _causal(self) -> bool:
        return any(module.causal for module in self.modules() if isinstance(module, Mechanism))

    def attention_penalty(self) -> Tensor:
        """What the mechanisms want to be small, such as their spans, added up to a scalar; 0 if they want nothing.

        Training adds it to its loss, times a weight of its own.
        """
        wanted = (module.penalty() for module in self.modules() if isinstance(module, Mechanism))
        return sum((each for each in wanted if each is not None), torch.zeros(()))

    def step_attention(self, step: int) -> None:
        """Tell the mechanisms that a step of training is done, counted from 1: some then draw their random state anew."""
        for module in self.modules():
            if isinstance(module, Mechanism):
                module.after_step(step)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """Save as transformers does, in the layout that converted classes load, with the code and the manifest.

        Raises:
            ApproxError: if asked to push in the same breath: only a complete folder is pushed.
        """
        if kwargs.pop("push_to_hub", False):
            raise ApproxError(
                "push_to_hub=True was asked for, which would upload this folder before it is complete. Save it, then call "
                "push_to_hub on the model."
            )
        kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, **kwargs)  # type: ignore[misc]  # the stock class follows in the MRO
        if is_main_process:
            self._write_code(Path(save_directory))
            seal_model(Path(save_directory))

    def _write_code(self, folder: Path) -> None:
        """Transformers has copied the code of remote classes already."""

    def _set_implementation_unguarded(self, implementation: str) -> None:
        super().set_attn_implementation(implementation)  # type: ignore[misc]  # the stock class follows in the MRO

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse any other attention: it would silently turn the conversion off.

        Raises:
            ApproxError: unless the implementation asked for is the seam's own.
        """
        if attn_implementation != IMPLEMENTATION:
            raise ApproxError(
                f"Attention implementation '{attn_implementation}' was asked for, but this model is converted: the switch "
                "would silently remove its mechanisms. Use `approx revert` to get the base checkpoint back.",
                Exit.REFUSED,
            )
        self._set_implementation_unguarded(attn_implementation)


def _with_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with a mask that calls every token real, where nothing was said of masks, positions or a cache.

    A compiler cannot look whether positions are those of packed sequences, so transformers then takes them for it.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    said = [kwargs.get("attention_mask"), kwargs.get("position_ids"), cache_of(kwargs)]
    if len(args) > 1 or not isinstance(ids, Tensor) or any(each is not None for each in said):
        return kwargs
    return {**kwargs, "attention_mask": torch.ones_like(ids)}
