"""Sums over the random features of keys, each feature relative to the largest that it has had.

Features are handled as logarithms until they are relative to something. A key's are `w.x - |x|^2 / 2`; a query's are
`w.x`, since the rest is the same for all features and cancels in the normaliser.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The random rows w and what is added to the logarithms of queries' features.

    Attributes:
        rows: [M, D], or [G, M, D] where heads have their own.
        offsets: [G, 1, M], or None for none.
    """

    rows: Tensor
    offsets: Tensor | None


class KeySums(NamedTuple):
    """What is kept of the keys seen so far; its size does not depend on their number.

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
        """`top` once the keys of these logarithms, [G, n, M], were added, [G, 1, M]."""
        logs = logs.detach() if keep is None else logs.detach().masked_fill(~keep, lowest(logs.dtype))
        return torch.maximum(self.top, logs.amax(1, keepdim=True))

    def add(self, logs: Tensor, v: Tensor, keep: Tensor | None) -> "KeySums":
        """The sums with these keys too: logs [G, n, M], v [G, n, E + 1], keep [G, n, 1]."""
        top = self.raised(logs, keep)
        state = self.state * (self.top - top).exp().transpose(1, 2)
        return KeySums(top, torch.baddbmm(state, key_features(logs, top, keep).transpose(1, 2), v))

    def read(self, heights: Tensor) -> Tensor:
        """Sums of weights times values, and of weights, for queries of these heights, [G, n, M] -> [G, n, E + 1]."""
        return query_features(heights, self.top) @ self.state


def lowest(dtype: torch.dtype) -> float:
    """Below every logarithm, and finite, so that differences of it are numbers."""
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
    """Features of keys relative to `top`, and 0 where padded."""
    relative = logs - top
    # Before the exponential, which padding may make infinite; afterwards the gradient would be 0 times that.
    return (relative if keep is None else relative.masked_fill_(~keep, lowest(logs.dtype))).exp_()


def divided(sums: Tensor) -> Tensor:
    """Outputs from sums of weighted values and, in the last column, of weights.

    Where there was a key the weights add up to 1 or more, since the largest feature of the query meets the key that
    `top` came from; so the bound only decides what is without a key, which is 0.
    """
    return sums[..., :-1] / sums[..., -1:].clamp(min=0.5)
