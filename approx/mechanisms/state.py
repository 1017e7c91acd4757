"""Checks of the tensors a mechanism was loaded with."""

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism


def unusable_state(mechanism: Mechanism) -> str | None:
    """Why a mechanism cannot attend with the tensors it holds, naming the first bad one; None if it can.

    Each tensor is compared with one built from the same settings: it needs the same shape, the same dtype (or another
    floating one), finite numbers, and integers within the range of the random draws.
    """
    made = type(mechanism)(
        mechanism.heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale, **mechanism.settings
    ).state_dict()
    for name, held in mechanism.state_dict().items():
        if name not in made:
            return f"{name} does not belong to a mechanism with these settings"
        if why := _difference(held, made[name]):
            return f"{name} {why}"
    return None


def _difference(held: Tensor, made: Tensor) -> str | None:
    if held.shape != made.shape:
        return f"has shape {list(held.shape)}; its settings make {list(made.shape)}"
    if held.dtype != made.dtype and not (held.is_floating_point() and made.is_floating_point()):
        return f"is {held.dtype}; its settings make {made.dtype}"
    if held.is_floating_point():
        return None if held.isfinite().all() else "holds NaN or infinity"
    if held.numel() and (held.min() < 0 or held.max() >= 2**31):
        return f"holds values from {int(held.min())} to {int(held.max())}; draws lie between 0 and 2^31 - 1"
    return None
