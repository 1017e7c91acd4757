"""Random projections of queries and keys: numbers to sort by, or buckets that double in number.

Hashes are computed in float64 and rounded to float32 for sorting: an order of tokens, or a side of a plane, that
depended on rounding would change with the padding and the batch around a sample.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.observed import unreadable
from approx_kernels.tokens.shapes import check_draw, check_form, check_word

VARIANTS = ("asymmetric", "shared")

# Columns drawn for buckets: one per bit, or one per two buckets. More would help only with impractically long inputs,
# or cost more than the attention inside a bucket.
_BITS = 16
_DIRECTIONS = 64
# Numbers in float64 at a time, which fit into a core's own cache.
_CACHED = 2**17


def draw_projections(size: int, *, rounds: int, variant: str, causal: bool, seed: int) -> Tensor:
    """Random directions N(0, 1), drawn once from the seed.

    Returns:
        [rounds, D + 2, 1] for the asymmetric variant, [rounds, D, 16] for its causal form and [rounds, D, 64] for
        the shared one, float32.
    """
    check_draw(seed, rounds=rounds, size=size)
    check_word("variant", variant, VARIANTS)
    check_form(causal=causal)
    rows, columns = (size, _DIRECTIONS) if variant == "shared" else (size, _BITS) if causal else (size + 2, 1)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rounds, rows, columns, generator=generator, device="cpu", dtype=torch.float32)


def sort_numbers(
    q: Tensor, k: Tensor, projections: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Projections of F(q) = [q; 0; (m - |q|²)^½] and G(k) = [k; (m - |k|²)^½; 0], m = max |q|² + max |k|².

    Both lie on one sphere, where the nearest key of a query has the largest product. The maxima are over the real
    tokens of a sample and head; others are sorted to the end.

    Returns:
        [rounds, B, H, L] and [rounds, B, H, S], float32.
    """
    planes = projections.squeeze(-1).double()
    (queries, query_squares), (keys, key_squares) = (_products(x, planes[:, :-2]) for x in (q, k))
    longest = _longest(query_squares, query_mask) + _longest(key_squares, key_mask)
    values = []
    for products, squares, extra, mask in (
        (queries, query_squares, planes[:, -1], query_mask),
        (keys, key_squares, planes[:, -2], key_mask),
    ):
        lifts = (longest - squares).clamp(min=0).sqrt()
        numbers = torch.addcmul(products, lifts, extra.view(-1, 1, 1, 1)).float()
        values.append(numbers if mask is None else numbers.masked_fill(~mask[:, None], torch.inf))
    return values[0], values[1]


def _products(x: Tensor, planes: Tensor) -> tuple[Tensor, Tensor]:
    """Products with the planes, [rounds, B, H, L], and squared lengths, [B, H, L], in float64."""
    products = x.new_empty(*planes.shape[:1], *x.shape[:3], dtype=torch.float64)
    squares = torch.empty_like(products[0])
    for piece in _pieces(x, x.shape[3]):
        wide = x[piece].double()
        products[:, *piece] = (wide @ planes.T).movedim(-1, 0)
        squares[piece] = wide.square().sum(-1)
    return products, squares


def _longest(squares: Tensor, mask: Tensor | None) -> Tensor:
    squares = squares if mask is None else squares.masked_fill(~mask[:, None], 0.0)
    return squares.amax(-1, keepdim=True)


