"""What every model of a comparison reads: each example tokenised once, checked, and put into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from approx.errors import ApproxError, Exit
from approx.tasks.task import Encoding, Example, Split, Task

# So many examples show whether two tokenizers are the same; a different one hardly survives the first.
_TOKENIZER_PROBES = 16
# A batch of any size: large enough to keep a machine busy, small enough for most memories.
_TOKENS_A_BATCH = 16_384


@dataclass(frozen=True)
class Subject:
    """What is measured: a model with a task head, and the tokenizer or feature extractor stored with it.

    Args:
        name: As the record calls it: `exact`, `improved-clustered 25`.
        model: A transformers model.
        processor: Its tokenizer.
        identity: A hash of all that its outputs depend on: weights, plan, dtype, code. None keeps no outputs.
        reseeded: The same with every seed of what it draws raised by a number, as long as the context lasts; None where it
            draws nothing.
        approximates: Whether it computes anything but exact attention on an input of so many positions (the first number) in
            a batch whose longest input has so many (the second); None for a model that is not converted.
    """

    name: str
    model: Any
    processor: Any
    identity: str | None = None
    reseeded: Callable[[int], AbstractContextManager[Subject]] | None = None
    approximates: Callable[[int, int], bool] | None = None


@dataclass(frozen=True)
class Prepared:
    """A split as every model of a comparison reads it.

    Args:
        split: The examples.
        encodings: One an example, or several where it is read in windows, without padding, in the order of the examples.
        owners: Example of each encoding.
        lengths: Tokens of each example, over all of its windows.
        truncated: How many examples were cut.
        batches: Encodings of each batch; those of like length stand together, the longest first.
    """

    split: Split
    encodings: list[Encoding]
    owners: list[int]
    lengths: list[int]
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
        subjects: The models; the first one's tokenizer is used for all.
        task: Encodes.
        split: At least one example.
        batch_size: Inputs a batch; None takes as many as hold about 16,384 tokens.
        max_length: Read no more tokens than this.
        truncate: Cut longer inputs and count them, instead of refusing.

    Raises:
        ApproxError: if tokenizers differ, an input is empty or too long, or a token is not in a vocabulary.
    """
    if batch_size is not None and batch_size < 1:
        raise ApproxError(f"--batch-size {batch_size} asked for; it must be at least 1.")
    if not split.examples:
        raise ApproxError(f"{task.name}: 0 rows after filtering.", Exit.UNAVAILABLE)
    processor = subjects[0].processor
    if processor is None:
        raise ApproxError(
            f"{subjects[0].name} has no tokenizer beside its weights, which {task.name} needs. "
            "Put the tokenizer's files into its folder.",
            Exit.UNAVAILABLE,
        )
    _check_tokenizers(subjects, task, split.examples[:_TOKENIZER_PROBES])
    limit, remedy = _limit(subjects, max_length)
    encoded = [task.encode(example, processor, limit if task.windowed else None) for example in split.examples]
    longest = [max(map(task.tokens, windows), default=0) for windows in encoded]
    long = [row for row, length in enumerate(longest) if limit and length > limit]
    if long and not truncate:
        worst = max(long, key=longest.__getitem__)
        length = longest[worst]
        raise ApproxError(
            f"{len(long)} of {len(encoded)} examples of {task.name} are too long: {split.examples[worst].id} has "
            f"{length} tokens, the limit is {limit} {remedy.format(length=length)}, "
            "or give --truncate to cut and count such examples."
        )
    for row in long:
        encoded[row] = task.encode(split.examples[row], processor, limit)
    lengths = [sum(map(task.tokens, windows)) for windows in encoded]
    for example, length in zip(split.examples, lengths, strict=True):
        if not length:
            raise ApproxError(f"{example.id} has no tokens: its text is empty.", Exit.UNAVAILABLE)
    owners = [row for row, windows in enumerate(encoded) for _ in windows]
    encodings = [window for windows in encoded for window in windows]
    _check_tokens(subjects, split.examples, encodings, owners)
    # The longest first, so that memory ends in the first batch or not at all.
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
    return Prepared(split, encodings, owners, lengths, len(long), batches)


def _company(asked: int | None, row: int) -> int:
    # A number that no other row has.
    return -1 - row if asked is None else asked


def _check_tokenizers(subjects: Sequence[Subject], task: Task, probes: Sequence[Example]) -> None:
    base = subjects[0]
    for other in subjects[1:]:
        if other.processor is base.processor:
            continue
        for example in probes:
            if task.encode(example, other.processor) != task.encode(example, base.processor):
                raise ApproxError(
                    f"{other.name} and {base.name} read different tokens for {example.id}: their tokenizers differ. "
                    "Compare a converted checkpoint with the base it was made from.",
                )


def _check_tokens(
    subjects: Sequence[Subject], examples: Sequence[Example], encodings: Sequence[Encoding], owners: Sequence[int]
) -> None:
    highest, row = max((max(encoding.get("input_ids", [-1])), row) for row, encoding in enumerate(encodings))
    for subject in subjects:
        vocabulary = getattr(subject.model.config, "vocab_size", None)
        if vocabulary is not None and highest >= vocabulary:
            raise ApproxError(
                f"{examples[owners[row]].id} has token {highest}, but {subject.name} knows the tokens 0-{vocabulary - 1}: "
                "the tokenizer beside it belongs to another model. Put the model's own tokenizer there.",
                Exit.UNAVAILABLE,
            )


def _limit(subjects: Sequence[Subject], max_length: int | None) -> tuple[int | None, str]:
    """Return the most tokens that all may read, None without a limit, and what to do about longer inputs."""
    limits = [
        (positions, f"(the positions of {subject.name}). Convert with --max-length {{length}} to extend them")
        for subject in subjects
        if (positions := _positions(subject.model))
    ]
    if max_length is not None:
        limits.append((max_length, "(--max-length). Leave it out"))
    return min(limits, default=(None, ""))


def _positions(model: Any) -> int | None:
    """Return how many tokens a model reads; None where nothing limits them."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            # RoBERTa counts positions from the row after the padding token's.
            return positions - module.padding_idx - 1
    return positions
