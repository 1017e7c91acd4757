"""Whether the tensors that a mechanism was loaded with are such as it makes itself."""

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism


def unusable_state(mechanism: Mechanism) -> str | None:
    """Why a mechanism cannot attend with the tensors it holds, naming the first such tensor; None where it can.

    Each is compared with what the same settings make: it needs the same shape and dtype, or another floating dtype; numbers
    that are finite; and integers, which are drawn to choose places, from 0 to the largest that are ever drawn.
    """
    made = type(mechanism)(
        mechanism.heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale, **mechanism.settings
    ).state_dict()
    for name, held in mechanism.state_dict().items():
        if name not in made:
            return f"{name} is no tensor of a mechanism with these settings"
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
        return f"holds {int(held.min())} to {int(held.max())}; draws are from 0 to 2^31 - 1"
    return None
