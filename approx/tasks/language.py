"""Language modelling of any text: how well a model predicts each token from those before it, or hidden ones from the rest.

Source: perplexity by a sliding window follows Baevski and Auli, 2019, "Adaptive Input Representations for Neural Language
Modeling", arXiv 1809.10853; the masked loss Devlin et al., 2019, "BERT", arXiv 1810.04805.
"""

from __future__ import annotations

import functools
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from approx.errors import ApproxError, Exit
from approx.tasks.hub import load_rows
from approx.tasks.task import Encoding, Example, Split, Task, doubling, whole_setting

_HUB_DATASET, _HUB_CONFIG = "Salesforce/wikitext", "wikitext-2-raw-v1"
_SUFFIXES = (".txt", ".txt.gz", ".tokens", ".raw")


class _Text(Task):
    """A text, cut between words into stretches of about so many characters; each stretch is an example."""

    metrics: tuple[str, ...]
    windowed: ClassVar[bool] = True

    def __init__(self, stretch: int = 2000) -> None:
        self._stretch = whole_setting(self.name, "stretch", stretch, 1)

    def load(self, data: Path | None = None, split: str | None = None, limit: int | None = None) -> Split:
        """Load a text, `test` of wikitext-2 unless another is asked for.

        Args:
            data: A text file (.txt, .tokens, .raw, also .gz), or a folder that holds one named after the split; None
                means wikitext-2 on the hub.
            split: Its name.
            limit: Keep the first `limit` stretches.

        Raises:
            ApproxError: if there is no such file or dataset, or it holds no words.
        """
        if limit is not None:
            whole_setting(self.name, "limit", limit, 1)
        if data is None:
            name = (split or "test").replace("valid", "validation").replace("validationation", "validation")
            text = "".join(row["text"] for row in load_rows(_HUB_DATASET, _HUB_CONFIG, name))
        else:
            path = self._find(Path(data), split)
            name, text = path.name.partition(".")[0], _read(path)
        stretches = list(self._stretches(text, name))
        if not stretches:
            raise ApproxError(f"{self.name}: 0 words in {data or _HUB_DATASET}.", Exit.UNAVAILABLE)
        kept = list(islice(stretches, limit))
        return Split(name, kept, subset=len(kept) < len(stretches))

    def _find(self, data: Path, split: str | None) -> Path:
        if data.is_file():
            return data
        known = [path for path in sorted(data.glob("*")) if path.name.endswith(_SUFFIXES)] if data.is_dir() else []
        found = [path for path in known if split is None or split in path.name]
        if len(found) == 1:
            return found[0]
        there = ", ".join(path.name for path in known) or "no text"
        raise ApproxError(
            f"{self.name}: looked for one text file{f' of the split {split}' if split else ''} in {data}, found {there}. "
            "Give the file itself with --data.",
            Exit.UNAVAILABLE,
        )

    def _stretches(self, text: str, name: str) -> Iterator[Example]:
        start = 0
        while start < len(text):
            # A tokenizer joins a word with the space before it, so stretches begin with a space.
            cut = re.compile(r"\s").search(text, start + self._stretch)
            end = cut.start() if cut else len(text)
            size = len(text[start:end].encode())
            if text[start:end].strip():
                yield Example(f"{name}-{start}", {"text": text, "start": start, "end": end}, size)
            start = end

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad to the longest of the batch, on the right; padding is masked, so any token may stand in for it."""
        import torch

        longest = max(len(one["input_ids"]) for one in encodings)
        filler = processor.pad_token_id or 0
        ids = [[*one["input_ids"], *[filler] * (longest - len(one["input_ids"]))] for one in encodings]
        real = [[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"])) for one in encodings]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(real)}

    def combine(self, example: Example, parts: list[Any]) -> dict[str, Any]:
        """Add up the windows of a stretch."""
        places: dict[str, list[float]] = {}
        for part in parts:
            for place, (loss, count) in part["places"].items():
                before = places.get(place, (0.0, 0))
                places[place] = [before[0] + loss, before[1] + count]
        loss, count = (sum(column) for column in zip(*places.values(), strict=True)) if places else (0.0, 0)
        return {"loss": loss, "count": int(count), "places": places}

    def correct(self, predictions: Sequence[Any], labels: Sequence[Any]) -> None:
        """Right and wrong do not exist."""


class LanguageModelling(_Text):
    """Perplexity and bits per byte of a causal model, by a sliding window.

    Every token is scored once, in a window that shows it at least `window - stride` tokens before it, except at the
    beginning of the text. Bits per byte do not depend on the tokenizer. A tokenizer with a token for the beginning of a
    text gets it there, so that the first word is scored too.

    Args:
        window: Tokens of a window; None means the model's positions, or 1,024 where nothing limits them.
        stride: Tokens scored in a window, at most, and fewer than it holds; None means half a window.
        stretch: Characters of an example, about; examples are what is resampled.

    Raises:
        ApproxError: if a setting is out of range.
    """

    name = "lm"
    head: ClassVar[str] = "causal-language-modelling"
    metrics = ("bits_per_byte", "perplexity")
    slice_metric = "perplexity"
    sliced_by: ClassVar[str] = "tokens before"

    def __init__(self, window: int | None = None, stride: int | None = None, stretch: int = 2000) -> None:
        super().__init__(stretch)
        self._window = None if window is None else whole_setting(self.name, "window", window, 2)
        self._stride = None if stride is None else whole_setting(self.name, "stride", stride, 1, window and window - 1)

    def check(self, model: Any) -> None:
        """Refuse a model without a head that predicts tokens, or one that sees the tokens it should predict."""
        import torch

        found = type(model).__name__
        if not found.endswith(("ForCausalLM", "LMHeadModel")):
            raise ApproxError(
                f"{self.name} needs a causal language-modelling head, but the model is a {found}. "
                "Use the task mlm for a masked one, or choose a task for its head.",
                Exit.UNSUPPORTED,
            )
        tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=next(model.parameters()).device)
        training = model.training
        with torch.inference_mode():
            early = model.eval()(input_ids=tokens).logits[:, :3].float()
        model.train(training)
        if (early[0] - early[1]).abs().max() > 1e-3 * early.abs().max():
            raise ApproxError(
                f"{self.name} needs a causal model, but what this {found} says at a token depends on the tokens behind it. "
                "Use the task mlm, or set is_decoder in its config.",
                Exit.UNSUPPORTED,
            )

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """The windows that score the tokens of a stretch."""
        window = min(self._window or max_length or 1024, max_length or self._window or 1024)
        # The first token of a window is only looked at.
        stride = min(self._stride or max(window // 2, 1), window - 1)
        tokens, starts = _tokenised(processor, example.inputs["text"])
        first, last = np.searchsorted(starts, [example.inputs["start"], example.inputs["end"]])
        begun = [] if processor.bos_token_id is None else [processor.bos_token_id]
        # Without a token to begin with, nothing predicts the first one.
        first = max(int(first), 1 - len(begun))
        windows = []
        while first < last:
            end = min(first + stride, int(last))
            begin = max(end - window, 0)
            ids = tokens[begin:end].tolist()
            if begin == 0 and len(ids) < window:
                ids = begun + ids
            windows.append({"input_ids": ids, "scored": min(end - first, len(ids) - 1)})
            first = end
        return windows

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The summed loss of each window's scored tokens, in nats, by the number of tokens before them."""
        import torch

        said = []
        for logits, one in zip(outputs.logits, encodings, strict=True):
            ids, scored = one["input_ids"], one["scored"]
            targets = torch.tensor(ids[len(ids) - scored :], device=logits.device)
            rows = logits[len(ids) - scored - 1 : len(ids) - 1].float()
            losses = torch.nn.functional.cross_entropy(rows, targets, reduction="none")
            said.append({"places": _by_place(losses, range(len(ids) - scored, len(ids)))})
        return said

    def slices(
        self, labels: Sequence[Any], lengths: Sequence[int], predictions: Sequence[Any]
    ) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
        """By the number of tokens before a scored one, in its window."""
        return _place_slices(labels, predictions)


