"""Random projections, and what they make of queries and keys: numbers to sort by, or buckets that double in number."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Columns drawn for buckets: one a bit, or one for two buckets. More would only serve longer inputs than anybody has,
# or cost more than the attention among the tokens of a bucket.
_BITS = 16
_DIRECTIONS = 64


def draw_projections(size: int, *, rounds: int, variant: str, causal: bool, seed: int) -> Tensor:
    """Random directions N(0, 1), drawn once from the seed.

    Returns:
        [rounds, D + 2, 1] for the asymmetric variant, [rounds, D, 16] for its causal form and [rounds, D, 64] for
        the shared one, float32.
    """
    rows, columns = (size, _DIRECTIONS) if variant == "shared" else (size, _BITS) if causal else (size + 2, 1)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rounds, rows, columns, generator=generator, device="cpu", dtype=torch.float32)


# Hashes are computed in float64 and, where they are sorted, rounded to float32: an order of tokens, or a side of a
# plane, that depended on rounding would change with the padding and the batch around a sample.


def sort_numbers(
    q: Tensor, k: Tensor, projections: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Projections of F(q) = [q; 0; (m - |q|²)^½] and G(k) = [k; (m - |k|²)^½; 0], m = max |q|² + max |k|².

    Both lie on one sphere, where the nearest key of a query is the one of the largest product. The maxima are those of
    the real tokens of a sample and head; others are sorted to the end.

    Returns:
        [rounds, B, H, L] and [rounds, B, H, S], float32.
    """
    planes = projections.squeeze(-1).double()
    queries, keys = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square() for x in (q, k))
    longest = _longest(queries, query_mask) + _longest(keys, key_mask)
    found = []
    for x, squares, extra, mask in ((q, queries, planes[:, -1], query_mask), (k, keys, planes[:, -2], key_mask)):
        products = (x.double() @ planes[:, :-2].T).permute(3, 0, 1, 2)
        numbers = torch.addcmul(products, (longest - squares).clamp(min=0).sqrt(), extra.view(-1, 1, 1, 1)).float()
        found.append(numbers if mask is None else numbers.masked_fill(~mask[:, None], torch.inf))
    return found[0], found[1]


def _longest(squares: Tensor, mask: Tensor | None) -> Tensor:
    squares = squares if mask is None else squares.masked_fill(~mask[:, None], 0.0)
    return squares.amax(-1, keepdim=True)


def past_centred(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys less the mean of the real keys up to each, [B, H, S, D] in float64.

    Softmax does not notice a vector taken from all keys, while hashes of what is left tell keys apart.
    """
    k = k.double()
    if key_mask is None:
        return k - k.cumsum(2) / torch.arange(1, k.shape[2] + 1, device=k.device)[:, None]
    real = key_mask[:, None, :, None]
    return k - k.masked_fill(~real, 0.0).cumsum(2) / real.cumsum(2).clamp(min=1)


def level_of(position: Tensor, cluster: int, variant: str) -> Tensor:
    """How often the buckets have doubled at a position, so that each holds 1 to 2 clusters of the tokens up to there."""
    doublings = _DIRECTIONS.bit_length() if variant == "shared" else _BITS
    bounds = cluster * 2 ** torch.arange(1, doublings + 1, device=position.device)
    return torch.bucketize(position, bounds, right=True)


class Buckets:
    """The bucket of each token among 2^level, for any level, in one round of hashing.

    Asymmetric: the first `level` bits [x·a > 0]. Shared: argmax [xR; -xR] over the first half as many directions.

    Args:
        x: Tokens, [..., D].
        directions: [D, 16] or [D, 64].
        variant: `asymmetric` or `shared`.
        levels: The highest level that is asked for.
    """

    def __init__(self, x: Tensor, directions: Tensor, variant: str, levels: int) -> None:
        self.shared = variant == "shared"
        columns = (1 << levels) >> 1 if self.shared else levels
        self.products = x.double() @ directions[:, :columns].double()
        if not self.shared:
            powers = 2.0 ** torch.arange(columns, dtype=torch.float64, device=x.device)
            self.bits = ((self.products > 0).double() @ powers).long()

    def at(self, level: int) -> Tensor:
        """Numbers from 0 to 2^level - 1, int64 [...]."""
        if not self.shared:
            return self.bits & ((1 << level) - 1)
        if not level:
            return self.products.new_zeros(self.products.shape[:-1], dtype=torch.int64)
        half = self.products[..., : 1 << (level - 1)]
        return torch.cat([half, -half], -1).argmax(-1)


def unit_keys(q: Tensor, k: Tensor) -> Tensor:
    """Queries of length D^½ as keys, [B, H, S, D].

    The learned keys take part with a gradient of 0, so that no trainer misses that of their projection.
    """
    units = F.normalize(q, dim=-1) * q.shape[-1] ** 0.5
    return torch.where(torch.ones((), dtype=torch.bool, device=q.device), units, k)
