"""How the kernels of causal clustered attention are launched, and cut for what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from approx_kernels.gpu.language import Configuration, first_that_fits
from approx_kernels.ops.clustered.triton_far import far_kernel, far_keys_kernel, far_queries_kernel
from approx_kernels.ops.clustered.triton_own import precision, strides
from approx_kernels.ops.clustered.triton_past import carry_kernel, chunk_sums_kernel, select_kernel
from approx_kernels.ops.clustered.triton_past_backward import carry_back_kernel, past_keys_kernel
from approx_kernels.ops.clustered.triton_top import scores_of
from approx_kernels.ops.clustering.triton import power


def _cut(warps: int, stages: int, **tiles: int) -> Configuration:
    return Configuration(tiles, warps, stages)


# Scores of a chunk that a program has in registers, by warps.
SELECT = {512: (_cut(1, 1),), 2048: (_cut(4, 1),)}
MOST_CHUNK = max(SELECT)
# Their numbers are kept in 16 bits.
MOST_CHUNKS = 2**15 - 1
# One row or one key each; many of them are beside each other on a card.
CARRY = (_cut(2, 1, BK=16),)
CARRY_BACK = (_cut(1, 1),)
KEYS = (_cut(2, 1, BM=8),)
SUMS = {
    "narrow": (_cut(4, 2, BM=32, BN=64),),
    "wide": (_cut(8, 1, BM=32, BN=64),),
    "float32": (_cut(8, 1, BM=32, BN=32),),
    "float32 wide": (_cut(8, 1, BM=32, BN=32),),
}
# Few rows, for a row has two or three queries of a chunk.
FAR = {
    "narrow": (_cut(2, 1, BM=16, BK=32),),
    "wide": (_cut(4, 1, BM=16, BK=32),),
    "float32": (_cut(4, 1, BM=16, BK=32),),
    "float32 wide": (_cut(8, 1, BM=16, BK=16),),
}
PAST = {
    "narrow": (_cut(8, 1, BM=32, BN=32),),
    "wide": (_cut(8, 1, BM=32, BN=32),),
    "float32": (_cut(8, 1, BM=32, BN=32),),
    "float32 wide": (_cut(8, 1, BM=16, BN=16),),
}


class Launches:
    """The kernels of one forward or backward pass; what they are given is described in `far_forward`."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor,
        order: Tensor,
        begins: Tensor,
        chunk: int,
        kept: int,
        scale: float,
    ) -> None:
        batch, heads, length, size = q.shape
        self.q, self.k, self.v, self.lists = q, k, v, (order, begins)
        # Products want them rounded, but of keys that weigh alike the reference is to choose the same.
        self.exact_rows, self.rows = rows, rows.to(q.dtype)
        self.heads, self.kept, self.scale, self.values = batch * heads, kept, scale, v.shape[3]
        self.boundaries = boundaries_of(rows.shape, begins.shape)
        self.keys = self.boundaries * chunk
        self._lengths = {"rows": rows.shape[2], "boundaries": self.boundaries}
        self._past = {**self._lengths, "H": heads, "chunk": chunk}
        self._queries = {**self._lengths, "H": heads, "L": length, "scale": scale}
        self._sizes = {"D": size, "E": self.values, "WIDE_D": power(size, 16), "WIDE_E": power(self.values, 16)}
        self._products = {**self._sizes, "PRECISION": precision(q)}

    def select(self, top: Tensor, until: Tensor) -> Tensor:
        """Find the largest keys of the rows, and give back their scores."""
        scores = scores_of(self.exact_rows, self.k[:, :, : self.keys], None, self.scale)
        best, chunk = scores.new_empty(top.shape), self._past["chunk"]
        wide = {"WIDE_K": power(self.kept, 16), "WIDE": power(chunk, 16)}

        def run(cut: Configuration) -> None:
            select_kernel[(self.heads * self.rows.shape[2],)](
                scores, top, best, until, **self._lengths, kept=self.kept, chunk=chunk, **wide, **cut.options
            )  # fmt: skip

        self._first_that_fits(run, next(cuts for most, cuts in SELECT.items() if chunk <= most), f"select {wide}")
        return best

    def sums(self, until: Tensor | None, past: Sequence[Tensor]) -> None:
        """The mass, mean key and mean value that rows have in each chunk."""

        def run(cut: Configuration) -> None:
            chunk_sums_kernel[(self._tiles(self.rows.shape[2], cut.tiles["BM"]),)](
                self.rows, self.k, self.v, until, *past, *strides(self.k, self.v), **self._past, scale=self.scale,
                **self._products, **cut.options,
            )  # fmt: skip

        self._first_that_fits(run, SUMS, "sums of chunks")

    def carry(self, top: Tensor, best: Tensor | None, until: Tensor | None, past: Sequence[Tensor]) -> None:
        """The same before each boundary."""

        def run(cut: Configuration) -> None:
            carry_kernel[(self.heads * self.rows.shape[2],)](
                self.k, self.v, top, best, until, *past, *strides(self.k, self.v), **self._past, kept=self.kept, **self._sizes,
                **cut.options,
            )  # fmt: skip

        self._first_that_fits(run, CARRY, "carry")

    def outputs(self, near: Sequence[Tensor], top: Tensor, past: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
        """What queries attend to in all."""

        def run(cut: Configuration) -> None:
            far_kernel[(self.heads * (self.lists[1].shape[2] - 1),)](
                self.q, self.k, self.v, *near, self.rows, top, *past, *self.lists, out, lse,
                *strides(self.q, self.k, self.v, near[0], out), **self._queries, kept=self.kept, **self._products,
                **cut.options,
            )  # fmt: skip

        self._first_that_fits(run, FAR, "far")

    def query_gradients(
        self, near: Sequence[Tensor], top: Tensor, past: Sequence[Tensor], out: Tensor, lse: Tensor, grad: Tensor, dq: Tensor,
        dnear: Sequence[Tensor], dpast: Sequence[Tensor], delta: Tensor,
    ) -> None:  # fmt: skip
        """Gradients of queries, of what they attend to in their chunk, and of what rows have at each boundary."""

        def run(cut: Configuration) -> None:
            far_queries_kernel[(self.heads * (self.lists[1].shape[2] - 1),)](
                self.q, self.k, self.v, *near, self.rows, top, *past, *self.lists, out, lse, grad, dq, *dnear, *dpast, delta,
                *strides(self.q, self.k, self.v, near[0], out, grad, dq, dnear[0]), **self._queries, kept=self.kept,
                **self._products, **cut.options,
            )  # fmt: skip

        self._first_that_fits(run, FAR, "far queries")

    def carry_back(self, past: Sequence[Tensor], dpast: Sequence[Tensor]) -> None:
        """Let gradients at a boundary be those of all from there on."""

        def run(cut: Configuration) -> None:
            carry_back_kernel[(self.heads * self.rows.shape[2],)](
                *past, *dpast, **self._lengths, **self._sizes, **cut.options
            )  # fmt: skip

        self._first_that_fits(run, CARRY_BACK, "carry back")

    def own_key_gradients(
        self, until: Tensor, mass: Tensor, dpast: Sequence[Tensor], lse: Tensor, delta: Tensor, grad: Tensor
    ) -> Tensor:
        """What those keys are given that rows have had among their largest, [B, H, S, D + E]."""
        added = mass.new_empty(*self.q.shape[:2], self.keys, self.q.shape[3] + self.values)

        def run(cut: Configuration) -> None:
            far_keys_kernel[(self.heads * self.keys,)](
                self.q, self.k, self.v, self.rows, until, mass, *dpast, *self.lists, lse, delta, grad, added,
                *strides(self.q, self.k, self.v, grad), **self._queries, chunk=self._past["chunk"], **self._sizes,
                WIDE_R=min(128, power(self.rows.shape[2], 16)), **cut.options,
            )  # fmt: skip

        self._first_that_fits(run, KEYS, "far keys")
        return added

    def key_gradients(
        self, until: Tensor | None, mass: Tensor, dpast: Sequence[Tensor], added: Tensor | None, dk: Tensor, dv: Tensor
    ) -> None:
        """Gradients of all keys and values before the last boundary."""

        def run(cut: Configuration) -> None:
            past_keys_kernel[(self._tiles(self._past["chunk"], cut.tiles["BN"]),)](
                self.rows, self.k, self.v, until, mass, *dpast, added, dk, dv, *strides(self.k, self.v, dk, dv), **self._past,
                scale=self.scale, **self._products, **cut.options,
            )  # fmt: skip

        self._first_that_fits(run, PAST, "past keys")

    def _tiles(self, length: int, tile: int) -> int:
        return self.heads * self.boundaries * -(-length // tile)

    def _first_that_fits(
        self,
        run: Callable[[Configuration], None],
        cuts: Sequence[Configuration] | Mapping[str, Sequence[Configuration]],
        what: str,
    ) -> None:
        size, wide = self.q.shape[3], max(self.q.shape[3], self.values) > 64
        kind = (
            ("float32 wide" if wide else "float32") if self.q.dtype == torch.float32 else "wide" if wide else "narrow"
        )
        cuts = cuts[kind] if isinstance(cuts, Mapping) else cuts
        first_that_fits(run, cuts, f"causal {what}, {self.q.dtype}, {size}, {self.values}", self.q.device)


def boundaries_of(rows: Sequence[int], begins: Sequence[int]) -> int:
    """Boundaries between the chunks of so many rows whose queries begin at so many places."""
    return (begins[2] - 1) // rows[2] - 1
