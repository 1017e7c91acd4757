"""What ops do with tokens: checks of arguments, padding, grouped keys, stretches, strides, and rings of keys.

With H query heads and G key heads, H a multiple of G, query head h reads key head h // (H / G), as in grouped-query
attention (Ainslie et al., 2023, GQA, arXiv 2305.13245); keys and values are read in place and never repeated.

A ring holds the keys and values that later queries can still reach, for decoding in bounded memory. New keys are
written to free room at the end of its buffers. Keys out of reach stay behind, and only when the room is used up are the
others copied to new buffers. The shape of an empty tensor, `span`, stores the beginning and the end: reading it does
not synchronise a GPU, and it survives reordering, repeating or selecting samples along the first dimension.
"""

import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.pytorch import unreadable, without_autocast, without_functions

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Sums of positions and distances stay below 2^31.
MOST_TOKENS = 2**30
MOST = 2**31 - 1
_MOST_NUMBERS = 2**40


def check_shapes(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Refuse all but q [B, H, L, D], k [B, G, S, D], v [B, G, S, E], H a multiple of G, and a bool mask [B, S]."""
    check_tensor("q", q)
    if q.ndim != 4 or not q.numel():
        raise ValueError(f"q has shape {list(q.shape)}; expected [batch, heads, queries, head size], each at least 1.")
    batch, heads, _, size = q.shape
    check_part("k", k, q, batch, "heads", "keys", size)
    if heads % k.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads for the {heads} of q; expected a number that divides them.")
    check_part("v", v, q, *k.shape[:3], "value size")
    # Under autocast, rotary embeddings leave q and k in float32 but v in 16 bits.
    one_dtype = q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)
    if not one_dtype or any(each.dtype not in DTYPES for each in (q, k, v)):
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one of 16, 32 or 64 bits.")
    if max(q.shape[2], k.shape[2]) >= MOST_TOKENS:
        raise ValueError(f"There are {q.shape[2]} queries and {k.shape[2]} keys; expected fewer than 2^30.")
    if key_mask is not None:
        check_part("key_mask", key_mask, q, batch, k.shape[2], dtype=torch.bool)


def check_part(name: str, part: Tensor, q: Tensor, *shape: int | str, dtype: torch.dtype | None = None) -> None:
    """Refuse a further tensor of an op, such as random rows, that does not fit queries q, on whose device it must be.

    `shape` holds its sizes, and a word for any size of at least 1; a dtype of None stands for any floating one.
    """
    check_tensor(name, part)
    # Sizes may be symbolic, which are no integers.
    sizes = [max(actual, 1) if isinstance(size, str) else size for size, actual in zip(shape, part.shape, strict=False)]
    if list(part.shape) != sizes or len(sizes) != len(shape):
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name} has shape {list(part.shape)}; expected [{expected}] to fit q.")
    if part.dtype != dtype if dtype else not part.is_floating_point():
        raise ValueError(f"{name} is {part.dtype}; expected {dtype or 'a floating dtype'}.")
    if part.device != q.device:
        raise ValueError(f"{name} is on {part.device}, q on {q.device}; expected one device. Move it there.")


def check_tensor(name: str, x: Any) -> None:
    """Refuse what is not a tensor of rows in memory, with a ValueError that names it, as all checks here do."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is of type {type(x).__name__}; expected a torch.Tensor.")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}; expected torch.strided. Make it dense.")
    if x.numel() > _MOST_NUMBERS:
        raise ValueError(f"{name} has shape {list(x.shape)}: more numbers than any machine holds.")


def check_least(name: str, number: Any, least: int, most: int = MOST) -> None:
    """Refuse a number that is not a whole one from `least` to `most`."""
    if not isinstance(number, int | torch.SymInt) or isinstance(number, bool):
        raise ValueError(f"{name} is {_shown(number)}; expected a whole number.")
    if not least <= number <= most:
        limit = f"{least} or more" if number < least else f"{most} or less"
        raise ValueError(f"{name} is {_shown(number)}; expected {limit}.")


def check_form(scale: Any = 1.0, dropout: Any = 0.0, **flags: Any) -> None:
    """Refuse a scale that is not a finite number, a dropout that is not a probability, flags that are not booleans."""
    check_number("scale", scale)
    check_number("dropout", dropout)
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout is {dropout}; expected a probability, from 0 to 1.")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} is {_shown(flag)}; expected True or False.")


def check_number(name: str, number: Any) -> None:
    """Refuse what is not a finite number of float32."""
    real = isinstance(number, int | float | torch.SymInt | torch.SymFloat) and not isinstance(number, bool)
    if not (real and -3e38 < number < 3e38):
        raise ValueError(f"{name} is {_shown(number)}; expected a finite number.")