def _pieces(x: Tensor, columns: int) -> Iterator[tuple[slice, slice, slice]]:
    """Samples, heads and tokens of x [B, H, n, D], token by token, few enough at a time for a CPU's cache."""
    samples, heads, tokens = x.shape[:3]
    if x.device.type == "cpu":
        tokens = min(tokens, max(1, _CACHED // columns))
        heads = min(heads, max(1, _CACHED // (columns * tokens)))
        samples = min(samples, max(1, _CACHED // (columns * tokens * heads)))
    steps = (samples, heads, tokens)
    for starts in itertools.product(*(range(0, n, step) for n, step in zip(x.shape, steps, strict=False))):
        first, second, third = (slice(start, start + step) for start, step in zip(starts, steps, strict=True))
        yield first, second, third


def level_of(position: Tensor, cluster: int, variant: str) -> Tensor:
    """Number of times the buckets have doubled at a position, so that each holds 1 to 2 clusters of the tokens up to it."""
    bounds = cluster * 2 ** torch.arange(1, _doublings(variant) + 1, device=position.device)
    return torch.bucketize(position, bounds, right=True)


def finer(level: Tensor, buckets: int, variant: str) -> Tensor:
    """A level with `buckets` times as many buckets, at most the highest level."""
    return (level + buckets.bit_length() - 1).clamp(max=_doublings(variant))


def levels_within(level: Tensor, first: int, last: int, cluster: int, variant: str, buckets: int = 1) -> range:
    """The levels of positions from `first` to `last`, `buckets` times as fine, without synchronising a GPU; on a CPU only
    those that occur.
    """
    if level.device.type == "cpu" and not unreadable(level):
        return range(int(level.min()), int(level.max()) + 1)
    most = _doublings(variant)
    lowest, highest = (
        min(max((at // cluster).bit_length() - 1, 0) + buckets.bit_length() - 1, most) for at in (first, last)
    )
    return range(lowest, highest + 1)


def _doublings(variant: str) -> int:
    return _DIRECTIONS.bit_length() if variant == "shared" else _BITS


class Buckets:
    """The bucket of each token among 2^level, for any level up to `highest`.

    Asymmetric: the first `level` bits [x·a > 0]. Shared: the nearest of the directions and their opposites, that is
    argmax [xR; -xR], among the first 2^level of them.

    Args:
        x: Tokens, [B, H, n, D].
        projections: The projections of the shared variant or of the causal form of the asymmetric one.
        variant: `asymmetric` or `shared`.
        highest: The highest level needed.
        count: Number of real tokens up to each, [B, n], to subtract their mean from x first: a vector subtracted from all
            keys does not change the softmax, but makes hashes tell keys apart. None subtracts nothing.
        mask: [B, n] bool, True at real tokens; used only with `count`.
    """

    def __init__(
        self,
        x: Tensor,
        projections: Tensor,
        variant: str,
        highest: int,
        count: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        self.shared = variant == "shared"
        rounds, size, _ = projections.shape
        columns = (1 << highest) >> 1 if self.shared else highest
        planes = projections[..., :columns].double().transpose(0, 1).reshape(size, rounds * columns)
        made = highest if self.shared else 1
        self.numbers = torch.zeros(made, rounds, *x.shape[:3], dtype=torch.int64, device=x.device)
        carry = torch.zeros((), dtype=planes.dtype)
        for piece in _pieces(x, max(size, planes.shape[1])) if highest else ():
            products = x[piece].double() @ planes
            if count is not None:
                samples, _, tokens = piece
                real = products if mask is None else products * mask[samples, None, tokens, None]
                sums = real.cumsum(2) if tokens.start == 0 else real.cumsum(2).add_(carry)
                carry = sums[:, :, -1:]
                mean = sums / count[samples, None, tokens, None].clamp(min=1)
                # Identical keys must all lie on one side, however their mean is rounded.
                products = products - mean - 1e-9 * mean.abs()
            products = products.unflatten(-1, (rounds, columns))
            buckets = _nearest(products, highest) if self.shared else _bits(products)[None]
            self.numbers[:, :, *piece] = buckets.movedim(-1, 1)

    def at(self, level: int) -> Tensor:
        """Numbers from 0 to 2^level - 1, int64 [rounds, B, H, n]."""
        if self.shared:
            return self.numbers[level - 1] if level else self.numbers.new_zeros(()).expand(self.numbers.shape[1:])
        return self.numbers[0] & ((1 << level) - 1)


def _bits(products: Tensor) -> Tensor:
    """Signs of the products [..., columns] as the bits of a number."""
    powers = 2.0 ** torch.arange(products.shape[-1], dtype=products.dtype, device=products.device)
    return ((products > 0).to(products) @ powers).long()


def _nearest(products: Tensor, highest: int) -> Tensor:
    """The direction or opposite of the largest product [..., columns] among the first 2, 4, 8, … of them."""
    lengths = products.abs()
    most, best = lengths[..., 0], torch.zeros_like(products[..., 0], dtype=torch.int64)
    by_level = []
    for level in range(1, highest + 1):
        if level > 1:
            half = 1 << (level - 2)
            new = lengths[..., half : 2 * half].max(-1)
            best = torch.where(new.values > most, new.indices + half, best)
            most = torch.maximum(new.values, most)
        opposite = products.gather(-1, best[..., None]).squeeze(-1) < 0
        by_level.append(2 * best + opposite)
    return torch.stack(by_level)


def unit_keys(q: Tensor, k: Tensor) -> Tensor:
    """Queries of length D^½ as keys, [B, H, S, D]; k is [B, G, S, D].

    The learned keys get a gradient of 0, so that their projection's gradient is not missing for trainers.
    """
    units = F.normalize(q, dim=-1) * q.shape[-1] ** 0.5
    chosen = torch.ones((), dtype=torch.bool, device=q.device)
    return torch.where(chosen, units.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2)).flatten(1, 2)
