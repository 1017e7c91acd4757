"""Launches and configurations of the kernels of exact top-k attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from approx_kernels.gpu.launch import cut, kind, launch, power, precision, strides
from approx_kernels.ops.flash.triton import ENDLESS
from approx_kernels.ops.topk.triton_choice import score_kernel, select_kernel
from approx_kernels.ops.topk.triton_kept import attend_kernel, bits_kernel, keys_kernel, queries_kernel

# Scores computed at a time: about what a card's cache holds.
_SCORES = 2**24

# By kind of input, see `kind`; all of them fit the smallest card.
SCORES = {
    "narrow": (cut(8, 1, BM=64, BN=64),),
    "wide": (cut(8, 1, BM=64, BN=64),),
    "float32": (cut(8, 1, BM=32, BN=32),),
    "float32 wide": (cut(8, 1, BM=32, BN=32),),
}
KEYS = {
    "narrow": (cut(8, 2, BM=64, BN=64),),
    "wide": (cut(8, 2, BM=32, BN=64),),
    "float32": (cut(8, 1, BM=16, BN=32),),
    "float32 wide": (cut(8, 1, BM=16, BN=32),),
}
# A program has one query; many of them run at once.
KEPT = {
    "narrow": (cut(2, 1, BK=32),),
    "wide": (cut(4, 1, BK=32),),
    "float32": (cut(2, 1, BK=32),),
    "float32 wide": (cut(4, 1, BK=32),),
}
BITS = (cut(2, 1, BW=32, BK=32),)
# Scores of a row that stay in registers: all, unless there are more keys than the last entry says.
SELECT = {
    1024: (cut(2, 1, BS=1024, BW=256),),
    4096: (cut(8, 1, BS=4096, BW=1024),),
    16384: (cut(16, 1, BS=16384, BW=1024),),
}


class Launches:
    """The kernels of one forward or backward pass; `topk_forward` describes the arguments."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, kept: int, causal: bool, scale: float) -> None:
        batch, heads, length, size = q.shape
        self.q, self.k, self.v, self.heads, self.scale = q, k, v, batch * heads, scale
        self._pairs: dict[str, Any] = {
            "H": heads,
            "L": length,
            "S": k.shape[2],
            "shift": k.shape[2] - length if causal else ENDLESS,
        }
        self._rows: dict[str, Any] = {"H": heads, "L": length, "kept": kept}
        self._value: dict[str, Any] = {"E": v.shape[3], "WIDE_E": power(v.shape[3])}
        self._size: dict[str, Any] = {"D": size, "WIDE_D": power(size)}
        self._precise: dict[str, Any] = {"PRECISION": precision(q)}

    def choose(self, key_mask: Tensor | None, top: Tensor, best: Tensor) -> None:
        """Write the largest scores of each query and their keys, for some queries of all heads at a time."""
        length, keys = self._pairs["L"], self._pairs["S"]
        # Rows are aligned for wide loads.
        pitch = -(-keys // 16) * 16
        most = min(max(_SCORES // (self.heads * pitch) // 64 * 64, 16), length)
        memory = best.new_empty(self.heads * most * pitch)
        for first in range(0, length, most):
            rows = min(most, length - first)
            scores = memory[: self.heads * rows * pitch].view(self.heads, rows, pitch)
            self.scores(scores, first)
            self.select(scores, first, key_mask, top, best)

    def scores(self, scores: Tensor, first: int) -> None:
        """Scores of the queries from `first` on, [B H, rows, S or a few more]."""
        rows, keys = scores.shape[1], self._pairs["S"]
        launch(
            score_kernel,
            lambda tiles: (-(-rows // tiles["BM"]) * -(-keys // tiles["BN"]) * self.heads,),
            SCORES[kind(self.q, self.k)],
            self.q,
            self.k,
            scores,
            *strides(self.q, self.k),
            pitch=scores.shape[2],
            first=first,
            rows=rows,
            **self._pairs,
            scale=self.scale,
            **self._size,
            **self._precise,
        )

    def select(self, scores: Tensor, first: int, key_mask: Tensor | None, top: Tensor, best: Tensor) -> None:
        """The largest of these scores."""
        rows, keys = scores.shape[1], self._pairs["S"]
        held = next((most for most in SELECT if keys <= most), max(SELECT))
        launch(
            select_kernel,
            (self.heads * rows,),
            SELECT[held],
            scores,
            key_mask,
            top,
            best,
            pitch=scores.shape[2],
            first=first,
            rows=rows,
            **self._pairs,
            kept=self._rows["kept"],
        )

    def outputs(self, top: Tensor, best: Tensor, out: Tensor, lse: Tensor) -> None:
        """Outputs, and log-sum-exps of the kept scores."""
        launch(
            attend_kernel,
            (lse.numel(),),
            KEPT[kind(self.v)],
            self.v,
            top,
            best,
            out,
            lse,
            *strides(self.v, out),
            **self._rows,
            **self._value,
        )

    def query_gradients(self, grad: Tensor, top: Tensor, lse: Tensor, delta: Tensor, dq: Tensor) -> None:
        """Gradients of the queries, and for each the product of its output and the output's gradient."""
        given = self.q, self.k, self.v, grad
        launch(
            queries_kernel,
            (lse.numel(),),
            KEPT[kind(self.q, self.v)],
            *given,
            top,
            lse,
            delta,
            dq,
            *strides(*given, dq),
            **self._rows,
            scale=self.scale,
            **self._size,
            **self._value,
        )

    def marks(self, top: Tensor) -> Tensor:
        """Which keys each query keeps, a bit for each in words of 32, [B, H, L, words]."""
        # As many as the widest tile of keys reads.
        words = -(-self._pairs["S"] // 64) * 2
        bits = top.new_empty(*top.shape[:3], words)
        launch(
            bits_kernel,
            lambda tiles: (bits[..., 0].numel() * -(-words // tiles["BW"]),),
            BITS,
            top,
            bits,
            kept=top.shape[3],
            words=words,
        )
        return bits

    def key_gradients(self, grad: Tensor, lse: Tensor, delta: Tensor, bits: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Gradients of the keys and values."""
        given = self.q, self.k, self.v, grad
        launch(
            keys_kernel,
            lambda tiles: (-(-self._pairs["S"] // tiles["BN"]) * self.heads,),
            KEYS[kind(self.q, self.v)],
            *given,
            lse,
            delta,
            bits,
            dk,
            dv,
            *strides(*given, dk, dv),
            **self._pairs,
            words=bits.shape[3],
            scale=self.scale,
            **self._size,
            **self._value,
            **self._precise,
        )
