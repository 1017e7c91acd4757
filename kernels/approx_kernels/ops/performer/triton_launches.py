"""How the kernels of Performer attention are cut for what they are given, and launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.language import Configuration, first_that_fits
from approx_kernels.ops.linear.triton import power, segments
from approx_kernels.ops.performer.causal import RISE
from approx_kernels.ops.performer.reference import FLOOR
from approx_kernels.ops.performer.sums import lowest
from approx_kernels.ops.performer.triton_backward import (
    performer_dq_kernel,
    performer_keys_kernel,
    performer_shares_kernel,
)
from approx_kernels.ops.performer.triton_out import performer_out_kernel
from approx_kernels.ops.performer.triton_sums import performer_carry_kernel, performer_sums_kernel

# Tokens of a causal chunk, by dtype: inside it pairs are computed, from chunk to chunk a state is carried.
CHUNK = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
# Features that fill a program when segments are counted.
_TOGETHER = 64
LOWEST = lowest(torch.float32)


def _sums(rows: int, features: int, warps: int, stages: int) -> Configuration:
    return Configuration({"BT": rows, "BM": features}, warps, stages)


def _cut(rows: int, features: int, columns: int, warps: int, stages: int) -> Configuration:
    return Configuration({"BT": rows, "BM": features, "BC": columns}, warps, stages)


# By dtype, and where heads of more than 64 have their own, see `_first_that_fits`. None asks for more shared memory than
# any card has.
SUMS = {
    "bfloat16": (_sums(64, 64, 8, 2),),
    "float16": (_sums(64, 32, 8, 1),),
    "float32": (_sums(32, 16, 8, 1),),
}
SHARES = (Configuration({"BT": 32}, 4, 1),)
CARRY = (Configuration({"BM": 16}, 4, 2),)
# Those of outputs and of each gradient, where the rows of a tile are those of a chunk, and where they are any.
CAUSAL = {
    "bfloat16": (_cut(64, 16, 64, 4, 1),),
    "float16": (_cut(64, 16, 64, 4, 1),),
    "float16, wide": (_cut(64, 32, 64, 4, 1),),
    "float32": (_cut(32, 32, 32, 8, 1),),
}
PARALLEL = {
    "bfloat16": (_cut(64, 32, 64, 4, 2),),
    "bfloat16, wide": (_cut(64, 32, 128, 4, 2),),
    "float16": (_cut(64, 32, 64, 4, 2),),
    "float16, wide": (_cut(64, 32, 128, 4, 2),),
    "float32": (_cut(32, 16, 32, 8, 1),),
}


class Launches:
    """The kernels on one set of inputs, which are those of `performer_forward`.

    Sums are float32: of features times values [B, H, slots, M, E], of features [B, H, slots, M], and beside those of keys
    the tops that they are relative to, [B, H, slots, M], None for the relu kernel. Causal, a slot is what stands before a
    chunk, or behind it where queries are summed, and a last one all; otherwise the last one alone is read.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor,
        key_mask: Tensor | None,
        causal: bool,
        kernel: str,
        scale: float,
    ) -> None:
        self.q, self.k, self.v, self.key_mask = q, k, v, key_mask
        self.causal, self.kernel, self.root = causal, kernel, scale**0.5
        self.projection, self.features, self.heads = rows.float(), rows.shape[0], q.shape[0] * q.shape[1]
        # What 16 bits round away from the rows follows them.
        near = rows.to(q.dtype)
        self.rows = (
            near if q.dtype == torch.float32 else torch.cat([near, (self.projection - near.float()).to(q.dtype)])
        )
        self.rows = self.rows.contiguous()
        self.narrow = q.dtype == torch.bfloat16
        self.shift = k.shape[2] - q.shape[2] if causal else 0
        self.skipped = self.shift // CHUNK[q.dtype]

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
        given = self.q, self.k, self.v, self.rows, self.key_mask, sums, totals, tops, out, *kept

        def run(cut: Configuration) -> None:
            count = self._tiles(self.q, cut, self.skipped)
            performer_out_kernel[(self.heads * count, columns(out, cut))](
                *given, *strides(self.q, self.k, self.v, out), **self._lengths(count, sums), **self._constants(cut)
            )

        self._first_that_fits(run, "out")

    def shares(self, grad: Tensor, out: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of outputs over normalisers, c, in the dtype of factors; and c.out, both contiguous."""
        share = empty(self.q, self.q.shape[2])
        c = share.new_empty(grad.shape, dtype=torch.bfloat16 if self.narrow else torch.float32)

        def run(cut: Configuration) -> None:
            count = -(-grad.shape[2] // cut.tiles["BT"])
            performer_shares_kernel[(self.heads * count,)](
                grad, out, inverse, c, share, *strides(grad, out), grad.shape[1], grad.shape[2], count,
                E=grad.shape[3], WIDE_E=power(grad.shape[3]), **cut.options,
            )  # fmt: skip

        first_that_fits(run, SHARES, f"performer shares, {grad.dtype}, {grad.shape[3]}", grad.device)
        return c, share

    def query_gradients(
        self,
        key_sums: tuple[Tensor, Tensor, Tensor | None],
        c: Tensor,
        share: Tensor,
        kept: Sequence[Tensor],
        dq: Tensor,
    ) -> None:
        """Write the gradients of queries, from what `shares` returned."""
        mu, _, rises = kept
        given = self.q, self.k, self.v, c, self.rows, self.key_mask, *key_sums, mu, rises, share, dq

        def run(cut: Configuration) -> None:
            count = self._tiles(self.q, cut, self.skipped)
            performer_dq_kernel[(self.heads * count, columns(dq, cut))](
                *given,
                *strides(self.q, self.k, self.v, dq),
                **self._lengths(count, key_sums[0]),
                **self._constants(cut),
            )

        self._first_that_fits(run, "dq")

    def key_gradients(
        self, query_sums: tuple[Tensor, Tensor], tops: Tensor | None, c: Tensor, kept: Sequence[Tensor], share: Tensor,
        dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        """Write the gradients of keys and values."""
        mu, _, rises = kept
        sums, totals = query_sums
        given = self.q, self.k, self.v, c, self.rows, self.key_mask, sums, totals, tops, mu, rises, share

        for what, made in (("dk", dk), ("dv", dv)):

            def run(cut: Configuration, what: str = what, made: Tensor = made) -> None:
                count = self._tiles(self.k, cut, 0)
                performer_keys_kernel[(self.heads * count, columns(made, cut))](
                    *given, made, *strides(self.q, self.k, self.v, made), **self._lengths(count, sums), WHAT=what,
                    tops=0 if tops is None else tops.shape[2], **self._constants(cut),
                )  # fmt: skip

            self._first_that_fits(run, what)

    def sum_rows(
        self, x: Tensor, z: Tensor, mask: Tensor | None, mu: Tensor | None, share: Tensor | None, tops: Tensor | None,
        sums: Tensor, totals: Tensor, shift: int,
    ) -> None:  # fmt: skip
        """Write sums over each segment of rows x, which are keys and then write their tops, or queries with a `share`."""
        rows, count = self._segments(x)

        def run(cut: Configuration) -> None:
            performer_sums_kernel[(self.heads * count, -(-self.features // cut.tiles["BM"]))](
                x, z, self.rows, mask, mu, share, tops, sums, totals, *strides(x, z),
                H=x.shape[1], L=x.shape[2], M=self.features, shift=shift, rows=rows, segments=count, slots=sums.shape[2],
                tops=0 if tops is None else tops.shape[2], root=self.root, **self._constants(cut),
            )  # fmt: skip

        self._first_that_fits(run, "sums")

    def _carry(self, sums: Tensor, totals: Tensor, tops: Tensor | None, first: Tensor | None, *, back: bool) -> None:
        if sums.shape[2] == 1:
            return

        def run(cut: Configuration) -> None:
            performer_carry_kernel[(self.heads, -(-self.features // cut.tiles["BM"]))](
                sums, totals, tops, first, self.features, sums.shape[2],
                E=self.v.shape[3], WIDE_E=power(self.v.shape[3]), CAUSAL=self.causal, BACK=back, LOWEST=LOWEST, **cut.options,
            )  # fmt: skip

        first_that_fits(run, CARRY, f"performer carry, {self.v.shape[3]}", sums.device)

    def _first_logs(self) -> Tensor:
        """Logarithms of the first real key, [B, H, M]: all that every query with a key is sure to have seen."""
        first = self.k[:, :, 0]
        if self.key_mask is not None:
            place = self.key_mask.argmax(1)[:, None, None, None].expand(-1, self.k.shape[1], 1, self.k.shape[3])
            first = self.k.gather(2, place)[:, :, 0]
        first = first.float() * self.root
        logs = first @ self.projection.T - first.square().sum(-1, keepdim=True) / 2
        if self.key_mask is not None:
            logs = logs.where(self.key_mask.amax(1)[:, None, None] > 0, LOWEST)
        return logs.contiguous()

    def _segments(self, x: Tensor) -> tuple[int, int]:
        """Rows of a segment of queries or keys, and how many there are; causal ones are chunks of keys."""
        if self.causal:
            return CHUNK[self.q.dtype], chunks_of(self.q, self.k)[0]
        return segments(self.heads * -(-self.features // _TOGETHER), x.shape[2])

    def empty_sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Room for the sums over queries or keys."""
        _, count = self._segments(x)
        slots = count + (self.causal or count > 1)
        return empty(self.q, slots, self.features, self.v.shape[3]), empty(self.q, slots, self.features)

    def _tiles(self, x: Tensor, cut: Configuration, skipped: int) -> int:
        """Tiles of a head's queries or keys; causal ones are chunks, of which the first are skipped."""
        return self._segments(x)[1] - skipped if self.causal else -(-x.shape[2] // cut.tiles["BT"])

    def _lengths(self, count: int, sums: Tensor) -> dict[str, Any]:
        (_, heads, length, _), keys = self.q.shape, self.k.shape[2]
        return {
            "H": heads, "L": length, "S": keys, "M": self.features, "shift": self.shift, "skipped": self.skipped,
            "segments": count, "slots": sums.shape[2], "root": self.root,
        }  # fmt: skip

    def _constants(self, cut: Configuration) -> dict[str, Any]:
        size, values = self.q.shape[3], self.v.shape[3]
        return {
            "D": size, "E": values, "WIDE_D": power(size), "WIDE_E": power(values), "CAUSAL": self.causal, "MAP": self.kernel,
            "NARROW": self.narrow, "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "LOWEST": LOWEST, "FLOOR": FLOOR, "RISE": RISE, **cut.options,
        }  # fmt: skip

    def _first_that_fits(self, run: Callable[[Configuration], None], what: str) -> None:
        size, values = self.q.shape[3], self.v.shape[3]
        cuts = SUMS if what == "sums" else CAUSAL if self.causal else PARALLEL
        dtype = str(self.q.dtype).removeprefix("torch.")
        cut = cuts.get(f"{dtype}, wide", cuts[dtype]) if max(size, values) > 64 else cuts[dtype]
        told = f"performer {what}, {dtype}, {size}, {values}, {self.kernel}, {self.causal}"
        first_that_fits(run, cut, told, self.q.device)


def chunks_of(q: Tensor, k: Tensor) -> tuple[int, int]:
    """How many causal chunks keys have, and in how many of them there are queries."""
    chunk = CHUNK[q.dtype]
    count = -(-k.shape[2] // chunk)
    return count, count - (k.shape[2] - q.shape[2]) // chunk


def empty(q: Tensor, *shape: int) -> Tensor:
    """Room for [B, H, ...] numbers of float32."""
    return q.new_empty(*q.shape[:2], *shape, dtype=torch.float32)


def columns(made: Tensor, cut: Configuration) -> int:
    """Programs that share a row of what is made."""
    return -(-made.shape[3] // cut.tiles["BC"])


def strides(*tensors: Tensor) -> list[int]:
    """The first three of each."""
    return [stride for x in tensors for stride in x.stride()[:3]]
