"""Copying sequences: can a causal model repeat a sequence?

Source: Katharopoulos et al., 2020, "Transformers are RNNs", arXiv 2006.16236, section 4.1; the sequences have the form
in Kitaev et al., 2020, "Reformer", arXiv 2001.04451.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from approx.errors import ApproxError, Exit
from approx.tasks.generated import LONGEST, Generated
from approx.tasks.generation import company_of, prompts, written
from approx.tasks.head import CAUSAL_LANGUAGE_MODELLING, Head
from approx.tasks.language import check_causal, last_tokens
from approx.tasks.padding import padded, padded_labels
from approx.tasks.settings import switch_setting, whole_setting
from approx.tasks.task import Encoding, Example

SEPARATOR = "|"
SYMBOLS = string.ascii_lowercase + string.ascii_uppercase

# A separator, one symbol, a separator and the copy.
_SHORTEST = 4
# Stands for a predicted token that is not a symbol.
_NO_SYMBOL = "?"


class Copying(Generated):
    """Sequences `| w | w`: every symbol of the second w is predicted from all tokens before it.

    Symbols are uniform, and the length of w is uniform between half and all of what `length` allows, so only w itself
    predicts the copy. Guessing is correct once in `symbols` times. Train the model on such sequences (the split
    `train`); the paper uses 10 symbols and lengths of 128 and up to 512.

    Args:
        length: Tokens of the longest sequences, separators included, without the tokenizer's special tokens.
        symbols: Number of different symbols: the letters a, b, …, then A, B, ….
        examples: Rows of a split.
        seed: Seed of all rows, together with the split and the number of the row.
        generate: Whether the model writes the copy itself, token after token; otherwise each symbol is predicted from the true
            ones before it.

    Raises:
        ApproxError: if a setting is not a whole number or is out of range.
    """

    name = "copy"
    head: ClassVar[Head] = CAUSAL_LANGUAGE_MODELLING
    metrics = ("token_accuracy", "accuracy")

    def __init__(
        self, length: int = 128, symbols: int = 10, examples: int = 1000, seed: int = 0, generate: bool = False
    ) -> None:
        self.length = whole_setting(self.name, "length", length, _SHORTEST, LONGEST)
        self.symbols = whole_setting(self.name, "symbols", symbols, 2, len(SYMBOLS))
        self.size = whole_setting(self.name, "examples", examples, 1)
        self.seed = whole_setting(self.name, "seed", seed, 0)
        self.generate = switch_setting(self.name, "generate", generate)
        self.measures = "generation" if self.generate else "likelihood"

    def example(self, split: str, row: int, random: np.random.Generator) -> Example:
        """A sequence and its copy."""
        longest = self.length // 2 - 1
        count = random.integers(max(1, longest // 2), longest, endpoint=True)
        copied = "".join(SYMBOLS[index] for index in random.integers(self.symbols, size=count))
        name = f"copy/{split}/{self.length}-{self.symbols}-{self.seed}/{row}"
        return Example(name, {"text": " ".join([SEPARATOR, *copied, SEPARATOR, *copied])}, copied)

    def check(self, model: Any) -> None:
        """Raise if the model has no language-modelling head, or is not causal."""
        super().check(model)
        check_causal(self.name, model)

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """The tokens of a sequence, after what the tokenizer puts in front, and the symbols of its copy.

        Raises:
            ApproxError: if the tokenizer does not give one token per symbol, or the sequence would be truncated.
        """
        front, of_symbol = _alphabet(processor, self.symbols)
        start, *rest = processor(example.inputs["text"], add_special_tokens=False, verbose=False)["input_ids"]
        words = example.inputs["text"].split(" ")[1:]
        if rest != [of_symbol[word] for word in words]:
            raise _unreadable(processor, " ".join(words))
        ids = [*front, start, *rest]
        if max_length is not None and len(ids) > max_length:
            raise ApproxError(
                f"{example.id} has {len(ids)} tokens, but the limit is {max_length}, and a truncated copy cannot be "
                f"scored. Set 'length' to {max_length - len(front)} or less."
            )
        symbols = {token: word for word, token in of_symbol.items()}
        copied = len(example.label)
        if not self.generate:
            return [{"input_ids": ids, "copied": copied, "symbols": symbols}]
        return [{"input_ids": ids[:-copied], "copied": copied, "symbols": symbols, "new_tokens": copied, "stops": []}]

    def tokens(self, encoding: Encoding) -> int:
        """Tokens of the sequence."""
        return len(encoding["input_ids"]) + encoding.get("new_tokens", 0)

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int:
        """What is generated has no padding."""
        return company_of(encoding) if self.generate else 0

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        """The tokens that the model writes, [B, n], or its outputs for the whole sequence."""
        return written(model, batch, exactly=True) if self.generate else super().outputs(model, batch)

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad to the longest of the batch, on the right."""
        if self.generate:
            return prompts(encodings)
        return padded([{"input_ids": one["input_ids"]} for one in encodings], processor)

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """`labels` [B, L]: the symbols of the copy, at their own positions; transformers shifts them.

        Raises:
            ApproxError: with `generate`, which shows no copy.
        """
        if self.generate:
            raise ApproxError(
                f"{self.name} with 'generate' is for evaluation. Train without it: the copy is the same.",
                Exit.UNSUPPORTED,
            )
        return {"labels": padded_labels([last_tokens(one["input_ids"], one["copied"]) for one in encodings])}

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The likeliest symbol at each position of the copy, given the true ones before it or, generated, its own; `?` for other tokens."""
        if self.generate:
            rows = zip(outputs.tolist(), encodings, strict=True)
            return ["".join(one["symbols"].get(token, _NO_SYMBOL) for token in row) for row, one in rows]
        texts = []
        for logits, one in zip(outputs.logits, encodings, strict=True):
            end = len(one["input_ids"]) - 1
            scored = logits[end - one["copied"] : end].float()
            # The argmax of NaN is 0, which looks like a prediction.
            if not scored.isfinite().all():
                raise ApproxError("its logits are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
            texts.append("".join(one["symbols"].get(token, _NO_SYMBOL) for token in scored.argmax(-1).tolist()))
        return texts


@functools.lru_cache(maxsize=8)
def _alphabet(processor: Any, symbols: int) -> tuple[list[int], dict[str, int]]:
    """The tokenizer's special tokens before a text, and its token for each symbol and the separator after a space."""
    words = [*SYMBOLS[:symbols], SEPARATOR]
    # Without a space before it, the first word of a text often has another token.
    text = " ".join([SEPARATOR, *words])
    framed = processor(text, return_special_tokens_mask=True, verbose=False)
    front = framed["input_ids"][: framed["special_tokens_mask"].index(0)] if 0 in framed["special_tokens_mask"] else []
    ids = processor(text, add_special_tokens=False, verbose=False)["input_ids"][1:]
    if len(ids) != len(words) or len(set(ids)) < len(ids) or processor.unk_token_id in ids:
        raise _unreadable(processor, " ".join(words))
    return front, dict(zip(words, ids, strict=True))


def _unreadable(processor: Any, text: str) -> ApproxError:
    return ApproxError(
        f"{Copying.name} needs a tokenizer with one token per symbol; {type(processor).__name__} gives "
        f"{' '.join(processor.tokenize(text))[:80]!r} for {text[:40]!r}. Use a checkpoint trained on such sequences.",
        Exit.UNSUPPORTED,
    )
