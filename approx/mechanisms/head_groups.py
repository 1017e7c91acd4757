"""Several mechanisms in one layer, each for some of its heads."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from approx.mechanisms.mechanism import Mechanism, latest
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.tokens.grouped import as_index, heads_of


class HeadGroups(Mechanism):
    """Split the heads of a layer into groups, each with its own mechanism, and join the outputs in the order of the heads.

    A plan builds it from rules that name heads; a rule cannot name it. In each call, a group whose `exact_below`
    exceeds the number of keys runs exact attention. Calibration, penalties and the like go to the groups' mechanisms,
    which are modules too.

    Args:
        groups: Pairs of head numbers and a mechanism for that many heads; each head of the layer is in
            exactly one of them.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[int], Mechanism]]) -> None:
        first = groups[0][1]
        order = [head for heads, _ in groups for head in heads]
        super().__init__(len(order), first.head_dim, causal=first.causal, scale=first.scale)
        self.groups = nn.ModuleList(mechanism for _, mechanism in groups)
        self._parts = [as_index(heads) for heads, _ in groups]
        self._back = None if order == sorted(order) else [order.index(head) for head in range(len(order))]
        # Below every limit the whole layer is exact.
        self.exact_below = min(mechanism.exact_below for _, mechanism in groups)

    @property
    def supports_decode(self) -> bool:
        """Whether every group does."""
        return all(mechanism.supports_decode for _, mechanism in self.members())

    @property
    def decode_state(self) -> str:
        """Bounded if every group's is; otherwise all groups read the cache that one of them needs."""
        states = {mechanism.decode_state for _, mechanism in self.members()}
        return next(state for state in ("cache", "ring", "recurrent") if state in states)

    @property
    def sparse(self) -> bool:
        """Whether any group is."""
        return any(mechanism.sparse for _, mechanism in self.members())

    @property
    def reads_tokens(self) -> bool:
        """Whether any group does."""
        return any(mechanism.reads_tokens for _, mechanism in self.members())

    def members(self) -> Iterator[tuple[slice | list[int], Mechanism]]:
        """The heads of each group, as an index, and its mechanism."""
        yield from zip(self._parts, self.groups, strict=True)  # type: ignore[misc]  # a ModuleList is typed as holding any modules

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        **tokens: Tensor,
    ) -> Tensor:
        """Attend; each mechanism applies dropout in its own way."""
        outputs = []
        for heads, mechanism in self.members():
            own = heads_of(q, k, heads)
            parts = q[:, heads], k[:, own], v[:, own]
            if k.shape[-2] < mechanism.exact_below:
                out = exact_attention(*parts, key_mask, causal=self.causal, scale=self.scale, dropout=dropout)
            else:
                more = tokens if mechanism.reads_tokens else {}
                out = mechanism(*parts, key_mask, dropout=dropout, **more)
            outputs.append(out)
        return self._joined(outputs)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from one state that holds those of all groups: each tensor's name begins with its group's number."""
        outputs, after = [], {}
        for number, (heads, mechanism) in enumerate(self.members()):
            own, group = f"{number}.", None
            if state is not None:
                group = {name.removeprefix(own): x for name, x in state.items() if name.startswith(own)}
            of_keys = heads_of(q, k, heads)
            out, group = mechanism.decode(q[:, heads], k[:, of_keys], v[:, of_keys], key_mask, group)
            outputs.append(out)
            after |= {own + name: x for name, x in group.items()}
        return self._joined(outputs), after

    def approximates_from(self) -> int | None:
        """The value of the group that stays exact the longest."""
        return latest(mechanism.approximates_from() for _, mechanism in self.members())

    def differs_from(self) -> int | None:
        """The value of the group that differs first."""
        return min(filter(None, (mechanism.differs_from() for _, mechanism in self.members())), default=None)

    def flops(self, length: int) -> int:
        """The sum over the groups."""
        return sum(mechanism.flops(length) for _, mechanism in self.members())

    def memory(self, length: int) -> int:
        """The largest of the groups, which attend one after the other, and their outputs before they are joined."""
        largest = max(mechanism.memory(length) for _, mechanism in self.members())
        return largest + 4 * self.heads * length * self.head_dim

    def extra_repr(self) -> str:
        """The heads of each group, in their order."""
        return f"heads={[list(range(self.heads))[p] if isinstance(p, slice) else p for p in self._parts]}"

    def _joined(self, parts: list[Tensor]) -> Tensor:
        joined = torch.cat(parts, 1)
        return joined if self._back is None else joined[:, self._back]
