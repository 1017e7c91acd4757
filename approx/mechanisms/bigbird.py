"""BigBird attention: neighbouring, global and random blocks."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from approx.mechanisms.mechanism import seed_number, true_or_false, whole_number
from approx.mechanisms.sparse import SparsePattern
from approx_kernels.ops.patterns.reference import Listed, bigbird_lists, draw_blocks


class BigBirdAttention(SparsePattern):
    """Softmax attention to neighbouring blocks, the first, the last and random ones, in O(n (5 + r) block D).

    The first and the last block see everything. The random blocks are drawn once, from the seed, and are the same in
    training and evaluation and for all heads of a layer; different seeds give layers different blocks. Blocks count
    the real tokens of a sample; the last one may be partial.

    Hugging Face's BigBird draws random blocks in training only; in evaluation mode all r of them repeat the first
    block, which counts 1 + r times for all queries outside the first and the last block. Set `compatible` to reproduce
    the outputs of weights trained there. Two differences remain: there, inputs of at most 5 + 2r blocks are exact (set
    `exact_below` for that), and the last block is that of the longest sample, padding included.

    Source: Zaheer et al., 2020, Big Bird: Transformers for Longer Sequences, arXiv 2007.14062; departs from it in
    using the same random blocks for all heads.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Must be false: every query sees the last block.
        scale: Factor of the scores.
        block: Tokens of a block, 1 or more.
        random: Random blocks per block, r, 0 or more.
        compatible: Whether to attend as Hugging Face's BigBird does in evaluation mode.
        seed: Seed of the random blocks, which are a buffer and saved with the checkpoint.

    Raises:
        ApproxError: if `causal` is true or a setting is wrong.
    """

    supports_causal: ClassVar[bool] = False
    supports_decode: ClassVar[bool] = False
    token_settings: ClassVar[tuple[str, ...]] = ("block",)
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"draws": (0, 2**31 - 1)}
    examples: ClassVar[dict[str, dict[str, Any]]] = {
        "": {"block": 3, "random": 1},
        "compatible": {"block": 3, "random": 2, "compatible": True},
    }
    searched: ClassVar[Literal["always", "healed", "named"]] = "always"
    source: ClassVar[str] = "Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences, arXiv 2007.14062"
    exact_when: ClassVar[str] = (
        "2 blocks hold the real tokens of the sample; without `compatible` also 3, or as many as there are random blocks."
    )

    draws: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        block: int = 64,
        random: int = 3,
        compatible: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.block = whole_number("block", block, 1)
        self.random = whole_number("random", random, 0)
        self.compatible = true_or_false("compatible", compatible)
        self.seed = seed_number(seed)
        self.register_buffer("draws", draw_blocks(self.random, self.seed))

    def redraw(self, seed: int) -> None:
        """Draw new random blocks; nothing else redraws them."""
        self.seed = seed_number(seed)
        self.draws.copy_(draw_blocks(self.random, self.seed))

    def over(self, length: int) -> Listed:
        """Blocks and their lists."""
        return Listed(size=self.block, lists=bigbird_lists(-(-length // self.block), self.draws, self.compatible))

    @classmethod
    def exact_settings(cls, length: int) -> dict[str, Any]:
        """One block for the whole sequence."""
        return {"block": max(length, 1)}

    def approximates_from(self) -> int:
        """One block more than the second block sees; with `compatible` a block between the first and the last."""
        seen = 2 if self.compatible and self.random else 4 + self.random
        return seen * self.block + 1

    def flops(self, length: int) -> int:
        """Two products over the pairs of the listed blocks, and over all keys for the first and the last block."""
        listed = length * min((5 + self.random) * self.block, length)
        ends = 2 * self.block * max(length - (5 + self.random) * self.block, 0)
        return 4 * self.heads * (listed + ends) * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs of the blocks before joining, and the keys and values of one block."""
        keys = min((5 + self.random) * self.block, length)
        return 4 * self.heads * (length + 2 * keys) * self.head_dim
