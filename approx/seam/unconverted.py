"""Attention functions for models that are not converted: what a package of Hugging Face's `kernels` offers by name.

    AutoModel.from_pretrained("bert-base-uncased", attn_implementation="OWNER/REPO:improved_clustered__clusters_100")

This file is copied into such packages, so it does not depend on plans or on the tool.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from approx.errors import ApproxError, Exit
from approx.mechanisms.mechanism import MECHANISMS, Mechanism
from approx.seam.decode_cache import wants_weights
from approx.seam.dispatch import OWN_KEYWORDS, is_causal

# Keywords of a layer that restricts or packs its keys in a way that no mechanism knows.
_RESTRICTED = (*OWN_KEYWORDS, "sliding_window", "cu_seq_lens_q")


def attention_function(name: str) -> Callable[..., tuple[Tensor, None]]:
    """The attention function of a name, as `transformers.AttentionInterface` takes it.

    Args:
        name: A mechanism with `_` for `-`, then settings that differ from its defaults, each as `__SETTING_VALUE`:
            `lsh`, `local__left_64__right_64`.

    Raises:
        AttributeError: if there is no such mechanism, setting or value, or if it has to be fitted to a model, so that only
            a conversion can use it.
    """
    mechanism, *texts = name.split("__")
    kind = MECHANISMS.get(mechanism.replace("_", "-"))
    if kind is None:
        known = ", ".join(sorted(each.replace("-", "_") for each in MECHANISMS))
        raise AttributeError(f"There is no attention '{mechanism}'. This package has {known}.")
    settings = dict(_setting(kind, each) for each in texts)
    probes, refusals = [], list[ApproxError]()
    for causal in (False, True):
        try:
            # A small layer, only to check the settings.
            stated = kind.for_layer({**kind.defaults(), **settings}, 0)
            probes.append(kind(1, 8, causal=causal, scale=1.0, **stated))
        except ApproxError as error:
            refusals.append(error)
    if not probes:
        raise AttributeError(f"'{name}': {refusals[0]}")
    if all(_fitted(probe) for probe in probes):
        raise AttributeError(
            f"'{name}' has parameters or is fitted to a model, or chooses keys by token ids, which an attention function "
            "does not get. Convert the model with approx instead."
        )

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        causal = is_causal(module, kwargs)
        _refuse(module, query, key, attention_mask, causal, kwargs)
        layer = {**kind.defaults(), **settings}
        if kind.for_layer(layer, 0) != kind.for_layer(layer, 1):
            layer = kind.for_layer(layer, _rank(module, name))
        made = _made(
            kind,
            query.shape[1],
            query.shape[-1],
            causal,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            query.device,
            tuple(layer.items()),
        )
        mask = None if attention_mask is None else attention_mask.bool()
        return made(query, key, value, mask, dropout=dropout).transpose(1, 2).contiguous(), None

    attend.__name__ = attend.__qualname__ = name
    return attend


def _setting(kind: type[Mechanism], stated: str) -> tuple[str, Any]:
    names = [name for name in kind.defaults() if stated.startswith(f"{name}_")]
    if not names:
        known = ", ".join(kind.defaults()) or "none"
        raise AttributeError(
            f"'{stated}' states no setting and value, such as clusters_100. The settings are: {known}."
        )
    setting = max(names, key=len)
    value = stated[len(setting) + 1 :]
    for read in (int, float):
        try:
            return setting, read(value)
        except ValueError:
            continue
    return setting, {"true": True, "false": False}.get(value, value)


def _fitted(mechanism: Mechanism) -> bool:
    return mechanism.takes_calibration or mechanism.reads_tokens or any(True for _ in mechanism.parameters())


@functools.lru_cache(maxsize=64)
def _made(
    kind: type[Mechanism],
    heads: int,
    size: int,
    causal: bool,
    scale: float,
    device: torch.device,
    settings: tuple[tuple[str, Any], ...],
) -> Mechanism:
    """A mechanism without state of its own, which all layers of its shape share."""
    made = kind(heads, size, causal=causal, scale=scale, **dict(settings)).to(device)
    if _fitted(made):
        raise ApproxError(
            f"The {'causal' if causal else 'bidirectional'} form of {kind.__name__} with these settings is fitted to a model. "
            "Convert the model with approx instead.",
            Exit.UNSUPPORTED,
        )
    return made


def _rank(module: nn.Module, name: str) -> int:
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ApproxError(
            f"'{name}' alternates between layers, but a {type(module).__name__} does not know its number. State the setting "
            "that alternates, or convert the model with approx.",
            Exit.UNSUPPORTED,
        )
    return int(layer)


def _refuse(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, kwargs: dict[str, Any]
) -> None:
    """Raise where a layer asks for what a mechanism does not compute."""
    config = getattr(module, "config", None)
    asked = next((name for name in _RESTRICTED if kwargs.get(name) is not None), None)
    reason = None
    if asked is not None:
        reason = f"passes '{asked}'"
    elif wants_weights(kwargs):
        reason = "is asked for attention weights"
    elif mask is not None and mask.dim() != 2:
        reason = "gets a mask of more than two dimensions"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "may attend to another sequence, which a conversion keeps exact"
    elif not causal and query.shape[2] != key.shape[2]:
        reason = "has other keys than queries"
    if reason is not None:
        raise ApproxError(
            f"A {type(module).__name__} {reason}; this attention is for ordinary self-attention. Convert the model with "
            "approx, which keeps such layers exact.",
            Exit.UNSUPPORTED,
        )
