"""Block attention: exact softmax attention inside blocks of tokens."""

from typing import Any, ClassVar, Literal

from approx.mechanisms.mechanism import checked, whole_number
from approx.mechanisms.sparse import SparsePattern
from approx_kernels.ops.patterns.reference import Blocks


class BlockAttention(SparsePattern):
    """Softmax attention inside blocks and to neighbouring blocks, in O(n (2 neighbours + 1) size D).

    Blocks count the real tokens of a sample. Without neighbours no information passes between blocks, unless the
    shift alternates.

    Source: Qiu et al., 2019, Blockwise Self-Attention for Long Document Understanding, arXiv 1911.02972; departs
    from it in using the same blocks for all heads.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        size: Tokens of a block, 1 or more.
        neighbours: Blocks seen on each side of a query's own, 0 or more; only on the left when causal.
        shift: Tokens by which the first block is shorter, from 0 to size - 1. A plan resolves `alternate` to 0 in the
            lowest layer, half a block in the next one, and so on; outside a plan it is 0.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    token_settings: ClassVar[tuple[str, ...]] = ("size", "shift")
    examples: ClassVar[dict[str, dict[str, Any]]] = {"": {"size": 5, "shift": 2}}
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
    source: ClassVar[str] = (
        "Qiu et al. 2019, Blockwise Self-Attention for Long Document Understanding, arXiv 1911.02972"
    )
    exact_when: ClassVar[str] = "size >= the number of real tokens of the sample and shift = 0."

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        size: int = 128,
        neighbours: int = 0,
        shift: int | Literal["alternate"] = "alternate",
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.size = whole_number("size", size, 1)
        self.neighbours = whole_number("neighbours", neighbours, 0)
        allowed = f"alternate, or a whole number from 0 to {self.size - 1}"
        words = isinstance(shift, str)
        self.shift = (
            checked("shift", shift, shift == "alternate", allowed)
            if words
            else whole_number("shift", shift, 0, self.size - 1)
        )

    def over(self, length: int) -> Blocks:
        """Blocks and their neighbours."""
        shift = 0 if isinstance(self.shift, str) else self.shift
        return Blocks(self.causal, size=self.size, neighbours=self.neighbours, shift=shift)

    @classmethod
    def for_layer(cls, settings: dict[str, Any], rank: int) -> dict[str, Any]:
        """Shift every other layer by half a block, if the shift alternates."""
        if settings.get("shift", cls.defaults()["shift"]) != "alternate":
            return settings
        return settings | {"shift": settings.get("size", cls.defaults()["size"]) // 2 if rank % 2 else 0}

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """One block for the whole sequence."""
        return {"size": max(length, 1), "shift": 0}

    def approximates_from(self) -> int:
        """One token beyond the last block that the first block sees."""
        return self.size * (1 + self.neighbours) - (0 if isinstance(self.shift, str) else self.shift) + 1

    def flops(self, length: int) -> int:
        """Two products over the pairs of whole blocks, computed even where the causal mask hides them."""
        return 4 * self.heads * length * self._keys(length) * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the blocks before joining, and the mask of one block."""
        mask = min(self.size, length) * self._keys(length) if self.causal else 0
        return 4 * self.heads * length * self.head_dim + mask

    def _keys(self, length: int) -> int:
        return min(self.size * (1 + self.neighbours * (1 if self.causal else 2)), length)
