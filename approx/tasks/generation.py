"""Tasks whose answer a decoder writes token by token, as `generate` does, after a prompt without padding."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from approx.errors import ApproxError, Exit
from approx.tasks.generated import LONGEST, Generated
from approx.tasks.head import CAUSAL_LANGUAGE_MODELLING, Head
from approx.tasks.language import check_causal
from approx.tasks.settings import whole_setting
from approx.tasks.task import Encoding, Example, Groups, Task


@dataclass(frozen=True)
class Reader:
    """The tokenizer that turns what a model writes into text; it is not part of what encodings are compared by."""

    tokenizer: Any = field(compare=False, repr=False)


class Generation(Task):
    """A task whose predictions a causal model writes: greedy decoding with its cache, of prompts of one length at a time."""

    head: ClassVar[Head] = CAUSAL_LANGUAGE_MODELLING
    groups: ClassVar[Groups] = Groups(None, "each prompt is read by itself")
    measures = "generation"

    def check(self, model: Any) -> None:
        """Raise if the model has no language-modelling head, or is not causal."""
        super().check(model)
        check_causal(self.name, model)

    def tokens(self, encoding: Encoding) -> int:
        """Tokens of the prompt and of what may follow it."""
        return len(encoding["input_ids"]) + encoding["new_tokens"]

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int:
        """Prompts of one length with the same end share a batch, so that nothing is padded."""
        return company_of(encoding)

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Prompts [B, L], with the number of new tokens and the tokens that end the text."""
        return prompts(encodings)

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        """The tokens that the model writes, [B, n]."""
        return written(model, batch)

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """Raise: the answers are for evaluation."""
        raise ApproxError(
            f"{self.name} is for evaluation, not for training. Train on another task or text.", Exit.UNSUPPORTED
        )

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The text after each prompt."""
        return texts(outputs, encodings)


def prompt(processor: Any, text: str, new_tokens: int, until: Sequence[str] = ()) -> Encoding:
    """A prompt as tokens, with the tokenizer's own special tokens in front.

    Args:
        processor: The tokenizer.
        text: The prompt.
        new_tokens: Most tokens that follow it.
        until: Texts that end the answer; a token that holds one is the last.
    """
    framed = processor(text, return_special_tokens_mask=True, verbose=False)
    ids, special = framed["input_ids"], framed["special_tokens_mask"]
    while ids and special[-1]:
        # Nothing would follow a token that ends a text.
        ids, special = ids[:-1], special[:-1]
    return {
        "input_ids": ids,
        "new_tokens": new_tokens,
        "stops": list(_stops(processor, tuple(until))),
        "until": list(until),
        "reader": Reader(processor),
    }


@functools.lru_cache(maxsize=8)
def _stops(processor: Any, until: tuple[str, ...]) -> tuple[int, ...]:
    """The tokens that end a text: the tokenizer's own, and those that hold one of some texts."""
    holding = (token for token in range(len(processor)) if any(text in processor.decode([token]) for text in until))
    ends = {*(holding if until else ()), processor.eos_token_id}
    return tuple(sorted(token for token in ends if token is not None))


def company_of(encoding: Encoding) -> int:
    """A number of prompts that can share a batch without padding."""
    about = len(encoding["input_ids"]), encoding["new_tokens"], encoding["stops"]
    return zlib.crc32(repr(about).encode())


def prompts(encodings: Sequence[Encoding]) -> dict[str, Any]:
    """Prompts of one length, [B, L], for `written`."""
    import torch

    ids = torch.tensor([one["input_ids"] for one in encodings])
    first = encodings[0]
    ends = {"new_tokens": torch.tensor(first["new_tokens"]), "stops": torch.tensor(first["stops"], dtype=torch.long)}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **ends}


def written(model: Any, batch: dict[str, Any], *, exactly: bool = False) -> Any:
    """The likeliest tokens, one after the other, that a model writes after prompts, [B, n].

    Args:
        model: A decoder.
        batch: As from `prompts`.
        exactly: Whether to write all new tokens, whatever they are.
    """
    count, stops = int(batch["new_tokens"]), batch["stops"].tolist()
    ids = batch["input_ids"]
    ways: dict[str, Any] = {"min_new_tokens": count} if exactly else {"eos_token_id": stops or None}
    out = model.generate(
        ids,
        attention_mask=batch["attention_mask"],
        max_new_tokens=count,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=stops[0] if stops else 0,
        **ways,
    )
    return out[:, ids.shape[1] :]


