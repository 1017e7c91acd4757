"""Feature maps: positive functions whose products replace the exponential of a score."""

import torch
from torch import Tensor
from torch.nn import functional as F

# In the order of maps.h.
FEATURE_MAPS = ("elu", "relu", "softmax", "t2r", "hedgehog")


def features(x: Tensor, feature_map: str, weight: Tensor | None) -> Tensor:
    """Features of queries or keys, a fresh tensor.

    Args: x [B, H, n, D]; weight [H, D, D] for `hedgehog`, [H, D + 1, D] with the bias last for `t2r`.
    Returns [B, H, n, D], and [B, H, n, 2 D] for `hedgehog`.
    """
    if feature_map == "elu":
        return F.elu(x).add_(1.0)
    if feature_map == "relu":
        return F.relu(x)
    if feature_map == "softmax":
        return x.softmax(-1)
    assert weight is not None, f"{feature_map} is learned"
    weight = weight.to(x.dtype)
    if feature_map == "t2r":
        return F.relu(x @ weight[:, :-1] + weight[:, -1:])
    heights = x @ weight
    return torch.cat([heights.softmax(-1), (-heights).softmax(-1)], -1)
