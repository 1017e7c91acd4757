"""SQuAD: the answer to a question, as a span of a text, or none.

Read from the official JSON files or the hub, with the same questions, order and ids.

Source: Rajpurkar et al., 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text", arXiv 1606.05250;
Rajpurkar, Jia, Liang, 2018, "Know What You Don't Know", arXiv 1806.03822.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit, did_you_mean, shown
from approx.tasks.answer_words import answer_words
from approx.tasks.head import QUESTION_ANSWERING, Head
from approx.tasks.hub import read_rows
from approx.tasks.json_text import parsed
from approx.tasks.padding import padded
from approx.tasks.settings import names_setting, number_setting, whole_setting, window_within
from approx.tasks.table import FORMATS, Row, is_table, open_table, table_of, text_of
from approx.tasks.task import Encoding, Example, Groups, Split, Tally, Task
from approx.text_file import read_text

_SPLITS = ("dev", "train")
_OURS = ("offsets",)
_WINDOW = 384


class Squad(Task):
    """Extractive question answering, version 1.1, or 2.0 with unanswerable questions.

    A text longer than the window is read in overlapping windows. The answer is the span with the highest sum of start
    and end logits over all windows, unless (2.0) the no-answer score is higher by more than `no_answer_margin`.

    Args:
        version: 1 or 2.
        window: Maximum tokens of a window, including question and special tokens; None uses 384, or the model's
            positions if they are fewer.
        stride: Tokens that neighbouring windows share.
        best: Number of likeliest starts and ends considered in a window.
        longest_answer: Maximum tokens of an answer.
        no_answer_margin: How far the no-answer score must exceed the best answer's.
        articles: Titles of the articles to use, as a list or separated by commas; None uses all.

    Raises:
        ApproxError: if a setting is out of range.
    """

    head: ClassVar[Head] = QUESTION_ANSWERING
    usual: ClassVar[bool] = True
    groups: ClassVar[Groups] = Groups("article")
    metrics = ("answer_f1", "exact_match")
    fields = ("question", "context", "answers")
    optional_fields = ("title",)
    dataset: str
    windowed: ClassVar[bool] = True
    part_setting: ClassVar[str | None] = "articles"

    def __init__(
        self,
        version: int = 1,
        *,
        window: int | None = None,
        stride: int = 128,
        best: int = 20,
        longest_answer: int = 30,
        no_answer_margin: float = 0.0,
        articles: Sequence[str] | None = None,
    ) -> None:
        self.name = "squad" if version == 1 else "squad_v2"
        self.dataset = f"rajpurkar/{self.name}"
        self._version = version
        self._window = None if window is None else whole_setting(self.name, "window", window, 16)
        self._stride = whole_setting(self.name, "stride", stride, 0, (window or _WINDOW) - 1)
        self._best = whole_setting(self.name, "best", best, 1)
        self._longest = whole_setting(self.name, "longest_answer", longest_answer, 1)
        self._margin = number_setting(self.name, "no_answer_margin", no_answer_margin, -math.inf, math.inf)
        self._articles = None if articles is None else names_setting(self.name, "articles", articles)

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load a split, `dev` (the default) or `train`.

        Args:
            data: SQuAD's own JSON file or its folder, or a table with the columns question, context and answers, as on
                the hub (.csv, .tsv, .jsonl, .json, .parquet, `hub:OWNER/NAME`); None uses the hub dataset.
            split: `dev` or `train`.
            limit: Keep the first `limit` questions.
            streaming: Read the hub dataset while it downloads, up to the limit.

        Raises:
            ApproxError: if the file or dataset does not exist or is damaged, or no question is left.
        """
        if limit is not None:
            whole_setting(self.name, "limit", limit, 1)
        wanted = (split or "dev").replace("validation", "dev")
        tally = Tally()
        if data is None:
            return self._split(wanted, self._hub_rows(wanted, tally, streaming), limit, tally, "the hub dataset")
        source = self._find(Path(data), wanted)
        official = source.suffix == ".json" and self._official(source)
        if not official:
            return self.read_table(source, wanted, limit)
        return self._split(source.stem, self._file_rows(source, official, tally), limit, tally, data)

    def read_table(self, data: Path, split: str, limit: int | None = None, *, streaming: bool = False) -> Split:
        """Read a split with a question in each row, as on the hub.

        Answers are `{"text": […], "answer_start": […]}`, a list of texts or a text; none of them says that there is no
        answer.
        """
        tally = Tally()
        name, rows = open_table(self.name, data, split, tally, encoding=self.encoding, streaming=streaming)
        made = (self._flat(row, f"{name}-{number}") for number, row in enumerate(rows))
        titled = ((example.group or "", example) for example in made)
        return self._split(name, titled, limit, tally, data)

    def _split(
        self, name: str, rows: Iterator[tuple[str, Example]], limit: int | None, tally: Tally, source: object
    ) -> Split:
        """The questions of the chosen articles, up to the limit."""
        chosen, titles, total = [], set(), 0
        for title, example in rows:
            # One row more than the limit shows that the result is a subset.
            if limit is not None and total > len(chosen) == limit and titles.issuperset(self._articles or ()):
                break
            titles.add(title)
            total += 1
            if (self._articles is None or title in self._articles) and (limit is None or len(chosen) < limit):
                chosen.append(example)
        unknown = [title for title in self._articles or () if title not in titles]
        if unknown:
            hint = did_you_mean(unknown[0], titles)
            raise ApproxError(f"{self.name}: unknown article '{unknown[0]}'; there are {len(titles)}.{hint}")
        if not chosen:
            raise ApproxError(f"{self.name}: 0 questions in {source}.", Exit.UNAVAILABLE)
        official = name in ("dev", "train") or re.fullmatch(r"(dev|train)-v[\d.]+", name)
        return Split(name, chosen, subset=len(chosen) < total or not official, tally=tally)

    def _find(self, data: Path, wanted: str) -> Path:
        if data.is_file():
            if not is_table(data):
                raise ApproxError(
                    f"{self.name}: {data} is neither SQuAD's JSON nor a {', '.join(FORMATS)} file.", Exit.UNAVAILABLE
                )
            return data
        if not data.is_dir():
            raise ApproxError(f"{self.name}: {data} does not exist.", Exit.UNAVAILABLE)
        official = f"{wanted}-v{'1.1' if self._version == 1 else '2.0'}"
        matches = [path for folder in (data / "squad", data) for path in sorted(folder.glob(f"{official}*.json"))]
        if matches:
            return matches[0]
        tables = [path for path in sorted(data.iterdir()) if is_table(path)]
        named = [path for path in tables if path.name.startswith(wanted) and not path.name.startswith(f"{wanted}-v")]
        if len(named) == 1:
            return named[0]
        there = ", ".join(path.name for path in tables) or "no json"
        raise ApproxError(
            f"{self.name}: looked for {official}.json in {data}, found {there}. Give the file itself with --data.",
            Exit.UNAVAILABLE,
        )

    def _official(self, path: Path) -> list[Any] | None:
        """The articles of a file in SQuAD's own layout; None if it is a table with a question in each row."""
        articles = table_of(read_text(path, self.encoding), path)
        nested = any(isinstance(article, dict) and "paragraphs" in article for article in articles)
        return articles if nested else None

    def _file_rows(self, path: Path, articles: list[Any], tally: Tally) -> Iterator[tuple[str, Example]]:
        try:
            questions = [one for article in articles for part in article["paragraphs"] for one in part["qas"]]
            if self._version == 2 and questions and not any("is_impossible" in one for one in questions):
                raise ApproxError(
                    f"{path} is of SQuAD 1.1: it does not say which questions are unanswerable. Use the task squad, or "
                    "a file of 2.0.",
                    Exit.UNAVAILABLE,
                )
            for article in articles:
                for paragraph in article["paragraphs"]:
                    for question in paragraph["qas"]:
                        answers = [(one["text"], one.get("answer_start")) for one in question.get("answers", ())]
                        _check_types(article["title"], paragraph["context"], question["question"], answers)
                        impossible = bool(question.get("is_impossible", False))
                        made = self._example(
                            question, article["title"], paragraph["context"], answers, impossible, str(path)
                        )
                        tally.read += 1
                        yield article["title"], made
        except (KeyError, TypeError, AttributeError) as error:
            found = f"a part has no key {error}" if isinstance(error, KeyError) else f"{error}"
            raise ApproxError(
                f"{path} has paragraphs, but not the layout of SQuAD: {found}. An article has title and paragraphs, a "
                "paragraph context and qas, a question id, question and answers. Correct it, or write a table with a "
                "question in each row.",
                Exit.UNAVAILABLE,
            ) from None

    def _flat(self, row: Row, name: str) -> Example:
        """The question of a row."""
        cells = self._cells(row)
        texts = {one: text_of(cells[one], row.place) for one in ("question", "context")}
        title = cells.get("title", row.cells.get("title"))
        # Questions about one text are correlated, even if it has no title.
        group = cells.get("group") or title or texts["context"]
        answers = _answers(cells["answers"], row.place)
        impossible = bool(row.cells.get("is_impossible", self._version == 2 and not answers))
        question = {"id": cells.get("id", row.cells.get("id", name)), "question": texts["question"]}
        return self._example(question, str(group), texts["context"], answers, impossible, row.place)

    def _hub_rows(self, split: str, tally: Tally, streaming: bool) -> Iterator[tuple[str, Example]]:
        if split not in _SPLITS:
            raise ApproxError(f"Unknown split '{split}' of the task '{self.name}'. Known: {', '.join(_SPLITS)}.")
        config = "plain_text" if self._version == 1 else "squad_v2"
        for row in read_rows(self.dataset, config, split.replace("dev", "validation"), streaming):
            answers = list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True))
            impossible = self._version == 2 and not answers
            tally.read += 1
            yield row["title"], self._example(row, row["title"], row["context"], answers, impossible, self.dataset)

    def _example(
        self,
        question: dict[str, Any],
        title: str,
        context: str,
        answers: list[tuple[str, int | None]],
        impossible: bool,
        place: str,
    ) -> Example:
        if not answers and not impossible:
            raise ApproxError(
                f"{place}: question {question['id']} has no answers and cannot be scored. Use a split with answers, or "
                "squad_v2 if the question is marked as impossible.",
                Exit.UNAVAILABLE,
            )
        if impossible and self._version == 1:
            raise ApproxError(f"{place}: question {question['id']} is marked as impossible. Use the task squad_v2.")
        # The official scoring of 2.0, unlike 1.1, ignores answers that are only punctuation or an article.
        answers = [one for one in answers if not impossible and (self._version == 1 or answer_words(one[0]))]
        inputs = {"question": question["question"].strip(), "context": context}
        if answers and answers[0][1] is not None:
            inputs["answer_start"] = answers[0][1]
        return Example(str(question["id"]), inputs, [text for text, _ in answers], group=title)

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Tokenise question and text in overlapping windows, with the character offsets of the text's tokens."""
        if not getattr(processor, "is_fast", False):
            raise ApproxError(
                f"{self.name} needs the positions of tokens in the text, which {type(processor).__name__} does not "
                "give. Put the tokenizer's tokenizer.json into the checkpoint's folder.",
                Exit.UNSUPPORTED,
            )
        window = window_within(self.name, self._window, max_length, _WINDOW)
        taken = len(processor(example.inputs["question"])["input_ids"]) + processor.num_special_tokens_to_add(pair=True)
        if taken + self._stride >= window:
            raise ApproxError(
                f"{example.id}: the question has {taken} tokens, which leaves no room for the text in windows of "
                f"{window} tokens that share {self._stride}. Set a larger window or a smaller stride.",
            )
        windows = processor(
            example.inputs["question"],
            example.inputs["context"],
            truncation="only_second",
            max_length=window,
            stride=self._stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        names = [name for name in processor.model_input_names if name in windows]
        return [
            {
                **{name: windows[name][row] for name in names},
                "offsets": [
                    list(span) if part == 1 else None
                    for span, part in zip(windows["offset_mapping"][row], windows.sequence_ids(row), strict=True)
                ],
            }
            for row in range(len(windows["input_ids"]))
        ]

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad to the longest of the batch, on the right."""
        read = [{name: value for name, value in one.items() if name not in _OURS} for one in encodings]
        return padded(read, processor)

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """First and last token of the first answer, [B] each; 0 if the window does not contain the whole answer."""
        import torch

        spans = [_tokens_of_answer(*pair) for pair in zip(examples, encodings, strict=True)]
        starts, ends = torch.tensor(spans).unbind(1)
        return {"start_positions": starts, "end_positions": ends}

    def excerpt(self, example: Example) -> str:
        """The question, and the context from shortly before the answer."""
        before = max(0, example.inputs.get("answer_start", 0) - 60)
        context = example.inputs["context"][before:]
        return f"{example.inputs['question']} | {'…' if before else ''}{context}"

    def in_words(self, value: Any) -> str:
        """An answer, or the reference answers without those that are there twice."""
        answers = [value] if isinstance(value, str) else list(dict.fromkeys(value))
        return " / ".join(filter(None, answers)) or "no answer"

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """The likeliest spans of each window, `[score, first character, end]`, and the no-answer score."""
        starts, ends = outputs.start_logits.float(), outputs.end_logits.float()
        if not (starts.isfinite().all() and ends.isfinite().all()):
            raise ApproxError("its logits are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
        best = min(self._best, starts.shape[1])
        first, last = starts.topk(best).indices.tolist(), ends.topk(best).indices.tolist()
        starts, ends = starts.tolist(), ends.tolist()
        predictions = []
        for row, encoding in enumerate(encodings):
            offsets = encoding["offsets"]
            places = {index: span for index, span in enumerate(offsets) if span is not None}
            spans = [
                [starts[row][begin] + ends[row][end], places[begin][0], places[end][1]]
                for begin in first[row]
                for end in last[row]
                if begin in places and end in places and begin <= end < begin + self._longest
            ]
            spans.sort(key=lambda span: -span[0])
            predictions.append({"none": starts[row][0] + ends[row][0], "spans": spans[: self._best]})
        return predictions

    def combine(self, example: Example, parts: list[Any]) -> str:
        """The text of the likeliest span of all windows; empty for no answer."""
        spans = [span for part in parts for span in part["spans"]]
        if not spans:
            return ""
        score, begin, end = max(spans, key=lambda span: span[0])
        if self._version == 2 and min(part["none"] for part in parts) - score > self._margin:
            return ""
        return example.inputs["context"][begin:end]


def _answers(cell: Any, place: str) -> list[tuple[str, int | None]]:
    """Text and first character of each answer of a row."""
    if isinstance(cell, str):
        try:
            cell = parsed(cell) if cell[:1] in ("{", "[") else [cell] if cell.strip() else []
        except ValueError:
            # An answer may begin with a bracket.
            cell = [cell]
    if isinstance(cell, dict):
        texts, starts = cell.get("text"), cell.get("answer_start")
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
        starts = [None] * len(texts or ()) if starts is None else starts
        if isinstance(texts, list) and isinstance(starts, list) and len(starts) == len(texts):
            cell = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if isinstance(cell, list):
        pairs = [(one.get("text"), one.get("answer_start")) if isinstance(one, dict) else (one, None) for one in cell]
        found = [(text, start) for text, start in pairs if isinstance(text, str) and isinstance(start, int | None)]
        if len(found) == len(pairs):
            return found
    raise ApproxError(
        f'{place}: answers are {{"text": […], "answer_start": […]}}, a list of texts or a text, found {shown(cell)}. Fix or '
        "remove it.",
        Exit.UNAVAILABLE,
    )


def _check_types(title: Any, context: Any, question: Any, answers: list[tuple[Any, Any]]) -> None:
    if not all(isinstance(text, str) for text in (title, context, question, *(text for text, _ in answers))):
        raise TypeError("titles, contexts, questions and answers must be texts")
    if not all(isinstance(start, int | None) for _, start in answers):
        raise TypeError("answer_start must be a whole number")


def _tokens_of_answer(example: Example, encoding: Encoding) -> tuple[int, int]:
    """First and last token of the first answer in a window; 0 and 0 if the window does not contain the whole answer."""
    if not example.label:
        return 0, 0
    start = example.inputs.get("answer_start", example.inputs["context"].find(example.label[0]))
    end = start + len(example.label[0])
    places = [(index, span) for index, span in enumerate(encoding["offsets"]) if span is not None]
    first = [index for index, span in places if span[0] <= start < span[1]]
    last = [index for index, span in places if span[0] < end <= span[1]]
    return (first[0], last[-1]) if first and last else (0, 0)