def check_word(name: str, word: Any, words: Sequence[str]) -> None:
    """Refuse what is not one of some words."""
    if not isinstance(word, str) or word not in words:
        raise ValueError(f"{name} is {_shown(word)}; expected one of {', '.join(words)}.")


def check_draw(seed: Any, **sizes: Any) -> None:
    """Refuse a seed that no generator takes, and sizes of numbers to draw that are not whole numbers above 0."""
    check_least("seed", seed, -(2**63), 2**64 - 1)
    for name, size in sizes.items():
        check_least(name, size, 1)
    if math.prod(sizes.values()) > _MOST_NUMBERS:
        raise ValueError(f"{' times '.join(map(str, sizes.values()))} numbers are more than any machine holds.")


def check_state(state: Any, q: Tensor, dtype: torch.dtype | None = None, **shapes: Sequence[int | str]) -> None:
    """Refuse a state of decoding without tensors of these names, sizes and dtype; None for any floating one."""
    for name, shape in shapes.items():
        if not isinstance(state, dict) or name not in state:
            raise ValueError(
                f"state is {_shown(state)}; expected the dictionary that the last call returned, with {name!r}."
            )
        check_part(f"state[{name!r}]", state[name], q, *shape, dtype=dtype)


def check_steps(steps: Any, most: int) -> None:
    """Refuse steps of a pattern, for heads in turn, that are not a list of numbers from 1 to `most` or None."""
    if not isinstance(steps, list | tuple) or not steps:
        raise ValueError(f"steps is {_shown(steps)}; expected a list with a step for each of some heads.")
    for step in steps:
        if step is None:
            continue
        check_least("a step", step, 1)
        if step > most:
            raise ValueError(f"a step is {step}; expected a number from 1 to {most}, or None for all of them.")


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else reprlib.repr(value)


