"""Linear attention in plain PyTorch: features of queries and keys, then sums over keys."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.linear.features import features
from approx_kernels.ops.linear.sums import attend_features, continue_features
from approx_kernels.ops.linear.window import attend_windowed
from approx_kernels.runtime.autocast import without_autocast
from approx_kernels.tokens.grouped import in_order, sharing, turns
from approx_kernels.tokens.padding import blank_padding

# Numbers in a working set: half a MiB of float32, which fits into a core's own cache.
_CACHED = 2**17


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

    When causal, it continues from the sums of earlier keys, [B, G, F, E + 1], and returns the sums for later queries; with
    learned maps each query head has its own sums, [B, H, F, E + 1].
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
    # A window is processed block by block, which is little work at a time for all heads together. In an exported program
    # the number of heads at a time cannot depend on the length.
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


def drop_keys(values: Tensor, dropout: float) -> Tensor:
    """Values with whole keys dropped at the given probability, and the others scaled up."""
    return values * F.dropout(values.new_ones(values.shape[:-1]), dropout)[..., None] if dropout else values


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times the factor; x itself if the factor is 1."""
    return x if factor == 1.0 else x * factor
