"""Configurations and launches of the kernels of Performer attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.launch import Configuration, cut, launch, power, precision, sizes, strides
from approx_kernels.ops.linear.triton import segments
from approx_kernels.ops.performer.reference import FLOOR, RISE, lowest
from approx_kernels.ops.performer.triton_backward import (
    performer_dq_kernel,
    performer_keys_kernel,
    performer_shares_kernel,
)
from approx_kernels.ops.performer.triton_out import performer_out_kernel
from approx_kernels.ops.performer.triton_sums import performer_carry_kernel, performer_sums_kernel

# Tokens of a causal chunk, by dtype: inside it pairs are computed, from chunk to chunk a state is carried.
CHUNK = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
# Features of a program, for counting segments.
_TOGETHER = 64
LOWEST = lowest(torch.float32)


# By dtype, and for heads of more than 64 where these have their own, see `_cuts`. All fit the shared memory of every
# card.
SUMS = {
    "bfloat16": (cut(8, 2, BT=64, BM=64),),
    "float16": (cut(8, 1, BT=64, BM=32),),
    "float32": (cut(8, 1, BT=32, BM=16),),
}
SHARES = (cut(4, 1, BT=32),)
CARRY = (cut(4, 2, BM=16),)
# For outputs and for each gradient: where a tile is a chunk, and where it has any rows.
CAUSAL = {
    "bfloat16": (cut(4, 1, BT=64, BM=16, BC=64),),
    "float16": (cut(4, 1, BT=64, BM=16, BC=64),),
    "float16, wide": (cut(4, 1, BT=64, BM=32, BC=64),),
    "float32": (cut(8, 1, BT=32, BM=32, BC=32),),
}
PARALLEL = {
    "bfloat16": (cut(4, 2, BT=64, BM=32, BC=64),),
    "bfloat16, wide": (cut(4, 2, BT=64, BM=32, BC=128),),
    "float16": (cut(4, 2, BT=64, BM=32, BC=64),),
    "float16, wide": (cut(4, 2, BT=64, BM=32, BC=128),),
    "float32": (cut(8, 1, BT=32, BM=16, BC=32),),
}


class Launches:
    """The kernels on one set of inputs, which are those of `performer_forward`.

    Sums are float32: of features times values [B, H, slots, M, E], of features [B, H, slots, M], and with those of keys
    the tops that they are relative to, [B, H, slots, M], None for the relu kernel. If causal, a slot has the sums
    before a chunk, or after it for queries, and the last one has those of all; otherwise only the last one is read.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor,
        offsets: Tensor | None,
        key_mask: Tensor | None,
        causal: bool,
        kernel: str,
        scale: float,
    ) -> None:
        self.q, self.k, self.v, self.key_mask = q, k, v, key_mask
        self.causal, self.kernel, self.root = causal, kernel, scale**0.5
        self.projection, self.features, self.heads = rows.float(), rows.shape[-2], q.shape[0] * q.shape[1]
        self.offsets = None if offsets is None else offsets.float().contiguous()
        # The rounding errors of rows in 16 bits follow the rows.
        near = rows.to(q.dtype)
        self.rows = (
            near if q.dtype == torch.float32 else torch.cat([near, (self.projection - near.float()).to(q.dtype)], -2)
        )
        self.rows = self.rows.contiguous()
        # From the rows of a head to those of the next.
        self.apart = self.rows.stride(0)
        self.narrow = q.dtype == torch.bfloat16
        self.shift = k.shape[2] - q.shape[2] if causal else 0
        self.skipped = self.shift // CHUNK[q.dtype]
        self._constants = {
            **sizes(q, v),
            "CAUSAL": causal,
            "APART": rows.ndim == 3,
            "MAP": kernel,
            "NARROW": self.narrow,
            "PRECISION": precision(q),
            "LOWEST": LOWEST,
            "FLOOR": FLOOR,
            "RISE": RISE,
        }

    def key_sums(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sums over keys, and their tops."""
        sums, totals = self.empty_sums(self.k)
        tops = empty(self.q, *totals.shape[2:]) if self.kernel == "softmax" else None
        self.sum_rows(self.k, self.v, self.key_mask, None, None, tops, sums, totals, 0)
        self._carry(sums, totals, tops, self._first_logs() if self.causal and tops is not None else None, back=False)
        return sums, totals, tops

    def query_sums(self, tops: Tensor | None, c: Tensor, mu: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over queries of features times `c` and times `share`."""
        sums, totals = self.empty_sums(self.q)
        self.sum_rows(self.q, c, None, mu, share, tops, sums, totals, self.shift)
        self._carry(sums, totals, tops, None, back=True)
        return sums, totals

    def outputs(self, key_sums: tuple[Tensor, Tensor, Tensor | None], out: Tensor, kept: Sequence[Tensor]) -> None:
        """Write outputs and what the backward pass asks for."""
        sums, totals, tops = key_sums
        given = self.q, self.k, self.v, self.rows, self.offsets, self.key_mask, sums, totals, tops, out, *kept
        self._write(performer_out_kernel, self.q, self.skipped, given, sums, out)

    def shares(self, grad: Tensor, out: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of outputs over normalisers, c, in the dtype of factors; and c.out, both contiguous."""
        share = empty(self.q, self.q.shape[2])
        c = share.new_empty(grad.shape, dtype=torch.bfloat16 if self.narrow else torch.float32)

        def count(tiles: Mapping[str, int]) -> int:
            return -(-grad.shape[2] // tiles["BT"])

        launch(
            performer_shares_kernel,
            lambda tiles: (self.heads * count(tiles),),
            SHARES,
            grad,
            out,
            inverse,
            c,
            share,
            *strides(grad, out),
            grad.shape[1],
            grad.shape[2],
            tiled=lambda tiles: {"segments": count(tiles)},
            E=grad.shape[3],
            WIDE_E=power(grad.shape[3]),
        )
        return c, share

    def query_gradients(
        self,
        key_sums: tuple[Tensor, Tensor, Tensor | None],
        c: Tensor,
        share: Tensor,
        kept: Sequence[Tensor],
        dq: Tensor,
    ) -> None:
        """Write the gradients of queries, from the results of `shares`."""
        mu, _, rises = kept
        given = self.q, self.k, self.v, c, self.rows, self.offsets, self.key_mask, *key_sums, mu, rises, share, dq
        self._write(performer_dq_kernel, self.q, self.skipped, given, key_sums[0], dq)

    def key_gradients(
        self,
        query_sums: tuple[Tensor, Tensor],
        tops: Tensor | None,
        c: Tensor,
        kept: Sequence[Tensor],
        share: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Write the gradients of keys and values."""
        mu, _, rises = kept
        sums, totals = query_sums
        given = self.q, self.k, self.v, c, self.rows, self.offsets, self.key_mask, sums, totals, tops, mu, rises, share
        slots = 0 if tops is None else tops.shape[2]
        for what, made in (("dk", dk), ("dv", dv)):
            self._write(performer_keys_kernel, self.k, 0, (*given, made), sums, made, WHAT=what, tops=slots)

    def sum_rows(
        self,
        x: Tensor,
        z: Tensor,
        mask: Tensor | None,
        mu: Tensor | None,
        share: Tensor | None,
        tops: Tensor | None,
        sums: Tensor,
        totals: Tensor,
        shift: int,
    ) -> None:
        """Write sums over each segment of rows x: of keys, with their tops, or of queries, with a `share`."""
        rows, count = self._segments(x)
        launch(
            performer_sums_kernel,
            lambda tiles: (self.heads * count, -(-self.features // tiles["BM"])),
            self._cuts(SUMS),
            x,
            z,
            self.rows,
            self.offsets,
            mask,
            mu,
            share,
            tops,
            sums,
            totals,
            *strides(x, z),
            self.apart,
            H=x.shape[1],
            L=x.shape[2],
            M=self.features,
            shift=shift,
            rows=rows,
            segments=count,
            slots=sums.shape[2],
            tops=0 if tops is None else tops.shape[2],
            root=self.root,
            **self._constants,
        )

    def _carry(self, sums: Tensor, totals: Tensor, tops: Tensor | None, first: Tensor | None, *, back: bool) -> None:
        if sums.shape[2] == 1:
            return
        launch(
            performer_carry_kernel,
            lambda tiles: (self.heads, -(-self.features // tiles["BM"])),
            CARRY,
            sums,
            totals,
            tops,
            first,
            self.features,
            sums.shape[2],
            E=self.v.shape[3],
            WIDE_E=power(self.v.shape[3]),
            CAUSAL=self.causal,
            BACK=back,
            LOWEST=LOWEST,
        )

    def _first_logs(self) -> Tensor:
        """Logarithms of the first real key, [B, H, M]: the only one that every query with a key has surely seen."""
        first = self.k[:, :, 0]
        if self.key_mask is not None:
            place = self.key_mask.argmax(1)[:, None, None, None].expand(-1, self.k.shape[1], 1, self.k.shape[3])
            first = self.k.gather(2, place)[:, :, 0]
        first = first.float() * self.root
        logs = (self.projection @ first[..., None])[..., 0] - first.square().sum(-1, keepdim=True) / 2
        if self.key_mask is not None:
            logs = logs.where(self.key_mask.amax(1)[:, None, None] > 0, LOWEST)
        return logs.contiguous()

    def _segments(self, x: Tensor) -> tuple[int, int]:
        """Rows of a segment of queries or keys, and how many there are; causal ones are chunks of keys."""
        if self.causal:
            return CHUNK[self.q.dtype], chunks_of(self.q, self.k)[0]
        return segments(self.heads * -(-self.features // _TOGETHER), x.shape[2])

    def empty_sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers for the sums over queries or keys."""
        _, count = self._segments(x)
        slots = count + (self.causal or count > 1)
        return empty(self.q, slots, self.features, self.v.shape[3]), empty(self.q, slots, self.features)

    def _write(
        self, kernel: Any, x: Tensor, skipped: int, given: Sequence[Any], sums: Tensor, made: Tensor, **others: Any
    ) -> None:
        """Launch the kernel that writes `made` for tiles of rows x; if causal these are chunks, the first skipped."""

        def count(tiles: Mapping[str, int]) -> int:
            return self._segments(x)[1] - skipped if self.causal else -(-x.shape[2] // tiles["BT"])

        launch(
            kernel,
            lambda tiles: (self.heads * count(tiles), -(-made.shape[3] // tiles["BC"])),
            self._cuts(CAUSAL if self.causal else PARALLEL),
            *given,
            *strides(self.q, self.k, self.v, made),
            self.apart,
            H=self.q.shape[1],
            L=self.q.shape[2],
            S=self.k.shape[2],
            M=self.features,
            shift=self.shift,
            skipped=self.skipped,
            tiled=lambda tiles: {"segments": count(tiles)},
            slots=sums.shape[2],
            root=self.root,
            **others,
            **self._constants,
        )

    def _cuts(self, table: Mapping[str, tuple[Configuration, ...]]) -> tuple[Configuration, ...]:
        dtype, wide = str(self.q.dtype).removeprefix("torch."), max(self.q.shape[3], self.v.shape[3]) > 64
        return table.get(f"{dtype}, wide", table[dtype]) if wide else table[dtype]


def chunks_of(q: Tensor, k: Tensor) -> tuple[int, int]:
    """How many causal chunks keys have, and in how many of them there are queries."""
    chunk = CHUNK[q.dtype]
    count = -(-k.shape[2] // chunk)
    return count, count - (k.shape[2] - q.shape[2]) // chunk


def empty(q: Tensor, *shape: int) -> Tensor:
    """A float32 buffer, [B, H, ...]."""
    return q.new_empty(*q.shape[:2], *shape, dtype=torch.float32)
