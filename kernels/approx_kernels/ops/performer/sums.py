"""Sums over the random features of keys, each feature relative to its largest value so far.

Features are kept as logarithms until they are relative to a maximum. A key's are `w.x - |x|^2 / 2`; a query's are
`w.x`, since the rest is the same for all features and cancels in the normaliser.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The random rows w and the offsets added to the logarithms of queries' features.

    Attributes:
        rows: [M, D], or [G, M, D] if heads have their own.
        offsets: [G, 1, M], or None for none.
    """

    rows: Tensor
    offsets: Tensor | None


class KeySums(NamedTuple):
    """The state of the keys seen so far; its size does not depend on their number.

    Attributes:
        top: Largest logarithm of each feature, [G, 1, M]; `lowest` before the first real key. It cancels, so it is
            not differentiated.
        state: Sums of features, relative to `top`, times values and a one, [G, M, E + 1].
    """

    top: Tensor
    state: Tensor

    @classmethod
    def of_nothing(cls, k: Tensor, v: Tensor, rows: Rows) -> "KeySums":
        """The sums before the first key; v has its column of ones."""
        groups, count = k.shape[0], rows.rows.shape[-2]
        return cls(k.new_full((groups, 1, count), lowest(k.dtype)), k.new_zeros(groups, count, v.shape[2]))

    def raised(self, logs: Tensor, keep: Tensor | None) -> Tensor:
        """`top` after adding keys with these logarithms, [G, n, M], [G, 1, M]."""
        logs = logs.detach() if keep is None else logs.detach().masked_fill(~keep, lowest(logs.dtype))
        return torch.maximum(self.top, logs.amax(1, keepdim=True))

    def add(self, logs: Tensor, v: Tensor, keep: Tensor | None) -> "KeySums":
        """The sums including these keys: logs [G, n, M], v [G, n, E + 1], keep [G, n, 1]."""
        top = self.raised(logs, keep)
        state = self.state * (self.top - top).exp().transpose(1, 2)
        return KeySums(top, torch.baddbmm(state, key_features(logs, top, keep).transpose(1, 2), v))

    def read(self, heights: Tensor) -> Tensor:
        """Sums of weights times values, and of weights, for queries of these heights, [G, n, M] -> [G, n, E + 1]."""
        return query_features(heights, self.top) @ self.state


def lowest(dtype: torch.dtype) -> float:
    """Below every logarithm, and finite, so that differences are numbers."""
    return torch.finfo(dtype).min / 4


def heights_of(q: Tensor, rows: Rows) -> Tensor:
    """Logarithms of the features of queries, [G, n, D] -> [G, n, M]."""
    heights = q @ rows.rows.mT
    return heights if rows.offsets is None else heights + rows.offsets


def logs_of(k: Tensor, rows: Rows) -> Tensor:
    """Logarithms of the features of keys, [G, n, D] -> [G, n, M]."""
    return (k @ rows.rows.mT).sub_(k.square().sum(-1, keepdim=True) / 2)


def query_features(heights: Tensor, top: Tensor) -> Tensor:
    """Features of queries for keys relative to `top`; the largest of each query is 1."""
    heights = heights + top
    return heights.sub_(heights.detach().amax(-1, keepdim=True)).exp_()


def key_features(logs: Tensor, top: Tensor, keep: Tensor | None) -> Tensor:
    """Features of keys relative to `top`, and 0 at padding."""
    relative = logs - top
    # Mask before the exponential, which padding may make infinite; masking afterwards would give NaN gradients.
    return (relative if keep is None else relative.masked_fill_(~keep, lowest(logs.dtype))).exp_()


def divided(sums: Tensor) -> Tensor:
    """Outputs from sums of weighted values and, in the last column, of weights.

    With a key the weights add up to at least 1, since the largest feature of the query meets the key that set `top`; so the
    bound matters only without a key, where the output is 0.
    """
    return sums[..., :-1] / sums[..., -1:].clamp(min=0.5)
