"""How the kernels of exact top-k attention are launched, and cut for what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from approx_kernels.gpu.language import Configuration, first_that_fits
from approx_kernels.ops.flash.triton import ENDLESS
from approx_kernels.ops.lsh.triton_tokens import strides
from approx_kernels.ops.topk.triton_choice import score_kernel, select_kernel
from approx_kernels.ops.topk.triton_kept import attend_kernel, bits_kernel, keys_kernel, queries_kernel

# Scores that exist at a time: about what a card's cache holds.
_SCORES = 2**24


def _cut(warps: int, stages: int, **tiles: int) -> Configuration:
    return Configuration(tiles, warps, stages)


# By what they are given, see `_kind`; all of them fit the smallest card.
SCORES = {
    "narrow": (_cut(8, 1, BM=64, BN=64),),
    "wide": (_cut(8, 1, BM=64, BN=64),),
    "float32": (_cut(8, 1, BM=32, BN=32),),
    "float32 wide": (_cut(8, 1, BM=32, BN=32),),
}
KEYS = {
    "narrow": (_cut(8, 2, BM=64, BN=64),),
    "wide": (_cut(8, 2, BM=32, BN=64),),
    "float32": (_cut(8, 1, BM=16, BN=32),),
    "float32 wide": (_cut(8, 1, BM=16, BN=32),),
}
# One query each, of which many are beside each other on a card.
KEPT = {"narrow": (_cut(2, 1, BK=32),), "wide": (_cut(4, 1, BK=32),)}
BITS = (_cut(2, 1, BW=32, BK=32),)
# Scores of a row that stay in registers, all of them but for more keys than the last has.
SELECT = {
    1024: (_cut(2, 1, BS=1024, BW=256),),
    4096: (_cut(8, 1, BS=4096, BW=1024),),
    16384: (_cut(16, 1, BS=16384, BW=1024),),
}


class Launches:
    """The kernels of one forward or backward pass; what they are given is described in `topk_forward`."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, kept: int, causal: bool, scale: float) -> None:
        batch, heads, length, size = q.shape
        self.q, self.k, self.v, self.heads, self.scale = q, k, v, batch * heads, scale
        self._pairs = {
            "H": heads, "L": length, "S": k.shape[2], "shift": k.shape[2] - length if causal else ENDLESS
        }  # fmt: skip
        self._rows = {"H": heads, "L": length, "kept": kept}
        self._value = {"E": v.shape[3], "WIDE_E": _power(v.shape[3])}
        self._size = {"D": size, "WIDE_D": _power(size)}
        # float32 is what was asked for, not the tensor cores' 10 bits of it.
        self._precise = {"PRECISION": "ieee" if q.dtype == torch.float32 else "tf32"}

    def choose(self, key_mask: Tensor | None, top: Tensor, best: Tensor) -> None:
        """Write the largest scores of each query and whose they are, for some queries of all heads after others."""
        length, keys = self._pairs["L"], self._pairs["S"]
        # Rows begin where wide loads may.
        pitch = -(-keys // 16) * 16
        most = min(max(_SCORES // (self.heads * pitch) // 64 * 64, 16), length)
        memory = best.new_empty(self.heads * most * pitch)
        for first in range(0, length, most):
            rows = min(most, length - first)
            scores = memory[: self.heads * rows * pitch].view(self.heads, rows, pitch)
            self.scores(scores, first)
            self.select(scores, first, key_mask, top, best)

    def scores(self, scores: Tensor, first: int) -> None:
        """Those of the queries from `first` on, [B H, rows, S or a few more]."""
        rows, keys = scores.shape[1], self._pairs["S"]

        def run(cut: Configuration) -> None:
            tiles = -(-rows // cut.tiles["BM"]) * -(-keys // cut.tiles["BN"])
            score_kernel[(tiles * self.heads,)](
                self.q, self.k, scores, *strides(self.q, self.k), pitch=scores.shape[2], first=first, rows=rows,
                **self._pairs, scale=self.scale, **self._size, **self._precise, **cut.options,
            )  # fmt: skip

        self._first_that_fits(run, SCORES[_kind(self.q, self.k)], "scores")

    def select(self, scores: Tensor, first: int, key_mask: Tensor | None, top: Tensor, best: Tensor) -> None:
        """The largest of these."""
        rows, keys = scores.shape[1], self._pairs["S"]

        def run(cut: Configuration) -> None:
            select_kernel[(self.heads * rows,)](
                scores, key_mask, top, best, pitch=scores.shape[2], first=first, rows=rows, **self._pairs,
                kept=self._rows["kept"], **cut.options,
            )  # fmt: skip

        held = next((most for most in SELECT if keys <= most), max(SELECT))
        self._first_that_fits(run, SELECT[held], f"choice from {held}")

    def outputs(self, top: Tensor, best: Tensor, out: Tensor, lse: Tensor) -> None:
        """Outputs, and log-sum-exps of what is kept."""

        def run(cut: Configuration) -> None:
            attend_kernel[(lse.numel(),)](
                self.v, top, best, out, lse, *strides(self.v, out), **self._rows, **self._value, **cut.options
            )

        self._first_that_fits(run, KEPT[_width(self.v)], "outputs")

    def query_gradients(self, grad: Tensor, top: Tensor, lse: Tensor, delta: Tensor, dq: Tensor) -> None:
        """Those of the queries, and of each its output times the gradient of that."""

        def run(cut: Configuration) -> None:
            given = self.q, self.k, self.v, grad
            queries_kernel[(lse.numel(),)](
                *given, top, lse, delta, dq, *strides(*given, dq), **self._rows, scale=self.scale,
                **self._size, **self._value, **cut.options,
            )  # fmt: skip

        self._first_that_fits(run, KEPT[_width(self.q, self.v)], "queries")

    def marks(self, top: Tensor) -> Tensor:
        """Which keys each query keeps, a bit for each in words of 32, [B, H, L, words]."""
        # As many as the widest tile of keys reads.
        words = -(-self._pairs["S"] // 64) * 2
        bits = top.new_empty(*top.shape[:3], words)

        def run(cut: Configuration) -> None:
            programs = bits[..., 0].numel() * -(-words // cut.tiles["BW"])
            bits_kernel[(programs,)](top, bits, kept=top.shape[3], words=words, **cut.options)

        self._first_that_fits(run, BITS, "bits")
        return bits

    def key_gradients(self, grad: Tensor, lse: Tensor, delta: Tensor, bits: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Those of the keys and values."""

        def run(cut: Configuration) -> None:
            given = self.q, self.k, self.v, grad
            keys_kernel[(-(-self._pairs["S"] // cut.tiles["BN"]) * self.heads,)](
                *given, lse, delta, bits, dk, dv, *strides(*given, dk, dv), **self._pairs, words=bits.shape[3],
                scale=self.scale, **self._size, **self._value, **self._precise, **cut.options,
            )  # fmt: skip

        self._first_that_fits(run, KEYS[_kind(self.q, self.v)], "keys")

    def _first_that_fits(self, run: Callable[[Configuration], None], cuts: Sequence[Configuration], name: str) -> None:
        what = f"topk {name}, {self.q.dtype}, {self._size['D']}, {self._value['E']}"
        first_that_fits(run, cuts, what, self.q.device)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _width(*tensors: Tensor) -> str:
    return "wide" if max(x.shape[3] for x in tensors) > 64 else "narrow"


def _kind(*tensors: Tensor) -> str:
    """Which of the configurations are for such products."""
    width = _width(*tensors)
    if tensors[0].dtype == torch.float32:
        return "float32 wide" if width == "wide" else "float32"
    return width
