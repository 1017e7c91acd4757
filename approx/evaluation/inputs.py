"""The inputs of a comparison: each example tokenised once, checked and batched for all models.

Also computes the share of attention that is approximated on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from torch import nn

from approx.errors import ApproxError, Exit
from approx.evaluation.record import Approximated
from approx.tasks.task import Encoding, Example, Split, Task

# Examples on which tokenizers are compared; different ones usually differ on the first.
_TOKENIZER_PROBES = 16
# Tokens of a batch of automatic size: large enough to keep a machine busy, small enough for most memories.
_TOKENS_A_BATCH = 16_384


@dataclass(frozen=True)
class Ablation:
    """The estimates of a model's attention, which may be switched off so that only its exact keys are left.

    Args:
        part: What they are called: `linear part`, `estimated part`.
        layers: Numbers of the layers that have one beside exact keys; empty if there is nothing to switch off.
        off: Context manager that yields the model with them switched off.
        why: Why there is nothing to switch off; empty if there is.
    """

    part: str
    layers: list[int]
    off: Callable[[], AbstractContextManager[Subject]]
    why: str = ""


@dataclass(frozen=True)
class Subject:
    """A model with a task head, and its tokenizer or feature extractor.

    Args:
        name: Its name in the record: `exact`, `improved-clustered 25`.
        model: A transformers model.
        processor: Its tokenizer or feature extractor.
        identity: Hash of everything its outputs depend on: weights, plan, dtype, code. With None, outputs are not
            stored.
        reseeded: Context manager that yields the model with every seed raised by a number; None if nothing in it is
            random.
        ablation: Its estimates, which may be switched off; None if nobody asked for that.
        approximates: (positions of an input, positions of the longest input of its batch) -> whether attention is
            approximated; None for a model that is not converted.
        approximated_pairs: The same -> the share of the pairs of tokens whose weight is not exact.
    """

    name: str
    model: Any
    processor: Any
    identity: str | None = None
    reseeded: Callable[[int], AbstractContextManager[Subject]] | None = None
    ablation: Ablation | None = None
    approximates: Callable[[int, int], bool] | None = None
    approximated_pairs: Callable[[int, int], float] | None = None


@dataclass(frozen=True)
class Prepared:
    """A split, tokenised for every model of a comparison.

    Args:
        split: The examples.
        encodings: One per example, or one per window of it, without padding, in the order of the examples.
        owners: Index of the example of each encoding.
        lengths: Tokens of the longest input of each example.
        windows: Most inputs that an example is read in.
        truncated: Number of truncated examples.
        batches: Indexes of the encodings of each batch, sorted by length, longest first; of a task that is read in order
            those that follow one another.
    """

    split: Split
    encodings: list[Encoding]
    owners: list[int]
    lengths: list[int]
    windows: int
    truncated: int
    batches: list[list[int]]


def prepare(
    subjects: Sequence[Subject],
    task: Task,
    split: Split,
    *,
    batch_size: int | None,
    max_length: int | None = None,
    truncate: bool = False,
) -> Prepared:
    """Tokenise every example once, check that every model can read it, and form the batches.

    Args:
        subjects: The models; all use the first one's tokenizer.
        task: Encodes the examples.
        split: At least one example.
        batch_size: Inputs per batch; None fills batches with about 16,384 tokens.
        max_length: Maximum number of tokens to read.
        truncate: Truncate longer inputs and count them, instead of raising.

    Raises:
        ApproxError: if tokenizers differ, an input is empty or too long, or a token is not in a vocabulary.
    """
    if batch_size is not None and batch_size < 1:
        raise ApproxError(f"--batch-size is {batch_size}; it must be at least 1.")
    if not split.examples:
        raise ApproxError(f"{task.name}: 0 rows after filtering.", Exit.UNAVAILABLE)
    processor = subjects[0].processor
    if processor is None:
        raise ApproxError(
            f"{subjects[0].name} has no tokenizer, which {task.name} needs. Put the tokenizer's files into its folder.",
            Exit.UNAVAILABLE,
        )
    _check_tokenizers(subjects, task, split.examples[:_TOKENIZER_PROBES])
    limit, remedy = _limit(subjects, max_length)
    encoded = [task.encode(example, processor, limit if task.windowed else None) for example in split.examples]
    longest = [max(map(task.tokens, windows), default=0) for windows in encoded]
    long = [row for row, length in enumerate(longest) if limit and length > limit]
    # --max-length is not lowered silently.
    if long and (not truncate or (max_length is not None and limit != max_length)):
        worst = max(long, key=longest.__getitem__)
        length = longest[worst]
        raise ApproxError(
            f"{len(long)} of {len(encoded)} examples of {task.name} are too long: {split.examples[worst].id} has "
            f"{length} tokens, the limit is {limit} {remedy.format(length=length)}, or truncate and count such "
            f"examples with {'--truncate' if max_length is None or limit == max_length else f'--max-length {limit}'}."
        )
    for row in long:
        encoded[row] = task.encode(split.examples[row], processor, limit)
    lengths = [max(map(task.tokens, windows), default=0) for windows in encoded]
    for example, length in zip(split.examples, lengths, strict=True):
        if not length:
            raise ApproxError(
                f"{example.id} has no tokens: its text is empty, or a single token that nothing comes before. Remove "
                "it.",
                Exit.UNAVAILABLE,
            )
    owners = [row for row, windows in enumerate(encoded) for _ in windows]
    encodings = [window for windows in encoded for window in windows]
    _check_tokens(subjects, split.examples, encodings, owners)
    if task.in_order:
        batches = _runs(task, encodings)
        return Prepared(split, encodings, owners, lengths, max(map(len, encoded)), len(long), batches)
    # Longest first, so that memory runs out in the first batch or not at all.
    company = [
        [_company(task.company(encoding, subject.processor, subject.model.config), row) for subject in subjects]
        for row, encoding in enumerate(encodings)
    ]
    rows = sorted(range(len(encodings)), key=lambda row: (-task.tokens(encodings[row]), company[row], row))
    batches = []
    for _, members in groupby(rows, company.__getitem__):
        waiting = list(members)
        while waiting:
            count = batch_size or max(1, _TOKENS_A_BATCH // task.tokens(encodings[waiting[0]]))
            batches.append(waiting[:count])
            waiting = waiting[count:]
    return Prepared(split, encodings, owners, lengths, max(map(len, encoded)), len(long), batches)


def _runs(task: Task, encodings: Sequence[Encoding]) -> list[list[int]]:
    """Indexes of the encodings that follow one another, for each text."""
    runs: list[list[int]] = []
    for row, encoding in enumerate(encodings):
        if row and task.follows(encoding, encodings[row - 1]):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _company(number: int | None, row: int) -> int:
    # Rows without company must not share a batch, so each gets a separate number.
    return -1 - row if number is None else number


def _check_tokenizers(subjects: Sequence[Subject], task: Task, probes: Sequence[Example]) -> None:
    base = subjects[0]
    for other in subjects[1:]:
        if other.processor is base.processor:
            continue
        for example in probes:
            if task.encode(example, other.processor) != task.encode(example, base.processor):
                raise ApproxError(
                    f"The tokenizers of {other.name} and {base.name} differ: they give different tokens for "
                    f"{example.id}. Compare a converted checkpoint with the base it was made from.",
                )


def _check_tokens(
    subjects: Sequence[Subject], examples: Sequence[Example], encodings: Sequence[Encoding], owners: Sequence[int]
) -> None:
    highest, row = max((max(encoding.get("input_ids", [-1])), row) for row, encoding in enumerate(encodings))
    for subject in subjects:
        vocabulary = getattr(subject.model.config.get_text_config(), "vocab_size", None)
        if vocabulary is not None and highest >= vocabulary:
            raise ApproxError(
                f"{examples[owners[row]].id} has token {highest}, but the vocabulary of {subject.name} is "
                f"0-{vocabulary - 1}: its tokenizer belongs to another model. Put the model's own tokenizer into its "
                "folder.",
                Exit.UNAVAILABLE,
            )


def _limit(subjects: Sequence[Subject], max_length: int | None) -> tuple[int | None, str]:
    """Return the longest input that all models accept (None if unlimited), and the remedy for longer ones."""
    limits = [
        (positions, f"(the positions of {subject.name}). {_remedy(subject, subjects)}")
        for subject in subjects
        if (positions := _positions(subject.model))
    ]
    if max_length is not None:
        limits.append((max_length, "(--max-length). Leave it out"))
    return min(limits, default=(None, ""))


def _remedy(subject: Subject, subjects: Sequence[Subject]) -> str:
    positions, most = _positions(subject.model), max(_positions(other.model) or 0 for other in subjects)
    if subject is subjects[0] and positions and positions < most:
        return f"Extend them to the {most} of what it is compared with by --extend-base"
    return "Convert with --max-length {length} to extend them"


def _positions(model: Any) -> int | None:
    """Return the maximum input length of a model; None if unlimited."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            # RoBERTa counts positions from the row after the padding token's.
            return positions - module.padding_idx - 1
    return positions


