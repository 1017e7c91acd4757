"""Linear attention in plain PyTorch: features of queries and keys, sums over keys, and the softmax of a window."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.pytorch import drop_keys, without_autocast
from approx_kernels.tokens import State, blank_padding, content, extended, in_order, newest, sharing, turns

# Numbers in a working set: half a MiB of float32, which fits into a core's own cache.
_CACHED = 2**17


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    feature_map: str = "elu",
    maps: tuple[Tensor, Tensor] | None = None,
    window: int = 0,
    mix: Tensor | None = None,
    scale: float = 1.0,
    input_scale: float = 1.0,
    eps: float = 1e-6,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    form: dict[str, Any] = {"feature_map": feature_map, "maps": maps, "window": window, "mix": mix if window else None}
    form |= {"scale": scale, "input_scale": input_scale, "eps": eps, "dropout": dropout}
    return linear_heads(q, k, v, key_mask, causal=causal, **form)[0]


def linear_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    state: State | None = None,
    *,
    feature_map: str = "elu",
    maps: tuple[Tensor, Tensor] | None = None,
    window: int = 0,
    mix: Tensor | None = None,
    scale: float = 1.0,
    input_scale: float = 1.0,
    eps: float = 1e-6,
) -> tuple[Tensor, State]:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    form = {"feature_map": feature_map, "maps": maps, "window": window, "mix": mix if window else None}
    return continue_heads(q, k, v, key_mask, state, **form, scale=scale, input_scale=input_scale, eps=eps)


def linear_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
    feature_map: str,
    maps: tuple[Tensor, Tensor] | None,
    window: int,
    mix: Tensor | None,
    scale: float,
    input_scale: float,
    eps: float,
    dropout: float = 0.0,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention; on a CPU without a window, a few heads at a time, whose features then stay in its cache.

    When causal, it continues from the sums of earlier keys, [B, G, F, E + 1], and returns the sums for later queries;
    with learned maps each query head has its own sums, [B, H, F, E + 1].
    """
    if sharing(q, k) > 1:
        form = {"causal": causal, "feature_map": feature_map, "window": window, "dropout": dropout}
        form |= {"scale": scale, "input_scale": input_scale, "eps": eps}
        results = [
            linear_heads(q[:, turn], k, v, key_mask, sums=own, **parts, **form)
            for turn, own, parts in own_parts(q, k, sums, maps, mix)
        ]
        return in_order([out for out, _ in results]), joined_sums(
            [each for _, each in results if each is not None], maps
        ) if causal else None
    wide = torch.promote_types(q.dtype, torch.float32)
    keep = None if key_mask is None else key_mask[:, None, :, None]
    q, k, v = blank_padding(q, k, v, key_mask)
    heads = q.shape[1]
    # A window is processed block by block, which is little work at a time for all heads together. In an exported
    # program the number of heads at a time cannot depend on the length.
    if q.device.type == "cpu" and mix is None and not torch.compiler.is_exporting():
        heads = max(1, _CACHED // (q.shape[0] * k.shape[2] * k.shape[3]))
    out, reached = [], []
    with without_autocast(q.device.type):
        for first in range(0, q.shape[1], heads):
            block = slice(first, first + heads)
            query_map, key_map = (None, None) if maps is None else (maps[0][block], maps[1][block])
            q_block, k_block, values = (x[:, block].to(wide) for x in (q, k, v))
            queries = features(scaled(q_block, input_scale), feature_map, query_map)
            keys = features(scaled(k_block, input_scale), feature_map, key_map)
            # Features of padding are not 0 and would enter the normaliser.
            keys = keys if keep is None else keys * keep
            values = drop_keys(values, dropout)
            earlier = None if sums is None else sums[:, block]
            if mix is not None:
                parts = q_block, k_block, queries, keys, values, keep, mix[block]
                ways = {"window": window, "causal": causal, "scale": scale, "eps": eps}
                joined, later = attend_windowed(*parts, **ways, sums=earlier)
            elif causal:
                joined, later = continue_features(queries, keys, values, earlier, eps)
            else:
                joined, later = attend_features(queries, keys, values, eps), None
            out.append(joined.to(q.dtype))
            reached.append(later)
    return torch.cat(out, 1), torch.cat(reached, 1) if causal else None


def own_parts(
    q: Tensor, k: Tensor, sums: Tensor | None, maps: tuple[Tensor, Tensor] | None, mix: Tensor | None
) -> Iterator[tuple[slice, Any, dict[str, Any]]]:
    """The query heads of each of `turns`, the sums that they read (None without any), and their learned parameters."""
    for turn in turns(q, k):
        learned = None if maps is None else (maps[0][turn], maps[1][turn])
        own = sums if sums is None or maps is None else sums[:, turn]
        yield turn, own, {"maps": learned, "mix": None if mix is None else mix[turn]}


def joined_sums(parts: Sequence[Tensor], maps: tuple[Tensor, Tensor] | None) -> Tensor:
    """The sums after all turns; without learned maps, each turn made the same."""
    return parts[-1] if maps is None else in_order(parts)


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times the factor; x itself if the factor is 1."""
    return x if factor == 1.0 else x * factor


# In the order of maps.h.
FEATURE_MAPS = ("elu", "relu", "softmax", "t2r", "hedgehog")
# Those of a recurrence that forgets, which only `exact_part` computes.
FORGETFUL = ("gated", "unit")


def features(x: Tensor, feature_map: str, weight: Tensor | None) -> Tensor:
    """Features of queries or keys, a fresh tensor.

    Args: x [B, H, n, D]; weight [H, D, D] for `hedgehog` and `unit`, [H, D + 1, D] with the bias last for `t2r`.
    Returns [B, H, n, D], and [B, H, n, 2 D] for `hedgehog`; `gated` are those of `softmax`, `unit` have length 1.
    """
    if feature_map == "elu":
        return F.elu(x).add_(1.0)
    if feature_map == "relu":
        return F.relu(x)
    if feature_map in ("softmax", "gated"):
        return x.softmax(-1)
    assert weight is not None, f"{feature_map} is learned"
    weight = weight.to(x.dtype)
    if feature_map == "t2r":
        return F.relu(x @ weight[:, :-1] + weight[:, -1:])
    if feature_map == "hedgehog" and torch.compiler.is_exporting():
        # Runtimes copy what they join, so both signs are one product.
        heights = x @ torch.cat([weight, -weight], -1)
        return heights.unflatten(-1, (2, weight.shape[-1])).softmax(-1).flatten(-2)
    heights = x @ weight
    if feature_map == "unit":
        heights = F.silu(heights)
        return heights * (heights.square().sum(-1, keepdim=True) + _LEAST_SQUARE).rsqrt()
    return torch.cat([heights.softmax(-1), (-heights).softmax(-1)], -1)


# Added to the square of a length that divides, as in flash-linear-attention.
_LEAST_SQUARE = 1e-6
# Queries per causal chunk: pairs are computed inside it, a state of size D x E is carried between chunks.
_CHUNK = 64


def attend_features(queries: Tensor, keys: Tensor, values: Tensor, eps: float) -> Tensor:
    """`sum_j (f_i.g_j) v_j / (sum_j f_i.g_j + eps)` for features f [..., L, F] and g [..., S, F] of any map."""
    state = keys.transpose(-2, -1) @ values
    norm = queries @ keys.sum(-2).unsqueeze(-1)
    return (queries @ state) / (norm + eps)


def continue_features(
    queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The causal form after keys given by their sums alone, and the sums with the new keys; see `continue_sums`."""
    size = values.shape[-1]
    # A last column of ones turns the normaliser into one more value.
    out, later = continue_sums(queries, keys, F.pad(values, (0, 1), value=1.0), sums)
    return out[..., :size] / (out[..., size:] + eps), later


def continue_sums(queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """`sum_j (f_i.g_j) v_j` over keys up to the query's own, after earlier keys given by their sums, and the sums with these.

    Args: features f [..., L, F] and g [..., S, F], values v [..., S, E], sums [..., F, E] of features times values or None
    before the first key. Inside a chunk the products are exact; a state holds the sum of all earlier chunks.
    """
    length = queries.shape[-2]
    # Bottom-right: every query sees the first S - L keys; with L > S the first L - S queries see none.
    before = keys.shape[-2] - length
    if before < 0:
        keys, values = F.pad(keys, (0, 0, -before, 0)), F.pad(values, (0, 0, -before, 0))
        before = 0
    # A single query sees every key.
    seen = before if length > 1 else keys.shape[-2]
    first = keys[..., :seen, :].transpose(-2, -1) @ values[..., :seen, :]
    first = first if sums is None else sums + first
    if length == 1:
        return queries @ first, first
    if sums is not None and torch.compiler.is_exporting():
        # A program that continues a state takes few tokens at a time, one chunk.
        keys, values = keys[..., before:, :], values[..., before:, :]
        return (queries @ keys.mT).tril() @ values + queries @ first, first + keys.mT @ values
    # ONNX rounds negative quotients up, and an exported program for several chunks does not take a single one.
    chunks = (length + _CHUNK - 1) // _CHUNK
    if torch.compiler.is_exporting():
        chunks += 1
    end = (0, 0, 0, chunks * _CHUNK - length)
    queries, keys, values = (
        F.pad(x, end).unflatten(-2, (chunks, _CHUNK)) for x in (queries, keys[..., before:, :], values[..., before:, :])
    )
    added = keys.transpose(-2, -1) @ values
    # Shifted rather than subtracted: a difference would lose digits, above all in the gradient.
    states = torch.cat([first.unsqueeze(-3), added], -3).cumsum(-3)
    out = (queries @ keys.transpose(-2, -1)).tril() @ values + queries @ states[..., :-1, :, :]
    return out.flatten(-3, -2)[..., :length, :], states[..., -1, :, :]


# Tokens per chunk of fading features, and the least logarithm of a decay: no factor in a chunk is then above e^40.
_FADING_CHUNK, _LEAST_DECAY = 32, -1.25


def continue_fading(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, sums: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`continue_sums` with `S_t = diag(exp(a_t)) S_{t-1} + g_t v_t^T`: each feature of the sums decays at each key.

    Args: as for `continue_sums`; a [..., S, F], at most 0, and taken as at least -1.25.

    Source: Yang et al., 2024, Gated linear attention, arXiv 2312.06635. No departures.
    """
    length = queries.shape[-2]
    queries, keys, values, decays = _in_chunks(_FADING_CHUNK, queries, keys, values, decays.clamp(min=_LEAST_DECAY))
    decays = decays.cumsum(-2)
    last = decays[..., -1:, :]
    added = (keys * (last - decays).exp()).mT @ values
    states = _states(last.mT, added, sums)
    queries, keys = queries * decays.exp(), keys * (-decays).exp()
    out = (queries @ keys.mT).tril() @ values + queries @ states[..., :-1, :, :]
    # A view of all states would keep them in memory.
    return out.flatten(-3, -2)[..., -length:, :], states[..., -1, :, :].clone()


def _states(logs: Tensor, added: Tensor, first: Tensor | None) -> Tensor:
    """`S_c = exp(a_c) S_{c-1} + added_c` with S_0 in front, [..., chunks + 1, F, E]; a [..., chunks, F, 1]."""
    state = torch.zeros_like(added[..., 0, :, :]) if first is None else first
    if torch.compiler.is_exporting():
        # A program for any number of chunks has no loop over them; its sums over pairs of chunks cost little.
        logs = F.pad(logs.squeeze(-1).cumsum(-2), (0, 0, 1, 0)).mT
        factors = (logs.unsqueeze(-1) - logs.unsqueeze(-2)).exp().tril()
        return (factors @ torch.cat([state.unsqueeze(-3), added], -3).transpose(-3, -2)).transpose(-3, -2)
    states, factors = [state], logs.exp()
    for chunk in range(added.shape[-3]):
        states.append(factors[..., chunk, :, :] * states[-1] + added[..., chunk, :, :])
    return torch.stack(states, -3)


def continue_delta(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor, state: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The gated delta rule, `S_t = exp(a_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T`, read by `q_t^T S_t`.

    In chunks: what a chunk writes solves a triangular system for all of its tokens at once (the WY representation).

    Source: Yang, Kautz, Hatamizadeh, 2024, Gated delta networks, arXiv 2412.06464. No departures.

    Args:
        queries: [..., L, F].
        keys: [..., S, F], of length 1 at most; query i is at position S - L + i.
        values: [..., S, E].
        decays: a, [..., S, 1], at most 0.
        rates: b, [..., S, 1], from 0 to 1; 0 for a key that is to change nothing, whose a is 0 too.
        state: S and the sum of the next paragraph after earlier keys; None before the first.

    Returns:
        [..., L, E]; how much each query's state has written, `w_t = exp(a_t) w_{t-1} + b_t`, [..., L]; S, [..., F, E],
        and w, [..., 1], after all keys.
    """
    length = queries.shape[-2]
    # A program for any number of tokens has no loop over chunks.
    size = None if torch.compiler.is_exporting() else min(_CHUNK, max(length, keys.shape[-2]))
    queries, keys, values, decays, rates = _in_chunks(size, queries, keys, values, decays, rates)
    decays = decays.cumsum(-2)
    apart = (decays - decays.mT).tril().exp().tril()
    from_start, to_end = decays.exp(), (decays[..., -1:, :] - decays).exp()
    within = (queries @ keys.mT) * apart
    system, sizes = torch.cat([values * rates, keys * (rates * from_start)], -1), [values.shape[-1], keys.shape[-1]]
    pairs = ((keys @ keys.mT) * apart * rates).tril(-1)
    new, erased = torch.linalg.solve_triangular(pairs, system, upper=False, unitriangular=True).split(sizes, -1)
    written, kept, queries, keys = (apart @ rates)[..., 0], from_start[..., 0], queries * from_start, (keys * to_end).mT
    matrix = torch.zeros_like(keys[..., 0, :, :1] * new[..., 0, :1, :]) if state is None else state[0]
    weight = torch.zeros_like(kept[..., 0, -1:]) if state is None else state[1]
    out, weights = [], []
    for chunk in range(keys.shape[-3]):
        own = new[..., chunk, :, :] - erased[..., chunk, :, :] @ matrix
        out.append(queries[..., chunk, :, :] @ matrix + within[..., chunk, :, :] @ own)
        weights.append(written[..., chunk, :] + kept[..., chunk, :] * weight)
        matrix = from_start[..., chunk, -1:, :] * matrix + keys[..., chunk, :, :] @ own
        weight = weights[-1][..., -1:].clone()
    return torch.cat(out, -2)[..., -length:, :], torch.cat(weights, -1)[..., -length:], (matrix, weight)


def _in_chunks(size: int | None, queries: Tensor, *of_keys: Tensor) -> list[Tensor]:
    """[..., L, F] and [..., S, n] as [..., chunks, size, n], or one chunk without a size, aligned at their ends, behind rows of 0."""
    total = max(queries.shape[-2], of_keys[0].shape[-2])
    # As in `continue_sums`.
    chunks = 1 if size is None else (total + size - 1) // size + torch.compiler.is_exporting()
    size = total if size is None else size
    return [F.pad(x, (0, 0, chunks * size - x.shape[-2], 0)).unflatten(-2, (chunks, size)) for x in (queries, *of_keys)]


# Queries per block, and keys per partial sum: a block computes pairs with its window, rounded up to this.
_BLOCK = 64


def attend_windowed(
    q: Tensor,
    k: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    keep: Tensor | None,
    mix: Tensor,
    *,
    window: int,
    causal: bool,
    scale: float,
    eps: float,
    sums: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Softmax weights for keys in the window, feature products for the others, each pair in one of the two.

    Args: q [B, H, L, D], k [B, H, S, D], their features queries and keys (0 where padded), values [B, H, S, E],
    keep [B, 1, S, 1] the real keys, mix [H] the factor of the softmax part, sums [B, H, F, E + 1] of the features of
    earlier keys, which no window reaches, times values and a one; None without any. Returns [B, H, L, E], and these
    sums with the keys of which the next query's causal window has none.
    """
    length, total = q.shape[2], k.shape[2]
    offset = total - length
    left, right = (window - 1, 0) if causal else (window, window)
    # A last column of ones turns the normaliser into one more value.
    values = F.pad(values, (0, 1), value=1.0)
    before, after = _outer_sums(keys, values, causal)
    before = before if sums is None else before + sums.unsqueeze(2)
    q = q * scale
    out = []
    for first in range(0, length, _BLOCK):
        last = min(first + _BLOCK, length)
        # Whole blocks of keys, so that the sum over all others is available; at least one key, seen or not (L > S).
        begin = min(max(first + offset - left, 0), total - 1) // _BLOCK
        end = -(-max(min(last + offset + right, total), begin * _BLOCK + 1) // _BLOCK)
        stretch = slice(begin * _BLOCK, min(end * _BLOCK, total))
        own = torch.arange(first + offset, last + offset, device=q.device)[:, None]
        distance = torch.arange(stretch.start, stretch.stop, device=q.device) - own
        near = (distance >= -left) & (distance <= right)
        far = ~near & (distance < 0) if causal else ~near
        if keep is not None:
            near = near & keep[:, :, stretch, 0].unsqueeze(2)
        weights = near_weights(q[:, :, first:last] @ k[:, :, stretch].transpose(-2, -1), near, mix)
        query = queries[:, :, first:last]
        weights = weights + (query @ keys[:, :, stretch].transpose(-2, -1)).masked_fill_(~far, 0.0)
        outer = before[:, :, begin] if after is None else before[:, :, begin] + after[:, :, end]
        out.append(weights @ values[:, :, stretch] + query @ outer)
    beyond = max(total - left, 0)
    tail = slice(beyond // _BLOCK * _BLOCK, beyond)
    sums = before[:, :, beyond // _BLOCK] + keys[:, :, tail].transpose(-2, -1) @ values[:, :, tail]
    return divided(torch.cat(out, 2), eps), sums


def near_weights(scores: Tensor, near: Tensor | None, mix: Tensor) -> Tensor:
    """`mix exp(score - largest)` for near keys, 0 elsewhere; scores [B, H, L, S] are overwritten."""
    mix, lowest = mix.to(scores.dtype).log()[:, None, None], torch.finfo(scores.dtype).min
    scores = scores if near is None else scores.masked_fill_(~near, lowest)
    # The largest score is part of the definition here: it balances the softmax part against the linear one. If no
    # key is near, 0 in its place makes every exponential vanish.
    largest = scores.amax(-1, keepdim=True)
    return (scores - (largest.masked_fill(largest == lowest, 0.0) - mix)).exp_()


def divided(sums: Tensor, eps: float) -> Tensor:
    """Outputs from sums of weighted values and, in the last column, of weights."""
    # Adding eps would keep the widest window from being exact.
    return sums[..., :-1] / sums[..., -1:].clamp(min=eps)


def _outer_sums(keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor | None]:
    """Sums over all blocks of keys before each border of blocks, [B, H, borders, F, E + 1], and over all after it.

    Each is summed from its own end: a difference of sums would lose digits.
    """
    blocks = -(-keys.shape[2] // _BLOCK)
    end = (0, 0, 0, blocks * _BLOCK - keys.shape[2])
    keys, values = (F.pad(x, end).unflatten(2, (blocks, _BLOCK)) for x in (keys, values))
    sums = F.pad(keys.transpose(-2, -1) @ values, (0, 0, 0, 0, 1, 1))
    before = sums[:, :, :-1].cumsum(2)
    return before, None if causal else sums[:, :, 1:].flip(2).cumsum(2).flip(2)


def continue_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State | None,
    *,
    window: int,
    mix: Tensor | None,
    **ways: Any,
) -> tuple[Tensor, State]:
    """Causal linear attention after the keys of a state, and the state with the new ones.

    The state holds `sums` of features times values and a one, [B, G, F, E + 1], with learned maps [B, H, F, E + 1];
    with a window, only of keys that it no longer reaches, and the others as a ring.
    """
    sums = None if state is None else state["sums"]
    ways = {"window": window, "mix": mix, **ways}
    ring = extended(state, k, v, key_mask) if window else {}
    if window:
        k, v, key_mask = content(ring)
    if window and sums is not None and q.shape[2] == 1 and k.shape[2] <= window:
        out, sums = _newest_query(q, k, v, key_mask, sums, **ways)
    else:
        out, sums = linear_heads(q, k, v, key_mask, causal=True, sums=sums, **ways)
    assert sums is not None, "causal sums always are"
    return out, {"sums": sums, **(newest(ring, window - 1) if window else {})}


def _newest_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sums: Tensor,
    *,
    feature_map: str,
    maps: tuple[Tensor, Tensor] | None,
    window: int,
    mix: Tensor,
    scale: float,
    input_scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """A single query whose window holds all stored keys: pairs with these, and the sums of all others."""
    if sharing(q, k) > 1:
        form = {"feature_map": feature_map, "window": window, "scale": scale, "input_scale": input_scale, "eps": eps}
        results = [
            _newest_query(q[:, turn], k, v, key_mask, own, **parts, **form)
            for turn, own, parts in own_parts(q, k, sums, maps, mix)
        ]
        return in_order([out for out, _ in results]), joined_sums([each for _, each in results], maps)
    query_map, key_map = maps or (None, None)
    near = None if key_mask is None else key_mask[:, None, None]
    with without_autocast(q.device.type):
        query, keys, values = (x.to(sums.dtype) for x in (q, k, v))
        values = F.pad(values, (0, 1), value=1.0)
        weights = near_weights(query @ keys.transpose(2, 3) * scale, near, mix)
        read = features(scaled(query, input_scale), feature_map, query_map) @ sums
        out = divided(weights @ values + read, eps)
        if k.shape[2] == window:
            oldest = features(scaled(keys[:, :, :1], input_scale), feature_map, key_map)
            oldest = oldest if key_mask is None else oldest * key_mask[:, None, :1, None]
            sums = sums + oldest.transpose(2, 3) @ values[:, :, :1]
    return out.to(q.dtype), sums
