"""Launches and configurations of the kernels of causal clustered attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from approx_kernels.gpu.launch import cut, kind, launch, power, precision, sizes, strides
from approx_kernels.ops.clustered.triton_far import far_kernel, far_keys_kernel, far_queries_kernel
from approx_kernels.ops.clustered.triton_past import carry_kernel, chunk_sums_kernel, select_kernel
from approx_kernels.ops.clustered.triton_past_backward import carry_back_kernel, past_keys_kernel
from approx_kernels.ops.clustered.triton_top import scores_of

# Configurations by the most scores of a chunk that a program holds in registers.
SELECT = {512: (cut(1, 1),), 2048: (cut(4, 1),)}
MOST_CHUNK = max(SELECT)
# The numbers of chunks are stored in 16 bits.
MOST_CHUNKS = 2**15 - 1
# A program has one row or one key; many of them run at once.
CARRY = (cut(2, 1, BK=16),)
CARRY_BACK = (cut(1, 1),)
KEYS = (cut(2, 1, BM=8),)
SUMS = {
    "narrow": (cut(4, 2, BM=32, BN=64),),
    "wide": (cut(8, 1, BM=32, BN=64),),
    "float32": (cut(8, 1, BM=32, BN=32),),
    "float32 wide": (cut(8, 1, BM=32, BN=32),),
}
# Few rows, since a row has two or three queries in a chunk.
FAR = {
    "narrow": (cut(2, 1, BM=16, BK=32),),
    "wide": (cut(4, 1, BM=16, BK=32),),
    "float32": (cut(4, 1, BM=16, BK=32),),
    "float32 wide": (cut(8, 1, BM=16, BK=16),),
}
PAST = {
    "narrow": (cut(8, 1, BM=32, BN=32),),
    "wide": (cut(8, 1, BM=32, BN=32),),
    "float32": (cut(8, 1, BM=32, BN=32),),
    "float32 wide": (cut(8, 1, BM=16, BN=16),),
}


class Launches:
    """The kernels of one forward or backward pass; `far_forward` describes the arguments."""

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
        batch, heads, length, _ = q.shape
        self.q, self.k, self.v, self.lists = q, k, v, (order, begins)
        # Products need rounded rows; exact ones choose the same keys as the reference where weights are nearly equal.
        self.exact_rows, self.rows = rows, rows.to(q.dtype)
        self.heads, self.kept, self.scale, self.values = batch * heads, kept, scale, v.shape[3]
        self.boundaries = boundaries_of(rows.shape, begins.shape)
        self.keys = self.boundaries * chunk
        self._lengths = {"rows": rows.shape[2], "boundaries": self.boundaries}
        self._past = {**self._lengths, "H": heads, "chunk": chunk}
        self._queries = {**self._lengths, "H": heads, "L": length, "scale": scale}
        self._sizes, self._where = sizes(q, v), kind(q, v)
        self._products = {**self._sizes, "PRECISION": precision(q)}

    def select(self, top: Tensor, until: Tensor) -> Tensor:
        """Find the largest keys of the rows, and return their scores."""
        scores = scores_of(self.exact_rows, self.k[:, :, : self.keys], None, self.scale)
        best, chunk = scores.new_empty(top.shape), self._past["chunk"]
        wide: dict[str, Any] = {"WIDE_K": power(self.kept, 16), "WIDE": power(chunk, 16)}

        launch(
            select_kernel,
            (self.heads * self.rows.shape[2],),
            next(cuts for most, cuts in SELECT.items() if chunk <= most),
            scores,
            top,
            best,
            until,
            **self._lengths,
            kept=self.kept,
            chunk=chunk,
            **wide,
        )
        return best

    def sums(self, until: Tensor | None, past: Sequence[Tensor]) -> None:
        """The mass, mean key and mean value of each row in each chunk."""
        launch(
            chunk_sums_kernel,
            lambda tiles: (self._tiles(self.rows.shape[2], tiles["BM"]),),
            SUMS[self._where],
            self.rows,
            self.k,
            self.v,
            until,
            *past,
            *strides(self.k, self.v),
            **self._past,
            scale=self.scale,
            **self._products,
        )

    def carry(self, top: Tensor, best: Tensor | None, until: Tensor | None, past: Sequence[Tensor]) -> None:
        """The same over all keys before each boundary."""
        launch(
            carry_kernel,
            (self.heads * self.rows.shape[2],),
            CARRY,
            self.k,
            self.v,
            top,
            best,
            until,
            *past,
            *strides(self.k, self.v),
            **self._past,
            kept=self.kept,
            **self._sizes,
        )

    def outputs(self, near: Sequence[Tensor], top: Tensor, past: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
        """The outputs of the queries."""
        launch(
            far_kernel,
            (self.heads * (self.lists[1].shape[2] - 1),),
            FAR[self._where],
            self.q,
            self.k,
            self.v,
            *near,
            self.rows,
            top,
            *past,
            *self.lists,
            out,
            lse,
            *strides(self.q, self.k, self.v, near[0], out),
            **self._queries,
            kept=self.kept,
            **self._products,
        )

    def query_gradients(
        self,
        near: Sequence[Tensor],
        top: Tensor,
        past: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        dq: Tensor,
        dnear: Sequence[Tensor],
        dpast: Sequence[Tensor],
        delta: Tensor,
    ) -> None:
        """Gradients of queries, of their outputs inside their chunk, and of the sums of rows at each boundary."""
        launch(
            far_queries_kernel,
            (self.heads * (self.lists[1].shape[2] - 1),),
            FAR[self._where],
            self.q,
            self.k,
            self.v,
            *near,
            self.rows,
            top,
            *past,
            *self.lists,
            out,
            lse,
            grad,
            dq,
            *dnear,
            *dpast,
            delta,
            *strides(self.q, self.k, self.v, near[0], out, grad, dq, dnear[0]),
            **self._queries,
            kept=self.kept,
            **self._products,
        )

    def carry_back(self, past: Sequence[Tensor], dpast: Sequence[Tensor]) -> None:
        """Add to the gradients at each boundary those of all later ones."""
        launch(
            carry_back_kernel,
            (self.heads * self.rows.shape[2],),
            CARRY_BACK,
            *past,
            *dpast,
            **self._lengths,
            **self._sizes,
        )

    def own_key_gradients(
        self, until: Tensor, mass: Tensor, dpast: Sequence[Tensor], lse: Tensor, delta: Tensor, grad: Tensor
    ) -> Tensor:
        """Gradients of the keys and values that were among the largest of some row, [B, H, S, D + E]."""
        added = mass.new_empty(*self.q.shape[:2], self.keys, self.q.shape[3] + self.values)

        launch(
            far_keys_kernel,
            (self.heads * self.keys,),
            KEYS,
            self.q,
            self.k,
            self.v,
            self.rows,
            until,
            mass,
            *dpast,
            *self.lists,
            lse,
            delta,
            grad,
            added,
            *strides(self.q, self.k, self.v, grad),
            **self._queries,
            chunk=self._past["chunk"],
            **self._sizes,
            WIDE_R=min(128, power(self.rows.shape[2], 16)),
        )
        return added

    def key_gradients(
        self, until: Tensor | None, mass: Tensor, dpast: Sequence[Tensor], added: Tensor | None, dk: Tensor, dv: Tensor
    ) -> None:
        """Gradients of all keys and values before the last boundary."""
        launch(
            past_keys_kernel,
            lambda tiles: (self._tiles(self._past["chunk"], tiles["BN"]),),
            PAST[self._where],
            self.rows,
            self.k,
            self.v,
            until,
            mass,
            *dpast,
            added,
            dk,
            dv,
            *strides(self.k, self.v, dk, dv),
            **self._past,
            scale=self.scale,
            **self._products,
        )

    def _tiles(self, length: int, tile: int) -> int:
        return self.heads * self.boundaries * -(-length // tile)


def boundaries_of(rows: Sequence[int], begins: Sequence[int]) -> int:
    """The number of boundaries between chunks, from the shapes of rows and of `begins`."""
    return (begins[2] - 1) // rows[2] - 1