class MaskedLanguageModelling(_Text):
    """The loss of a masked model on hidden tokens, in nats: what it would be trained on, with the same tokens hidden always.

    Args:
        window: Tokens of a window, special ones included; None means the model's positions, or 512 where nothing limits
            them.
        hidden: Share of the tokens that is hidden.
        stretch: Characters of an example, about; one that is longer than a window is read in several.

    Raises:
        ApproxError: if a setting is out of range.
    """

    name = "mlm"
    head: ClassVar[str] = "masked-language-modelling"
    metrics = ("masked_loss",)
    sliced_by: ClassVar[str] = "place in the window"

    def __init__(self, window: int | None = None, hidden: float = 0.15, stretch: int = 2000) -> None:
        super().__init__(stretch)
        self._window = None if window is None else whole_setting(self.name, "window", window, 8)
        if not 0 < hidden < 1:
            raise ApproxError(
                f"The setting 'hidden' of the task '{self.name}' is {hidden!r}; it is a share, above 0, below 1."
            )
        self._hidden = float(hidden)

    def check(self, model: Any) -> None:
        """Refuse a model without a masked language-modelling head."""
        found = type(model).__name__
        if not found.endswith("ForMaskedLM"):
            raise ApproxError(
                f"{self.name} needs a masked language-modelling head, but the model is a {found}. "
                "Use the task lm for a causal one, or choose a task for its head.",
                Exit.UNSUPPORTED,
            )

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Windows of a stretch with tokens hidden; the same ones whatever else is evaluated."""
        if processor.mask_token_id is None:
            raise ApproxError(f"{self.name} needs a tokenizer with a token for hidden ones; this one has none.")
        window = min(self._window or max_length or 512, max_length or self._window or 512)
        room = window - processor.num_special_tokens_to_add()
        tokens, starts = _tokenised(processor, example.inputs["text"])
        first, last = np.searchsorted(starts, [example.inputs["start"], example.inputs["end"]])
        framed = processor(example.inputs["text"][: self._stretch], return_special_tokens_mask=True, verbose=False)
        special = framed["special_tokens_mask"]
        head, tail = (
            framed["input_ids"][: special.index(0)],
            framed["input_ids"][len(special) - special[::-1].index(0) :],
        )
        windows = []
        for begin in range(int(first), int(last), room):
            ids = tokens[begin : min(begin + room, int(last))]
            # A generator per window, from the name of the stretch: a window is the same whatever stands around it.
            random = np.random.default_rng([zlib.crc32(example.id.encode()), begin])
            chosen = random.random(len(ids)) < self._hidden
            chosen[int(random.integers(len(ids)))] = True
            shown = np.where(chosen, processor.mask_token_id, ids).tolist()
            targets = [[len(head) + int(place), int(ids[place])] for place in np.flatnonzero(chosen)]
            windows.append({"input_ids": [*head, *shown, *tail], "targets": targets})
        return windows

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The summed loss of each window's hidden tokens, in nats, by their place."""
        import torch

        said = []
        for logits, one in zip(outputs.logits, encodings, strict=True):
            places, ids = zip(*one["targets"], strict=True)
            targets = torch.tensor(ids, device=logits.device)
            losses = torch.nn.functional.cross_entropy(logits[list(places)].float(), targets, reduction="none")
            said.append({"places": _by_place(losses, places)})
        return said

    def slices(
        self, labels: Sequence[Any], lengths: Sequence[int], predictions: Sequence[Any]
    ) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
        """By the place of a hidden token in its window."""
        return _place_slices(labels, predictions)


