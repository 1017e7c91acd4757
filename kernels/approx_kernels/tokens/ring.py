"""The ring: the keys and values that later queries can still reach, for decoding in bounded memory.

New keys are written to free room at the end of its buffers. Keys out of reach stay behind, and only when the room is used
up are the others copied to new buffers. The shape of an empty tensor, `span`, stores the beginning and the end: reading it
does not synchronise a GPU, and it survives reordering, repeating or selecting samples along the first dimension.
"""

import torch
from torch import Tensor

from approx_kernels.runtime.observed import unreadable
from approx_kernels.tokens.shapes import check_part, check_state

State = dict[str, Tensor]

PARTS = ("k", "v", "real")
LEAST_ROOM = 64


def check_ring(state: State, k: Tensor, v: Tensor) -> None:
    """Check that a state of decoding holds a ring for more keys k [B, G, n, D] and values v [B, G, n, E].

    Raises:
        ValueError: if a tensor is missing or does not fit.
    """
    check_state(state, k, k=(*k.shape[:2], "room", k.shape[3]), v=(*v.shape[:2], "room", v.shape[3]))
    room = state["k"].shape[2]
    if state["v"].shape[2] != room:
        raise ValueError(f"state holds {room} keys and {state['v'].shape[2]} values; expected as many of both.")
    if "real" in state:
        check_part("state['real']", state["real"], k, k.shape[0], 1, room, 1, dtype=torch.bool)
    begin, end = _span(state)
    if not 0 <= begin <= end <= room:
        raise ValueError(f"state holds keys from {begin} to {end} of {room}; expected places that there are.")


def extended(ring: State | None, k: Tensor, v: Tensor, key_mask: Tensor | None) -> State:
    """Append keys to a ring, in place if its buffers have room and gradients do not need them.

    Args:
        ring: The result of `newest` or `first_and_newest`, possibly with other tensors; None before the first token.
        k: New keys, [B, G, n, D].
        v: Their values, [B, G, n, E].
        key_mask: [B, n] bool, True at real keys; None when all are real.
    """
    newer = {"k": k, "v": v} if key_mask is None else {"k": k, "v": v, "real": key_mask[:, None, :, None]}
    if ring is None:
        return newer
    begin, end = _span(ring)
    after = end + k.shape[2]
    known = {name: ring[name] for name in PARTS if name in ring}
    for one, other in ((known, newer), (newer, known)):
        if "real" in other and "real" not in one:
            one["real"] = k.new_ones(k.shape[0], 1, one["k"].shape[2], 1, dtype=torch.bool)
    if not all(_takes(x, newer[name], after) for name, x in known.items()):
        return {name: torch.cat([x[:, :, begin:end], newer[name]], 2) for name, x in known.items()}
    for name, x in known.items():
        x[:, :, end:after] = newer[name]
    return _spanning(known, begin, after)


def content(ring: State) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys [B, G, m, D], values [B, G, m, E] and mask [B, m] of a ring; the mask is None while all are real."""
    begin, end = _span(ring)
    k, v = (ring[name][:, :, begin:end] for name in ("k", "v"))
    return k, v, ring["real"][:, 0, begin:end, 0] if "real" in ring else None


def newest(ring: State, count: int) -> State:
    """The ring of the last `count` keys, including padding."""
    return _without_between(ring, 0, count)


def first_and_newest(ring: State, first: int, count: int) -> State:
    """The ring of the `first` real keys of each sample and its last `count` real ones, in order."""
    k, v, key_mask = content(ring)
    if key_mask is None or k.shape[2] <= first + count:
        return _without_between(ring, first, count)
    rank = key_mask.cumsum(1)
    reached = key_mask & ((rank <= first) | (rank > rank[:, -1:] - count))
    # Samples keep different numbers of keys; shorter ones are filled up with others, which count as padding.
    kept = (~reached).to(torch.uint8).argsort(dim=1, stable=True)[:, : first + count]
    k, v = (x.gather(2, kept[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v))
    return _without_between({"k": k, "v": v, "real": reached.gather(1, kept)[:, None, :, None]}, first, count)


def _without_between(ring: State, first: int, count: int) -> State:
    """A ring without the keys between its `first` and its last `count`, in buffers of matching size."""
    begin, end = _span(ring)
    gap = max(end - begin - first - count, 0)
    parts = {name: ring[name] for name in PARTS if name in ring}
    if "span" in ring:
        for x in parts.values() if gap and first else ():
            # Move the first keys next to the last ones.
            x[:, :, begin + gap : begin + gap + first] = x[:, :, begin : begin + first].clone()
        begin += gap
    else:
        room = 0 if torch.is_grad_enabled() else max(LEAST_ROOM, (end - gap) // 4)
        blanks = {name: x.new_zeros(*x.shape[:2], room, x.shape[3]) for name, x in parts.items()}
        parts = {
            name: torch.cat([x[:, :, :first], x[:, :, first + gap :], blanks[name]], 2) for name, x in parts.items()
        }
        end -= gap
    # Once no padding is left, later steps need no mask; on a GPU this check would synchronise.
    told = "real" in parts and parts["real"].device.type == "cpu" and not unreadable(parts["real"])
    if told and bool(parts["real"][:, :, begin:end].all()):
        del parts["real"]
    return _spanning(parts, begin, end)


def _span(ring: State) -> tuple[int, int]:
    begin, end = ring["span"].shape[1:3] if "span" in ring else (0, ring["k"].shape[2])
    return begin, end


def _spanning(parts: State, begin: int, end: int) -> State:
    return {**parts, "span": parts["k"].new_empty(parts["k"].shape[0], begin, end, 0)}


def _takes(buffer: Tensor, newer: Tensor, end: int) -> bool:
    """Whether a buffer can be written to up to `end`."""
    kept = torch.is_grad_enabled() or (buffer.is_inference() and not torch.is_inference_mode_enabled())
    return not kept and end <= buffer.shape[2] and buffer.dtype == newer.dtype