# Lengths at which pairs are counted; between them their share is interpolated.
_COUNTED = 32


@dataclass(frozen=True)
class Coverage:
    """The inputs on which one model approximates, and how much of them.

    Args:
        examples: Whether it approximates in any window of the example; one per example, in the order of the split.
        tokens: Share of all real tokens that are in such windows.
        pairs: Share of the pairs of tokens whose weight is not exact, averaged over the inputs; None if it is not
            known.
    """

    examples: list[bool]
    tokens: float
    pairs: float | None = None

    @property
    def counted(self) -> Approximated:
        """The entry of a record."""
        return Approximated(examples=sum(self.examples), tokens=self.tokens, pairs=self.pairs)


def coverage(subject: Subject, task: Task, prepared: Prepared) -> Coverage | None:
    """Compute from the lengths of the inputs on which of them a model approximates.

    The model does not run, so cached outputs give the same result. A batch halved for lack of memory counts as planned.

    Returns:
        The coverage; None for a model that is not converted.
    """
    if subject.approximates is None:
        return None
    positions = [task.positions(encoding, subject.model.config) for encoding in prepared.encodings]
    rows: list[int] = []
    sizes: list[tuple[int, int]] = []
    for batch in prepared.batches:
        widest = max(positions[row] for row in batch)
        rows += [row for row in batch if subject.approximates(positions[row], widest)]
        sizes += [(positions[row], widest) for row in batch]
    owners = {prepared.owners[row] for row in rows}
    return Coverage(
        [example in owners for example in range(len(prepared.lengths))],
        sum(positions[row] for row in rows) / sum(positions),
        None if subject.approximated_pairs is None else mean_pairs(subject, subject.approximated_pairs, sizes),
    )


def mean_pairs(subject: Subject, share: Callable[[int, int], float], sizes: list[tuple[int, int]]) -> float:
    """The share of approximated pairs, averaged over inputs.

    Args:
        subject: The model, which is exact where `approximates` says so.
        share: Its `approximated_pairs`.
        sizes: Positions of each input, and of the longest input of its batch.
    """
    assert subject.approximates is not None
    reached = [size for size in sizes if subject.approximates(*size)]
    if not reached:
        return 0.0
    lengths = np.unique([length for length, _ in reached])
    grid = lengths[np.unique(np.linspace(0, len(lengths) - 1, _COUNTED).round().astype(int))]
    # Where `exact_below` makes an input exact, that was decided above; a batch as wide as the input is not.
    widest = max(widest for _, widest in reached)
    counted = [share(int(length), widest) for length in grid]
    return float(np.interp([length for length, _ in reached], grid, counted).sum()) / len(sizes)