@functools.lru_cache(maxsize=2)
def _tokenised(processor: Any, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of a whole text, and the character at which each begins; a text is tokenised once for all its stretches."""
    if not getattr(processor, "is_fast", False):
        raise ApproxError(
            f"Language modelling needs to know where in the text a token stands, which {type(processor).__name__} cannot tell. "
            "Put the tokenizer's tokenizer.json into the checkpoint's folder.",
            Exit.UNSUPPORTED,
        )
    encoded = processor(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return np.asarray(encoded["input_ids"]), np.asarray([span[0] for span in encoded["offset_mapping"]])


def _by_place(losses: Any, places: Sequence[int]) -> dict[str, list[float]]:
    """Sum and number of losses for each slice of places: up to 16, and then each slice reaches to twice the place."""
    if not losses.isfinite().all():
        raise ApproxError("its losses are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
    found: dict[str, list[float]] = {}
    counts = np.asarray(places)
    values = losses.double().cpu().numpy()
    for start, end in doubling(int(counts.max(initial=0))):
        inside = (counts >= start) & (counts < end)
        if inside.any():
            found[str(start)] = [float(values[inside].sum()), int(inside.sum())]
    return found


def _place_slices(labels: Sequence[Any], predictions: Sequence[Any]) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
    deepest = max(int(place) for said in predictions for place in said["places"])
    for start, end in doubling(deepest):
        rows = [row for row, said in enumerate(predictions) if str(start) in said["places"]]
        parts = [predictions[row]["places"][str(start)] for row in rows]
        if rows:
            said = [{"loss": loss, "count": int(count)} for loss, count in parts]
            yield start, end, said, [labels[row] for row in rows]


def _read(path: Path) -> str:
    try:
        return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ApproxError(f"{path} is no text in UTF-8 ({error}).", Exit.UNAVAILABLE) from None
    except OSError as error:
        raise ApproxError(f"{path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None
