"""Observe how many bytes a forward pass holds at each moment, without computing it."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(frozen=True)
class Moment:
    """Bytes held at one moment of a forward pass; linear in the number of positions.

    Attributes:
        fixed: Bytes that are independent of the length.
        per_position: Bytes per position.
    """

    fixed: float
    per_position: float

    def bytes(self, length: int) -> float:
        """Bytes held if the input has `length` positions."""
        return self.fixed + self.per_position * length

    @classmethod
    def through(cls, lengths: tuple[int, int], held: tuple[int, int]) -> "Moment":
        """The moment that holds these bytes at these two lengths."""
        slope = (held[1] - held[0]) / (lengths[1] - lengths[0])
        return cls(held[0] - slope * lengths[0], slope)


@dataclass(frozen=True)
class Footprint:
    """What a forward pass of one sequence holds beside the weights and its inputs, in the dtype of the model.

    Attributes:
        outside: The moments outside attention that may be its peak.
        layers: What is held when each self-attention layer begins, with its output.
    """

    outside: tuple[Moment, ...]
    layers: tuple[Moment, ...]

    def peak(self, length: int, needed: Iterable[int]) -> int:
        """The most bytes held at once.

        Args:
            length: Positions of the sequence.
            needed: Temporaries of each self-attention layer in bytes.
        """
        within = (layer.bytes(length) + bytes for layer, bytes in zip(self.layers, needed, strict=True))
        return round(max([*(moment.bytes(length) for moment in self.outside), *within]))


class Held(TorchDispatchMode):
    """While active, follows how many bytes the tensors occupy that were created since, also on the meta device.

    Attributes:
        now: Bytes at present.
        moments: Bytes after each allocation.
        draws: Whether random numbers were drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.draws = False
        self.moments: list[int] = []
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags  # type: ignore[attr-defined]  # every operator has tags
        before = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in before and storage._cdata not in self._alive:
                self._hold(storage)
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def released(_: Any) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, released)
        self.now += size
        self.moments.append(self.now)


def _storages(values: Any) -> Iterable[torch.UntypedStorage]:
    return (value.untyped_storage() for value in tree_iter(values) if isinstance(value, Tensor))


def observed(lengths: tuple[int, int], shorter: Sequence[int], longer: Sequence[int]) -> Iterator[Moment]:
    """The moments of two runs; those of the longer one, as proportional to its length, if an operation more sets them apart."""
    if len(shorter) != len(longer):
        return (Moment(0, held / lengths[1]) for held in longer)
    return (Moment.through(lengths, held) for held in zip(shorter, longer, strict=True))


def highest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Those moments that no other one exceeds at every length."""
    kept: list[Moment] = []
    for moment in sorted(set(moments), key=lambda one: (one.per_position, one.fixed), reverse=True):
        if not kept or moment.fixed > kept[-1].fixed:
            kept.append(moment)
    return tuple(kept)