def blank_padding(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Set the keys and values of padding to 0 and, if L == S, the queries at the same positions.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.

    Returns:
        q, k and v; their padding gets a gradient of 0.
    """
    if key_mask is None:
        return q, k, v
    blank = ~key_mask[:, None, :, None]
    q = q.masked_fill(blank, 0.0) if q.shape[2] == k.shape[2] else q
    return q, k.masked_fill(blank, 0.0), v.masked_fill(blank, 0.0)


def blank_for_gradients(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`blank_padding` if gradients are needed: C skips padded keys only in its forward pass."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return blank_padding(q, k, v, key_mask) if wanted else (q, k, v)


def attend_to_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The outputs of queries without keys: zeros [B, H, L, E], with gradients of 0 in q, k and v."""
    nothing = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    return nothing.expand(*q.shape[:3], v.shape[3])


def sharing(q: Tensor, k: Tensor) -> int:
    """Number of query heads per key head, H / G; q is [B, H, L, D], k [B, G, S, D]."""
    # Under jit.trace sizes are tensors; the number of heads must be a constant.
    heads, groups = (int(x.shape[1]) if isinstance(x.shape[1], Tensor) else x.shape[1] for x in (q, k))
    return heads // groups


def turns(q: Tensor, k: Tensor) -> list[slice]:
    """The query heads of each of H / G turns, one per key head, so that q[:, turn] has as many heads as k.

    Both are views, whereas repeating k would copy it for every query head.
    """
    count = sharing(q, k)
    return [slice(first, None, count) for first in range(count)]


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The results of the turns, each [B, G, ...], with the query heads in order, [B, H, ...]."""
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts), 2).flatten(1, 2)


def in_turns(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *own: Tensor | None) -> Tensor:
    """Apply `attend(q, k, v, *own)`, which needs as many query heads as key heads, to more query heads.

    Args:
        attend: From q [B, G, L, D], k [B, G, S, D], v [B, G, S, E] and parts of `own` to [B, G, L, E].
        q: Queries, [B, H, L, D].
        k: Keys, [B, G, S, D].
        v: Values, [B, G, S, E].
        own: Tensors with a row per query head, [H, ...], or None.

    Returns:
        [B, H, L, E].
    """
    return in_order([attend(q[:, turn], k, v, *(None if x is None else x[turn] for x in own)) for turn in turns(q, k)])


def beside(x: Tensor, k: Tensor) -> Tensor:
    """Rows of the query heads, [B, H, n, D], as rows of their key heads, [B, G, (H / G) n, D]."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def empty_rows(x: Tensor, size: int, *, heads: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer for the rows of x, [B, H, n, size], the heads of a token adjacent in memory, as models join them."""
    return x.new_empty(x.shape[0], x.shape[2], heads or x.shape[1], size, dtype=dtype).transpose(1, 2)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for gradients; of k and v for each query head, see `summed`."""
    dq, dk, dv = (empty_rows(x, x.shape[3], heads=q.shape[1]) for x in (q, k, v))
    return dq, dk, dv


def summed(x: Tensor, heads: int) -> Tensor:
    """Gradients of query heads, [B, H, S, D], summed into those of key heads, [B, G, S, D]."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def heads_of(q: Tensor, k: Tensor, own: slice | Sequence[int]) -> Any:
    """Index of the key heads that some query heads read, such that these share them evenly.

    Where that is impossible, as for 3 of 4 heads that share 2, the index repeats a key head, and indexing copies it.
    """
    count = sharing(q, k)
    needed = [head // count for head in range(q.shape[1])[own]] if isinstance(own, slice) else [h // count for h in own]
    distinct = list(dict.fromkeys(needed))
    evenly = [head for head in distinct for _ in range(len(needed) // len(distinct))]
    return as_index(distinct if evenly == needed else needed)


def as_index(heads: Sequence[int]) -> Any:
    """Evenly spaced heads as a slice, which copies nothing; others as a list."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    stepwise = step > 0 and list(heads) == list(range(heads[0], heads[-1] + 1, step))
    return slice(heads[0], heads[-1] + 1, step) if stepwise else list(heads)


def without_padding(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Tensor:
    """Attend among the real tokens of each sample only.

    Query i is the token of key S - L + i. If that key is padding, or does not exist (L > S), its output is 0. So
    `attend` gets only real tokens, with the queries last and at most as many as keys. Without a mask it gets the
    whole batch at once.

    Args:
        attend: From q [B, H, L, D], k [B, H, S, D], v [B, H, S, E] with L <= S to [B, H, L, E].
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    before = k.shape[2] - q.shape[2]
    k, v = k.to(q.dtype), v.to(q.dtype)

    def sample(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys = mask.nonzero().squeeze(1)
        queries = keys[keys >= before] - before
        if not queries.numel():
            return attend_to_nothing(q, k, v)
        out = attend(_at(q, queries), _at(k, keys), _at(v, keys))
        return out.new_zeros(*q.shape[:3], v.shape[3]).index_copy(2, queries, out)

    with without_autocast(q.device.type):
        if key_mask is not None:
            samples = zip(q.split(1), k.split(1), v.split(1), key_mask, strict=True)
            return torch.cat([sample(*each) for each in samples])
        if before < 0:
            return F.pad(attend(q[:, :, -before:], k, v), (0, 0, -before, 0))
        return attend(q, k, v)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of a sample; a view if they are contiguous, as with right or left padding."""
    first, count = int(index[0]), index.numel()
    return x[:, :, first : first + count] if int(index[-1]) == first + count - 1 else x.index_select(2, index)


def by_step(
    attend: Callable[[Tensor, Tensor, Tensor, int | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Sequence[int | None],
) -> Tensor:
    """Let head h attend in step `steps[h mod p]` of a pattern of p steps; None stands for their union."""
    heads, period = q.shape[1], len(steps)
    if period == 1:
        return attend(q, k, v, steps[0])
    own = [slice(first, None, period) for first in range(min(period, heads))]
    parts = [(q[:, s], k[:, heads_of(q, k, s)], v[:, heads_of(q, k, s)]) for s in own]
    out = torch.cat([attend(*part, step) for part, step in zip(parts, steps, strict=False)], 1)
    place = torch.arange(heads, device=q.device)
    return out.index_select(1, torch.cat([place[s] for s in own]).argsort())


def stretches(x: Tensor, bounds: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Views of x [B, H, n, D], one per pair of bounds; they may overlap.

    Autograd would allocate a zero-filled x for the gradient of each view; here all are added into one.
    """
    if without_functions():
        return tuple(x[:, :, begin:end] for begin, end in bounds)
    return _Stretches.apply(x, bounds)  # pyright: ignore[reportReturnType]  # what forward returns


class _Stretches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.bounds, ctx.shape = bounds, x.shape
        return tuple(x[:, :, begin:end] for begin, end in bounds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        total = grads[0].new_zeros(ctx.shape)
        for grad, (begin, end) in zip(grads, ctx.bounds, strict=True):
            total[:, :, begin:end] += grad
        return total, None


# The square root of GPT-2's 1,024 positions. A causal stride that depends on the length would change what earlier
# tokens saw as the sequence grows.
CAUSAL_STRIDE = 32


def root_above(length: int) -> int:
    """The square root of a number of tokens, rounded up."""
    return math.isqrt(length - 1) + 1


def root_below(length: int) -> int:
    """The square root of a number of tokens, rounded down."""
    return math.isqrt(length)


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
