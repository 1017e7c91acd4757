"""Causal language modelling of any text: how well a model predicts each token from those before it.

Source: perplexity by a sliding window follows Baevski and Auli, 2019, "Adaptive Input Representations for Neural
Language Modeling", arXiv 1809.10853.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from approx.errors import ApproxError, Exit
from approx.tasks.head import CAUSAL_LANGUAGE_MODELLING, Head
from approx.tasks.padding import IGNORED, padded_labels
from approx.tasks.settings import whole_setting, window_within, wrong_setting
from approx.tasks.task import Encoding, Example
from approx.tasks.text import Text, by_place, place_slices, tokenised

CARRIES = ("recompute", "flush", "segments", "state")
"""What a model may keep from one segment of a text to the next."""
# Tokens that a model with a state reads at a time.
_READ = 512


class LanguageModelling(Text):
    """Perplexity and bits per byte of a causal model, by a sliding window.

    Every token is scored once, in a window with at least `window - stride` tokens before it, except at the beginning of
    a text. Bits per byte do not depend on the tokenizer. If the tokenizer has a beginning-of-text token, each text
    begins with it, so that the first token is scored too.

    Args:
        window: Tokens of a window; None uses the model's positions, or 1,024 if they are unlimited.
        stride: Maximum number of tokens scored in a window, less than its length; None uses half a window, of `state` 512.
        stretch: Approximate number of characters of an example; examples are the unit of resampling.
        bucket: Positions of a slice of the scores, 0-511 and 512-1,023 for 512; None doubles them: 0-15, 16-31, 32-63, ….
        join: Whether the rows of a table are the lines of one text, as in Salesforce/wikitext, so that context reaches
            over them.
        carry: Read a text in order, and keep between its segments: `recompute` the tokens of a window, `flush` nothing
            from one window to the next, `segments` the keys and values of `window - stride` tokens, `state` what the
            model's cache keeps. None scores windows side by side, as `recompute` does.
        sinks: Of these tokens of `segments`, those that are the first of the text; the others are the last ones. None uses
            4, or half of them where they are fewer than 8.

    Raises:
        ApproxError: if a setting is out of range.
    """

    name = "lm"
    usual: ClassVar[bool] = True
    head: ClassVar[Head] = CAUSAL_LANGUAGE_MODELLING
    metrics = ("bits_per_byte", "perplexity")
    measures = "likelihood"
    slice_metric = "perplexity"
    sliced_by: ClassVar[str] = "tokens before"

    def __init__(
        self,
        window: int | None = None,
        stride: int | None = None,
        stretch: int = 2000,
        join: bool = False,
        bucket: int | None = None,
        carry: str | None = None,
        sinks: int | None = None,
    ) -> None:
        super().__init__(stretch, join)
        if carry not in (None, *CARRIES):
            raise wrong_setting("carry", carry, f"one of {', '.join(CARRIES)}", self.name)
        for unused, value, ways in (("stride", stride, ("flush",)), ("window", window, ("state",))):
            if value is not None and carry in ways:
                raise wrong_setting(unused, value, f"none with carry={carry}, which has no {unused}", self.name)
        if sinks is not None and carry != "segments":
            raise wrong_setting("sinks", sinks, "none without carry=segments, which keeps first tokens", self.name)
        self.carry = carry
        self._sinks = None if sinks is None else whole_setting(self.name, "sinks", sinks, 0)
        self._bucket = None if bucket is None else whole_setting(self.name, "bucket", bucket, 1)
        self._window = None if window is None else whole_setting(self.name, "window", window, 2)
        self._stride = None if stride is None else whole_setting(self.name, "stride", stride, 1, window and window - 1)

    def check(self, model: Any) -> None:
        """Raise if the model has no language-modelling head, or is not causal."""
        super().check(model)
        check_causal(self.name, model)
        if self.carry is not None:
            from approx.tasks.carrying import Carried

            Carried(model, self.carry, 2, 1)

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """The windows that score the tokens of a stretch."""
        window = window_within(self.name, self._window, max_length, max_length or 1024)
        # The first token of a window is context only.
        stride = min(max(window // 2, 1), window - 1) if self._stride is None else self._stride
        if self.carry == "state":
            stride = self._stride or _READ
        else:
            whole_setting(self.name, "stride", stride, 1, window - 1)
        text, start, end = self.written(example, processor)
        tokens, starts = tokenised(processor, text)
        first, last = np.searchsorted(starts, [start, end])
        begun = [] if processor.bos_token_id is None else [processor.bos_token_id]
        if tokens[:1].tolist() == begun:
            # Chat templates write it themselves.
            begun = []
        # Without a beginning-of-text token, the first token cannot be predicted.
        first = max(int(first), 1 - len(begun))
        if self.carry is not None:
            if self._sinks is not None:
                whole_setting(self.name, "sinks", self._sinks, 0, window - stride - 1)
            room, last = (max_length or int(last) + 1) - 1, int(last)
            return [
                {
                    "input_ids": (tokens[start - 1 : start].tolist() if start else begun)
                    + tokens[start : min(start + room, last)].tolist(),
                    "scored": min(room, last - start),
                    "begin": start + len(begun),
                    "window": window,
                    "stride": stride,
                    "sinks": self._sinks,
                    "text": _digest(text),
                }
                for start in range(first, last, room)
            ]
        windows = []
        while first < last:
            end = min(first + stride, int(last))
            begin = max(end - window, 0)
            ids = tokens[begin:end].tolist()
            if begin == 0 and len(ids) < window:
                ids = begun + ids
            windows.append({"input_ids": ids, "scored": end - first})
            first = end
        return windows

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """`labels` [B, L]: the tokens that a window scores, at their own positions; transformers shifts them."""
        return {"labels": padded_labels([last_tokens(one["input_ids"], one["scored"]) for one in encodings])}

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The summed loss of each window's scored tokens, in nats, by the number of tokens before them."""
        import torch

        predictions = []
        for logits, one in zip(outputs.logits, encodings, strict=True):
            ids, scored = one["input_ids"], one["scored"]
            targets = torch.tensor(ids[len(ids) - scored :], device=logits.device)
            rows = logits[len(ids) - scored - 1 : len(ids) - 1].float()
            losses = torch.nn.functional.cross_entropy(rows, targets, reduction="none")
            predictions.append({"places": by_place(losses, range(len(ids) - scored, len(ids)), self._bucket)})
        return predictions

    @property
    def in_order(self) -> bool:
        """Whether something is carried from one segment to the next."""
        return self.carry is not None

    def follows(self, encoding: Encoding, before: Encoding) -> bool:
        """Whether it goes on in the same text; after a stretch without words or one that is left out, nothing is carried."""
        return encoding["text"] == before["text"] and encoding["begin"] == before["begin"] + before["scored"]

    def predict_in_order(self, model: Any, encodings: Sequence[Encoding]) -> Iterator[Any]:
        """The summed loss of each piece, by the number of tokens before in its text, and what the model carried."""
        from approx.tasks.carrying import losses_in_order

        assert self.carry is not None
        read = losses_in_order(model, encodings, self.carry)
        for one, (losses, state, seconds) in zip(encodings, read, strict=True):
            begin, end = one["begin"], one["begin"] + one["scored"]
            places = by_place(losses, range(begin, end), self._bucket)
            yield {"places": places, "state": state, "end": end - 1, "seconds": seconds}

    def combine(self, example: Example, parts: list[Any]) -> dict[str, Any]:
        """Add up the windows of a stretch."""
        combined = super().combine(example, parts)
        if self.carry is not None:
            largest = max(parts, key=lambda part: (part["state"], -part["end"]))
            combined |= {
                "state": largest["state"],
                "end": largest["end"],
                "seconds": sum(one["seconds"] for one in parts),
            }
        return combined

    def positions(self, encoding: Encoding, config: Any) -> int:
        """Tokens that attention sees at most: of a text that is read in order, up to the window or its beginning."""
        if self.carry is None:
            return super().positions(encoding, config)
        end = encoding["begin"] + encoding["scored"]
        return end if self.carry == "state" else min(end, encoding["window"])

    def slices(
        self, labels: Sequence[Any], lengths: Sequence[int], predictions: Sequence[Any]
    ) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
        """Slice by the number of tokens before a scored one in its window; in its text, if something is carried."""
        return place_slices(labels, predictions, self._bucket)


@functools.lru_cache(maxsize=2)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def last_tokens(ids: Sequence[int], count: int) -> list[int]:
    """Labels of a row with only the last `count` tokens scored."""
    return [*[IGNORED] * (len(ids) - count), *ids[len(ids) - count :]]


def check_causal(task: str, model: Any) -> None:
    """Raise if a model is not causal.

    Raises:
        ApproxError: naming the task and the model.
    """
    import torch

    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=model.device)
    training = model.training
    with torch.inference_mode():
        early = model.eval()(input_ids=tokens).logits[:, :3].float()
    model.train(training)
    if (early[0] - early[1]).abs().max() > 1e-3 * early.abs().max():
        raise ApproxError(
            f"{task} needs a causal model, but the output of this {type(model).__name__} depends on later tokens. Use "
            "the task mlm, or set is_decoder in its config.",
            Exit.UNSUPPORTED,
        )
