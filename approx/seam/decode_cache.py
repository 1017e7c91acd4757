"""Decoding from a mechanism's state or notes, as layers of the KV cache. Copied into converted checkpoints.

Transformers creates the cache and passes it to the attention modules, whose forward adds keys and values to their
layer. Before that, a hook replaces the layer by a `StateLayer` for mechanisms with a ring or a recurrent state, in
bounded memory, and by a `NotedLayer` for those that keep notes about the keys. All other mechanisms and unconverted
layers use the ordinary layer.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from approx.errors import ApproxError, Exit
from approx.seam.internals import attends_temporarily, cache_of, collects_attentions


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
        """Keys and values not yet in the state: those of an ordinary layer, then the new ones."""
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


class NotedLayer(DynamicLayer):
    """An ordinary layer with a mechanism's notes about its keys.

    Args:
        keys: Keys of tokens already in another ordinary layer, [B, G, n, D]; None if there are none.
        values: Their values, [B, G, n, E].
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.notes: dict[str, Tensor] = {}
        if keys is not None and values is not None:
            self.update(keys, values)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.notes = {}

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the mechanism takes its notes again."""
        super().crop(tokens_to_remove)
        self.notes = {}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the samples, as beam search does."""
        super().reorder_cache(beam_idx)
        self.notes = {name: x.index_select(0, beam_idx.to(x.device)) for name, x in self.notes.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sample."""
        super().batch_repeat_interleave(repeats)
        self.notes = {name: x.repeat_interleave(repeats, 0) for name, x in self.notes.items()}

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these samples."""
        super().batch_select_indices(indices)
        self.notes = {name: x[indices.to(x.device)] for name, x in self.notes.items()}


def wants_weights(kwargs: dict[str, Any]) -> bool:
    """Whether attention weights are requested, by keyword or by an output collector."""
    return bool(kwargs.get("output_attentions")) or collects_attentions()


def has_state(layer: Any) -> TypeGuard[StateLayer]:
    """Whether a cache layer holds a mechanism's state."""
    return isinstance(layer, StateLayer)


def has_notes(layer: Any) -> TypeGuard[NotedLayer]:
    """Whether a cache layer holds a mechanism's notes."""
    return isinstance(layer, NotedLayer)


def takes_notes(mechanism: Any) -> bool:
    """Whether a mechanism keeps notes about keys."""
    return mechanism.takes_notes


def keeps_state(mechanism: Any) -> bool:
    """Whether a mechanism decodes from a state or from notes, rather than from an ordinary cache alone."""
    return mechanism.causal and (mechanism.decode_state != "cache" or takes_notes(mechanism))


def keep_states(module: Any) -> None:
    """Let the mechanism of an attention module decode from its state or its notes."""
    module.decode_hook = module.register_forward_pre_hook(_find_layer, with_kwargs=True)


def drop_states(module: Any) -> None:
    """Undo `keep_states`."""
    if "decode_hook" in vars(module):
        vars(module).pop("decode_hook").remove()


def take_layer(module: nn.Module) -> CacheLayerMixin | None:
    """The cache layer that this call of an attention module decodes from; None for an ordinary one or no cache.

    The hook stores it on the attention module, since the mechanism may be wrapped; it stays there only until this call.
    """
    layer: Any = getattr(module, "state_layer", None)
    if layer is not None:
        module.state_layer = None  # type: ignore[assignment]  # no tensor or module
    return layer


def _find_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # An interrupted call may have left its layer.
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
    if type(layer) is DynamicLayer and takes_notes(module.mechanism):
        layer = NotedLayer(*known)
    # Observers and hooks need the mechanism's forward over all keys, which is possible until a state was used.
    watched = attends_temporarily(module.config) or any(
        each._forward_hooks or each._forward_pre_hooks for each in module.mechanism.modules()
    )
    if type(layer) is DynamicLayer and not (watched or module.training or wants_weights(kwargs)):
        layer = StateLayer(*known)
    cache.layers[module.layer_idx] = layer
    module.state_layer = layer if has_state(layer) or has_notes(layer) else None


def _trace(key_mask: Tensor) -> Tensor:
    """A fingerprint of the padding in each sample's mask, [B, n]; 0 without padding."""
    columns = torch.arange(1, key_mask.shape[1] + 1, device=key_mask.device)
    return (~key_mask * columns.square()).sum(1)
