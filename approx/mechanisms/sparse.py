"""What all sparse patterns share: attention, counts and drawings from one definition of what a query sees."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from approx.mechanisms.mechanism import Mechanism, checked, latest, one_of, whole_number
from approx_kernels.ops.patterns.api import pattern_attention
from approx_kernels.ops.patterns.reference import Pattern


class SparsePattern(Mechanism, abstract=True):
    """Softmax attention of each query to keys that positions alone decide, see `over`."""

    sparse: ClassVar[bool] = True
    compiles: ClassVar[str] = "Shapes depend on the number of real tokens."

    # The steps that the heads use in turn; None stands for all of them merged.
    _steps: tuple[int | None, ...] = (None,)

    @abstractmethod
    def over(self, length: int) -> Pattern:
        """The pattern of a sample of `length` real tokens."""
        raise NotImplementedError

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on the attention weights. Padded queries receive 0."""
        return pattern_attention(
            q, k, v, key_mask, pattern=self.over, steps=self._steps, scale=self.scale, dropout=dropout
        )

    def pattern(self, length: int) -> Tensor:
        """The pairs that it computes."""
        place = torch.arange(length)
        return self._seen(place[:, None], place, length)

    def approximated_pairs(self, length: int) -> float:
        """The share of pairs that the pattern leaves out, counted in at most 256 rows of queries."""
        i = torch.linspace(0, length - 1, min(length, 256)).round().long()[:, None]
        j = torch.arange(length)
        steps = self._seen(i, j, length)
        taken = [self._steps[head % len(self._steps)] for head in range(self.heads)]
        kept = [float((steps.any(0) if step is None else steps[step - 1]).sum()) for step in taken]
        return 1 - sum(kept) / self.heads / float((j <= i).sum() if self.causal else i.numel() * length)

    def _seen(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        """Whether the queries at i see the keys at j in each step, [steps, queries, keys]."""
        pattern = self.over(length)
        steps = [pattern.allowed(i, j, length, step).bool() for step in range(1, pattern.count + 1)]
        return torch.stack([pairs.expand(len(i), len(j)) for pairs in steps])


class SteppedPattern(SparsePattern, abstract=True):
    """A pattern of several steps, which heads or layers may take in turn; they are settings `mode` and `step`."""

    def _take(self, mode: Any, step: Any) -> None:
        """Check the settings and choose the steps.

        `mode` is `merged`; `heads`, where heads take turns; or `interleave`, where layers do: a layer on its own uses step 1.
        `step`, from 1, is one step for all heads.
        """
        count = self.over(1).count
        one_of("mode", mode, ("merged", "interleave", "heads"))
        self.mode, self.step = mode, step
        if step is not None:
            checked("mode", mode, mode != "heads", "'merged' or 'interleave' with a step, which all heads then use")
            self._steps = (whole_number("step", step, 1, count),)
        else:
            self._steps = {"merged": (None,), "interleave": (1,), "heads": tuple(range(1, count + 1))}[mode]

    @classmethod
    def for_layer(cls, settings: dict[str, Any], rank: int) -> dict[str, Any]:
        """With `mode: interleave`, step 1 in the lowest layer, step 2 in the next one, and so on."""
        own = settings.get("mode") == "interleave" and settings.get("step") is None
        count = 4 if settings.get("both_directions") else 2
        return settings | {"step": rank % count + 1} if own else settings

    def approximates_from(self) -> int | None:
        """The first token that some query does not see, for the step that stays exact the longest."""
        return latest(self._unseen_from(step) for step in self._steps[: self.heads])

    def differs_from(self) -> int | None:
        """The same for the step that differs first."""
        return min(filter(None, map(self._unseen_from, self._steps[: self.heads])), default=None)

    @abstractmethod
    def _unseen_from(self, step: int | None) -> int | None:
        """Fewest tokens at which a query does not see all in a step, or in all of them merged; None if there are none."""
        raise NotImplementedError