def texts(outputs: Any, encodings: Sequence[Encoding]) -> list[str]:
    """What a model wrote, [B, n], as text up to the first token or text that ends it."""
    made = []
    for row, one in zip(outputs.tolist(), encodings, strict=True):
        end = next((place + 1 for place, token in enumerate(row) if token in one["stops"]), len(row))
        text = one["reader"].tokenizer.decode(row[:end], skip_special_tokens=True)
        made.append(text[: min((place for stop in one["until"] if (place := text.find(stop)) >= 0), default=None)])
    return made


_FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_DIGITS = 5
# Tokens that the answer may take: a space, the digits, and one more.
_ANSWER = _DIGITS + 3
_SHORTEST = 96


class Passkey(Generated, Generation):
    """A number hidden in a long text of filler, which a decoder writes when it is asked for it at the end.

    The text is as long as `length` allows, and the number lies at one of `depths` places, from the beginning to the end in
    turns; it counts only if the model writes all its digits. A model whose likelihood hardly changes can still fail here.

    Source: Mohtashami and Jaggi, 2023, "Landmark Attention", arXiv 2305.16300.

    Args:
        length: Most tokens of a text with its answer, by the checkpoint's tokenizer.
        depths: Places of the number, evenly spaced.
        examples: Rows of a split.
        seed: Seed of all rows, together with the split and the number of the row.

    Raises:
        ApproxError: if a setting is not a whole number or is out of range.
    """

    name = "passkey"
    metrics = ("accuracy",)
    sliced_by: ClassVar[str] = "depth, %"

    def __init__(self, length: int = 1024, depths: int = 5, examples: int = 100, seed: int = 0) -> None:
        self.length = whole_setting(self.name, "length", length, _SHORTEST, LONGEST)
        self.depths = whole_setting(self.name, "depths", depths, 1, 100)
        self.size = whole_setting(self.name, "examples", examples, 1)
        self.seed = whole_setting(self.name, "seed", seed, 0)

    def example(self, split: str, row: int, random: np.random.Generator) -> Example:
        """A number and its depth; the label says both."""
        depth = round(100 * (row % self.depths) / max(self.depths - 1, 1))
        number = "".join(map(str, random.integers(10, size=_DIGITS)))
        name = f"passkey/{split}/{self.length}-{self.depths}-{self.seed}/{row}"
        return Example(name, {"number": number, "depth": depth}, f"{number} at {depth} %")

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """The prompt, as long as `length` allows.

        Raises:
            ApproxError: if it would be truncated.
        """
        if max_length is not None and max_length < self.length:
            raise ApproxError(
                f"{self.name} has texts of {self.length} tokens, but the limit is {max_length}, and a truncated one may "
                f"lack its number. Set 'length' to {max_length} or less."
            )
        number, depth = example.inputs["number"], example.inputs["depth"]

        def made(sentences: int) -> Encoding:
            filler = [_FILLER[index % len(_FILLER)] for index in range(sentences)]
            filler.insert(round(sentences * depth / 100), f"The pass key is {number}. Remember it.")
            before = "There is a pass key hidden in a long text. Find it and remember it."
            return prompt(processor, f"{before} {' '.join(filler)} What is the pass key? The pass key is", _ANSWER)

        # The longest that fits, by bisection: tokens grow with sentences.
        low, high = 0, self.length
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.tokens(made(middle)) <= self.length else (low, middle - 1)
        return [made(low) | {"depth": depth}]

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The number that the model writes, and the depth of the right one; only the first digits count."""
        answers = ("".join(text.split())[:_DIGITS] for text in texts(outputs, encodings))
        return [f"{answer} at {one['depth']} %" for answer, one in zip(answers, encodings, strict=True)]

    def slices(
        self, labels: Sequence[Any], lengths: Sequence[int], predictions: Sequence[Any]
    ) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
        """Slice by depth, in percent of the text before the number."""
        depths = [int(label.split()[2]) for label in labels]
        places = sorted(set(depths))
        for start, end in zip(places, [*places[1:], 101], strict=True):
            rows = [row for row, depth in enumerate(depths) if depth == start]
            yield start, end, [predictions[row] for row in rows], [labels[row] for row in rows]
