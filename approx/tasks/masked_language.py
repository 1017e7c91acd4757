"""Masked language modelling of any text: how well a model predicts hidden tokens from all the others.

Source: Devlin, Chang, Lee, Toutanova, 2019, "BERT", arXiv 1810.04805.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from approx.errors import ApproxError
from approx.tasks.head import MASKED_LANGUAGE_MODELLING, Head
from approx.tasks.padding import IGNORED, padded_labels
from approx.tasks.settings import number_setting, whole_setting, window_within
from approx.tasks.task import Encoding, Example
from approx.tasks.text import Text, by_place, place_slices, tokenised


class MaskedLanguageModelling(Text):
    """The loss of a masked model on hidden tokens, in nats: its training loss, with a fixed choice of hidden tokens.

    Args:
        window: Tokens of a window, special tokens included; None uses the model's positions, or 512 if they are
            unlimited.
        hidden: Share of hidden tokens.
        stretch: Approximate number of characters of an example; an example longer than a window is read in several.
        join: Whether the rows of a table are the lines of one text, as in Salesforce/wikitext, so that context reaches
            over them.

    Raises:
        ApproxError: if a setting is out of range.
    """

    name = "mlm"
    usual: ClassVar[bool] = True
    head: ClassVar[Head] = MASKED_LANGUAGE_MODELLING
    metrics = ("masked_loss", "perplexity")
    sliced_by: ClassVar[str] = "place in the window"
    draws: ClassVar[bool] = True

    def __init__(
        self, window: int | None = None, hidden: float = 0.15, stretch: int = 2000, join: bool = False
    ) -> None:
        super().__init__(stretch, join)
        self._window = None if window is None else whole_setting(self.name, "window", window, 8)
        self._hidden = number_setting(self.name, "hidden", hidden, 0, 1)

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Windows of a stretch with hidden tokens; the choice does not depend on other examples."""
        if processor.mask_token_id is None:
            raise ApproxError(f"{self.name} needs a tokenizer with a mask token; this one has none.")
        window = window_within(self.name, self._window, max_length, max_length or 512)
        room = window - processor.num_special_tokens_to_add()
        text, start, end = self.written(example, processor)
        tokens, starts = tokenised(processor, text)
        first, last = np.searchsorted(starts, [start, end])
        framed = processor(text[: self._stretch], return_special_tokens_mask=True, verbose=False)
        special = framed["special_tokens_mask"]
        head, tail = (
            framed["input_ids"][: special.index(0)],
            framed["input_ids"][len(special) - special[::-1].index(0) :],
        )
        windows = []
        for begin in range(int(first), int(last), room):
            ids = tokens[begin : min(begin + room, int(last))]
            # With a generator per window, a window does not depend on the text around it.
            random = np.random.default_rng([zlib.crc32(example.id.encode()), begin])
            chosen = random.random(len(ids)) < self._hidden
            chosen[int(random.integers(len(ids)))] = True
            shown = np.where(chosen, processor.mask_token_id, ids).tolist()
            targets = [[len(head) + int(place), int(ids[place])] for place in np.flatnonzero(chosen)]
            windows.append({"input_ids": [*head, *shown, *tail], "targets": targets})
        return windows

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """`labels` [B, L]: the hidden tokens, at their positions."""
        hidden = [dict(one["targets"]) for one in encodings]
        rows = zip(hidden, encodings, strict=True)
        return {
            "labels": padded_labels(
                [[at.get(place, IGNORED) for place in range(len(one["input_ids"]))] for at, one in rows]
            )
        }

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The summed loss of each window's hidden tokens, in nats, by their place."""
        import torch

        predictions = []
        for logits, one in zip(outputs.logits, encodings, strict=True):
            places, ids = zip(*one["targets"], strict=True)
            targets = torch.tensor(ids, device=logits.device)
            losses = torch.nn.functional.cross_entropy(logits[list(places)].float(), targets, reduction="none")
            predictions.append({"places": by_place(losses, places)})
        return predictions

    def slices(
        self, labels: Sequence[Any], lengths: Sequence[int], predictions: Sequence[Any]
    ) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
        """Slice by the place of a hidden token in its window."""
        return place_slices(labels, predictions)
