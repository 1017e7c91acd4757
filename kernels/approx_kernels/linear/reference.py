"""Linear attention in plain PyTorch: features of queries and keys, then sums over keys."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.linear.features import features
from approx_kernels.linear.sums import attend_features
from approx_kernels.linear.window import attend_windowed

# Numbers in a working set: half a MiB of float32, which a core's own cache holds.
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
    dropout: float,
) -> Tensor:
    """Linear attention; on a CPU a few heads at a time, whose features then stay in its cache."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keep = None if key_mask is None else key_mask[:, None, :, None]
    heads = max(1, _CACHED // (q.shape[0] * k.shape[2] * k.shape[3])) if q.device.type == "cpu" else q.shape[1]
    out = []
    with torch.autocast(q.device.type, enabled=False):
        for first in range(0, q.shape[1], heads):
            block = slice(first, first + heads)
            query_map, key_map = (None, None) if maps is None else (maps[0][block], maps[1][block])
            q_block, k_block, values = (x[:, block].to(wide) for x in (q, k, v))
            queries = features(_scaled(q_block, input_scale), feature_map, query_map)
            keys = features(_scaled(k_block, input_scale), feature_map, key_map)
            # Features of padding are not 0: it would enter the normaliser.
            keys = keys if keep is None else keys * keep
            if dropout:
                values = values * F.dropout(values.new_ones(values.shape[:-1]), dropout)[..., None]
            if mix is None:
                joined = attend_features(queries, keys, values, causal=causal, eps=eps)
            else:
                parts = q_block, k_block, queries, keys, values, keep, mix[block]
                joined = attend_windowed(*parts, window=window, causal=causal, scale=scale, eps=eps)
            out.append(joined.to(q.dtype))
    return torch.cat(out, 1)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
