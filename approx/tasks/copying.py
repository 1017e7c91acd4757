"""Copying sequences: can a causal model say a sequence again?

Source: Katharopoulos et al., 2020, "Transformers are RNNs", arXiv 2006.16236, section 4.1; the form of the sequences is that
of Kitaev et al., 2020, "Reformer", arXiv 2001.04451.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from approx.errors import ApproxError, Exit
from approx.tasks.generated import Generated
from approx.tasks.head import CAUSAL_LANGUAGE_MODELLING, Head
from approx.tasks.language import check_causal, last_tokens
from approx.tasks.padding import padded, padded_labels
from approx.tasks.settings import whole_setting
from approx.tasks.task import Encoding, Example

SEPARATOR = "|"
SYMBOLS = string.ascii_lowercase + string.ascii_uppercase

# Of a sequence: a separator, at least one symbol, a separator and the copy.
_SHORTEST = 4
# What a model says that is none of the symbols.
_NO_SYMBOL = "?"


class Copying(Generated):
    """Sequences `| w | w`: every symbol of the second w is predicted from all before it.

    Symbols are drawn alike and the length of w from a half to all of what `length` allows, so that nothing but w itself says
    how it goes on. A guess among the symbols is right once in `symbols` times. A model has to be trained on such sequences
    (the split `train`); the paper uses 10 symbols and lengths of 128, and of up to 512.

    Args:
        length: Tokens of the longest sequences, separators included; what the tokenizer puts in front of a text is added.
        symbols: How many different ones there are: the letters a, b, …, then A, B, ….
        examples: Rows of a split.
        seed: What every row is drawn from, together with its split and its own number.

    Raises:
        ApproxError: if a setting is not a whole number or out of range.
    """

    name = "copy"
    head: ClassVar[Head] = CAUSAL_LANGUAGE_MODELLING
    metrics = ("token_accuracy", "accuracy")

    def __init__(self, length: int = 128, symbols: int = 10, examples: int = 1000, seed: int = 0) -> None:
        self.length = whole_setting(self.name, "length", length, _SHORTEST)
        self.symbols = whole_setting(self.name, "symbols", symbols, 2, len(SYMBOLS))
        self.size = whole_setting(self.name, "examples", examples, 1)
        self.seed = whole_setting(self.name, "seed", seed, 0)

    def example(self, split: str, row: int, random: np.random.Generator) -> Example:
        """A sequence and its copy."""
        longest = self.length // 2 - 1
        count = random.integers(max(1, longest // 2), longest, endpoint=True)
        copied = "".join(SYMBOLS[index] for index in random.integers(self.symbols, size=count))
        name = f"copy/{split}/{self.length}-{self.symbols}-{self.seed}/{row}"
        return Example(name, {"text": " ".join([SEPARATOR, *copied, SEPARATOR, *copied])}, copied)

    def check(self, model: Any) -> None:
        """Refuse a model without a head that predicts tokens, or one that sees the tokens it should predict."""
        super().check(model)
        check_causal(self.name, model)

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """The tokens of a sequence, after what the tokenizer puts in front, and the symbols of its copy.

        Raises:
            ApproxError: if the tokenizer does not read one token a symbol, or the sequence is to be cut.
        """
        front, of_symbol = _alphabet(processor, self.symbols)
        start, *rest = processor(example.inputs["text"], add_special_tokens=False, verbose=False)["input_ids"]
        words = example.inputs["text"].split(" ")[1:]
        if rest != [of_symbol[word] for word in words]:
            raise _unreadable(processor, " ".join(words))
        ids = [*front, start, *rest]
        if max_length is not None and len(ids) > max_length:
            raise ApproxError(
                f"{example.id} has {len(ids)} tokens, the limit is {max_length}, and a copy that is cut cannot be scored. Ask "
                f"for shorter sequences with the setting 'length', {max_length - len(front)} or less."
            )
        symbols = {token: word for word, token in of_symbol.items()}
        return [{"input_ids": ids, "copied": len(example.label), "symbols": symbols}]

    def tokens(self, encoding: Encoding) -> int:
        """Tokens of the sequence."""
        return len(encoding["input_ids"])

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad to the longest of the batch, on the right."""
        return padded([{"input_ids": one["input_ids"]} for one in encodings], processor)

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """`labels` [B, L]: the symbols of the copy, at their own places; transformers shifts them."""
        return {"labels": padded_labels([last_tokens(one["input_ids"], one["copied"]) for one in encodings])}

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The likeliest symbol at each place of the copy, given the true ones before it; `?` for no symbol."""
        said = []
        for logits, one in zip(outputs.logits, encodings, strict=True):
            end = len(one["input_ids"]) - 1
            scored = logits[end - one["copied"] : end].float()
            # An argmax over NaN is token 0, and would pass for a prediction.
            if not scored.isfinite().all():
                raise ApproxError("its logits are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
            said.append("".join(one["symbols"].get(token, _NO_SYMBOL) for token in scored.argmax(-1).tolist()))
        return said


@functools.lru_cache(maxsize=8)
def _alphabet(processor: Any, symbols: int) -> tuple[list[int], dict[str, int]]:
    """What a tokenizer puts in front of a text, and its token of each symbol and of the separator after a space."""
    words = [*SYMBOLS[:symbols], SEPARATOR]
    # The first word of a text has no space before it, and often another token.
    text = " ".join([SEPARATOR, *words])
    framed = processor(text, return_special_tokens_mask=True, verbose=False)
    front = framed["input_ids"][: framed["special_tokens_mask"].index(0)] if 0 in framed["special_tokens_mask"] else []
    ids = processor(text, add_special_tokens=False, verbose=False)["input_ids"][1:]
    if len(ids) != len(words) or len(set(ids)) < len(ids) or processor.unk_token_id in ids:
        raise _unreadable(processor, " ".join(words))
    return front, dict(zip(words, ids, strict=True))


def _unreadable(processor: Any, text: str) -> ApproxError:
    return ApproxError(
        f"{Copying.name} needs a tokenizer that reads one token a symbol, each its own; {type(processor).__name__} reads "
        f"{' '.join(processor.tokenize(text))[:80]!r} in {text[:40]!r}. Use a checkpoint trained on such sequences.",
        Exit.UNSUPPORTED,
    )
