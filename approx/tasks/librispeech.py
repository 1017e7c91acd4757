"""LibriSpeech: read speech with transcripts.

Read from the official folders (`*.trans.txt` next to FLAC or WAV) or from the hub; ids are the same either way.

Source: Panayotov et al., 2015, "LibriSpeech: an ASR corpus based on public domain audio books", ICASSP.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit
from approx.tasks.hub import load_rows, streamed
from approx.tasks.recording import Recording
from approx.tasks.settings import whole_setting
from approx.tasks.task import Example, Split, Tally
from approx.tasks.transcription import RATE, Transcription
from approx.text_file import lines, read_text, words

_HUB_DATASET = "openslr/librispeech_asr"
_SUFFIXES = (".flac", ".wav")

LIBRISPEECH = {
    "test-clean": ("clean", "test", 2620),
    "test-other": ("other", "test", 2939),
    "dev-clean": ("clean", "validation", 2703),
    "dev-other": ("other", "validation", 2864),
    "train-clean-100": ("clean", "train.100", 28539),
    "train-clean-360": ("clean", "train.360", 104014),
    "train-other-500": ("other", "train.500", 148688),
}
"""Official split -> configuration and split of the hub dataset, and its number of utterances."""


class LibriSpeech(Transcription):
    """One split of LibriSpeech. Recordings at other rates than 16 kHz are resampled, with a note.

    Args:
        split: A key of `LIBRISPEECH`.
        settings: Settings of `Transcription`: `beams`, `ngram`, `ngram_weight`, `word_reward`, `language`, `untranscribed`.
    """

    dataset = _HUB_DATASET

    def __init__(self, split: str, **settings: Any) -> None:
        self.name = f"librispeech/{split}"
        super().__init__(**settings)
        self._split = split

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load the utterances.

        Args:
            data: The folder `LibriSpeech`, the folder of the split, their parent, or any folder with transcripts in the
                same layout; None streams from the hub and keeps the encoded recordings in memory (350 MB for
                test-clean).
            split: The split in the task's name, or None.
            limit: Keep the first `limit` utterances.
            streaming: No effect: the hub dataset is always streamed, since a configuration has hundreds of hours.

        Raises:
            ApproxError: if a package, a folder or a recording is missing or damaged, or no utterance is left.
        """
        # A missing package must not show after hours of transcribing.
        for package in ("soundfile", "jiwer"):
            _needed(package)
        if limit is not None:
            whole_setting(self.name, "limit", limit, 1)
        # Training requests the split 'train', which has a longer name here.
        if split not in (None, self._split) and not (split == "train" and self._split.startswith("train-")):
            raise ApproxError(
                f"--split {split} contradicts the task {self.name}. Leave out --split, or change the split in the "
                "task's name."
            )
        notes, tally = [], Tally()
        if data is None:
            name, source, rows = self._split, _HUB_DATASET, self._hub_rows(tally)
        else:
            source = self._find(Path(data))
            name, rows = source.absolute().name, self._file_rows(source, tally)
        examples = list(islice(rows, limit))
        if not examples:
            raise ApproxError(f"{self.name}: 0 transcripts (*.trans.txt) in {source}.", Exit.UNAVAILABLE)
        rates = Counter(example.inputs["recording"].rate for example in examples)
        if others := sorted(rates.keys() - {RATE}):
            count = len(examples) - rates[RATE]
            notes.append(f"resampled to {RATE:,} Hz from {', '.join(f'{rate:,}' for rate in others)}: {count}")
        whole = name == self._split and len(examples) >= LIBRISPEECH[name][2]
        return Split(name, examples, not whole, tuple(notes), tally)

    def _find(self, data: Path) -> Path:
        if not data.is_dir():
            raise ApproxError(
                f"{self.name}: {data} is not a folder. Give the unpacked folder LibriSpeech or {self._split}.",
                Exit.UNAVAILABLE,
            )
        for folder in (data / "LibriSpeech" / self._split, data / self._split):
            if folder.is_dir():
                return folder
        named = data.absolute().name
        splits = [known for known in LIBRISPEECH for room in (data, data / "LibriSpeech") if (room / known).is_dir()]
        if named in LIBRISPEECH and named != self._split:
            splits = [named]
        if splits or not (any(data.rglob("*.trans.txt")) or (self.untranscribed and _recordings(data))):
            there = ", ".join(splits) or "no transcripts (*.trans.txt)"
            raise ApproxError(f"{self.name}: looked for {self._split} in {data}, found {there}.", Exit.UNAVAILABLE)
        return data

    def _file_rows(self, folder: Path, tally: Tally) -> Iterator[Example]:
        transcribed = set()
        for path in sorted(folder.rglob("*.trans.txt")):
            for number, name, text in _transcripts(path, tally, self.encoding):
                stored = [file for suffix in _SUFFIXES if (file := path.parent / (name + suffix)).is_file()]
                if not stored:
                    raise ApproxError(
                        f"{path}, line {number}: {name}.flac or {name}.wav is missing. Unpack the archive again, or "
                        "remove the line.",
                        Exit.UNAVAILABLE,
                    )
                transcribed.add(path.parent / name)
                tally.read += 1
                yield _example(name, text, Recording.of(str(stored[0]), stored[0]))
        # With a limit, this is not reached: the rest was not read.
        others = [path for path in _recordings(folder) if path.with_suffix("") not in transcribed]
        if not self.untranscribed:
            tally.skipped["recordings without a transcript"] += len(others)
            return
        for path in others:
            tally.read += 1
            yield _example(path.stem, None, Recording.of(str(path), path))

    def _hub_rows(self, tally: Tally) -> Iterator[Example]:
        from datasets import Audio

        config, split, _ = LIBRISPEECH[self._split]
        # Without streaming, the train splits of the configuration would be downloaded, too.
        rows = load_rows(_HUB_DATASET, config, split, streaming=True).cast_column("audio", Audio(decode=False))
        for row in streamed(rows, _HUB_DATASET):
            source = row["audio"]["bytes"] or Path(row["audio"]["path"])
            tally.read += 1
            yield _example(row["id"], row["text"], Recording.of(f"{row['id']} of {_HUB_DATASET}", source))


def _recordings(folder: Path) -> list[Path]:
    return sorted(path for suffix in _SUFFIXES for path in folder.rglob(f"*{suffix}"))


def _example(name: str, text: str | None, recording: Recording) -> Example:
    label = None if text is None else " ".join(words(text.upper()))
    # Utterances of one speaker are correlated; the id is speaker-chapter-number.
    return Example(name, {"recording": recording}, label, group=name.partition("-")[0])


def _transcripts(path: Path, tally: Tally, encoding: str | None) -> Iterator[tuple[int, str, str]]:
    """Line number, id and words of each utterance."""
    for number, line in enumerate(lines(read_text(path, encoding)), start=1):
        name, _, text = line.strip(" \t").partition(" ")
        if not text and name:
            raise ApproxError(
                f"{path}, line {number}: no words after the id '{name[:60]}'. Fix or remove the line.",
                Exit.UNAVAILABLE,
            )
        if name:
            yield number, name, text
        else:
            tally.skipped["empty lines"] += 1


def _needed(package: str) -> None:
    try:
        importlib.import_module(package)
    except (ImportError, OSError) as error:
        raise ApproxError(
            f"Speech needs the package {package}, which cannot be loaded ({error}). Install it: pip install {package}.",
            Exit.MISSING,
        ) from None
