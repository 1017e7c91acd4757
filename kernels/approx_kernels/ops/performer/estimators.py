"""Random features fitted to queries and keys in closed form: the same mean, exp(q.k), with less variance.

With w of N(0, 1) and u = x + y, the product of features exp(a w² + (1 - 4a)^½ w x - x²/2) of x and y, times (1 - 4a)^½,
is exp(x y) on average for every a < 1/8. Its second moment relative to exp(2 x y) is (1 + p) / 2 p^½ exp(u² / p), p = 1 - 8a;
the mean logarithm of that over pairs with E u² = s is smallest at p² - (1 + 2 s) p - 2 s = 0. Coordinates multiply, so
vectors may use any basis, with a separate a for each coordinate.

Neither a rotation nor an invertible map T of queries, with the inverse of its transpose for keys, changes q.k. A vector
subtracted from all keys scales the weights of a query by one number, which cancels. This freedom is used to minimise u.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from approx_kernels.tokens.grouped import in_order, sharing, turns

ESTIMATORS = ("positive", "oprf", "sderf", "aderf")

# Added to second moments, times their mean over directions, so that directions with little data are not blown up.
_RIDGE = 1e-2
# Lower bound of that mean, for the case that all tokens are equal.
_LEAST = 1e-6


class Fitted(NamedTuple):
    """An estimator of exp(q.k) with a separate basis of features per head.

    Attributes:
        query_map: T, [H, D, D]; queries are multiplied by its transpose from the right.
        key_map: The inverse of its transpose, [H, D, D], for keys likewise.
        key_shift: Vector then subtracted from keys, [H, D].
        curvature: a of each coordinate, at most 0, [H, D].
    """

    query_map: Tensor
    key_map: Tensor
    key_shift: Tensor
    curvature: Tensor

    @classmethod
    def plain(cls, heads: int, size: int) -> "Fitted":
        """The unfitted estimator: features exp(w.x - |x|^2 / 2)."""
        identity = torch.eye(size).repeat(heads, 1, 1)
        return cls(identity, identity.clone(), torch.zeros(heads, size), torch.zeros(heads, size))

    def inputs(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Queries and keys in the basis of the features, so that `scale` times their products are scores minus a number per
        query, in the dtypes of q and k: [B, H, L, D], and for shared keys, [B, G, S, D], one copy per query head,
        [B, H, S, D].
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = q.to(wide) @ self.query_map.to(wide).mT
        shared = k.to(wide)
        keys = in_order([shared @ self.key_map[turn].to(wide).mT for turn in turns(q, k)])
        keys = keys - self.key_shift.to(wide)[:, None] * scale**-0.5
        return queries.to(q.dtype), keys.to(k.dtype)

    def rows(self, projection: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and logarithms of their weights for each head, [H, M, D] and [H, M], from rows [M, D] of N(0, 1)."""
        wide = torch.promote_types(projection.dtype, torch.float32)
        drawn, curvature = projection.to(wide), self.curvature.to(wide)
        return drawn * (1 - 4 * curvature).sqrt()[:, None], 2 * curvature @ drawn.square().T


def fit_estimator(q: Tensor, k: Tensor, key_mask: Tensor | None = None, *, estimator: str, scale: float) -> Fitted:
    """Fit each head's estimator of exp(scale q.k) to the second moments of its queries and keys.

    `positive` fits nothing. `oprf` has one a for all coordinates of a head. `sderf` has one per coordinate, in the basis in
    which the coordinates of queries plus keys are uncorrelated. `aderf` first maps queries and keys to equal second moments,
    which minimises the squares of their sums, and subtracts the mean of queries plus keys from the keys.

    Source: Likhosherstov et al., 2022, Chefs' Random Tables, arXiv 2205.15317 (OPRF) and 2023, FAVOR#, arXiv 2302.00787
    (SDERF, ADERF); departs from the last in moments around the mean and in subtracting the means.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        key_mask: [B, S] bool, True at real keys, and when L == S at real queries; None when all are real.
        estimator: One of `ESTIMATORS`.
        scale: Factor of the scores.

    Returns:
        The estimator, in float32 on the device of q. `Fitted.plain` if no token is real.

    Raises:
        ValueError: if the estimator is unknown.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}; expected one of {', '.join(ESTIMATORS)}.")
    heads, size = q.shape[1], q.shape[3]
    # Copies are acceptable here: fitting runs once, and shared keys count for each query head.
    k = k.repeat_interleave(sharing(q, k), 1)
    x, y = (_real(each, key_mask) * scale**0.5 for each in (q, k))
    if estimator == "positive" or not x.shape[1] or not y.shape[1]:
        return Fitted(*(each.to(q.device) for each in Fitted.plain(heads, size)))
    identity = torch.eye(size, dtype=x.dtype, device=x.device).expand(heads, size, size)
    query_map = key_map = identity
    shift = x.new_zeros(heads, 1, size)
    if estimator == "aderf":
        middle = y.mean(1, keepdim=True)
        query_map, key_map = _balanced(_moments(x - x.mean(1, keepdim=True)), _moments(y - middle))
        shift = x.mean(1, keepdim=True) @ query_map.mT + middle @ key_map.mT
    x, y = x @ query_map.mT, y @ key_map.mT - shift
    # Second moments of the sums of all queries with all keys.
    cross = x.mean(1).unsqueeze(-1) * y.mean(1).unsqueeze(-2)
    squares, base = torch.linalg.eigh(_moments(x) + _moments(y) + cross + cross.mT)
    if estimator == "oprf":
        squares, base = squares.mean(-1, keepdim=True).expand_as(squares), identity
    twice = 2 * squares.clamp(min=0)
    p = (1 + twice + ((1 + twice).square() + 4 * twice).sqrt()) / 2
    made = base.mT @ query_map, base.mT @ key_map, (shift @ base).squeeze(1), (1 - p) / 8
    return Fitted(*(each.float() for each in made))


def _real(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """All real tokens of each head, [H, n, D] in float64."""
    tokens = x.transpose(1, 2).flatten(0, 1).double()
    if key_mask is not None and key_mask.shape[1] == x.shape[2]:
        tokens = tokens[key_mask.flatten()]
    return tokens.transpose(0, 1)


def _moments(x: Tensor) -> Tensor:
    """Second moments, [H, n, D] -> [H, D, D], with a ridge."""
    moments = x.mT @ x / x.shape[1]
    mean = moments.diagonal(dim1=1, dim2=2).mean(1).clamp(min=_LEAST)[:, None, None]
    return moments + _RIDGE * mean * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)


def _balanced(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """A symmetric T for queries, and its inverse for keys, that give both the same second moments."""
    root, inverse = _roots(queries)
    # T² is the geometric mean of the inverse of one and the other.
    return _roots(inverse @ _roots(root @ keys @ root)[0] @ inverse)


def _roots(x: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a symmetric positive matrix, and its inverse."""
    squares, base = torch.linalg.eigh(x)
    squares = squares.clamp(min=torch.finfo(x.dtype).tiny).sqrt()[:, None]
    return (base * squares) @ base.mT, (base / squares) @ base.mT
