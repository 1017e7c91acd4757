"""Transcription of recordings by a model with a CTC head, or by Whisper, scored by word error rate.

Source: Graves et al., 2006, "Connectionist Temporal Classification", ICML; Baevski et al., 2020, "wav2vec 2.0", arXiv
2006.11477.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks import seq2seq_speech
from approx.tasks.beam_search import WordBonus, beam_search
from approx.tasks.head import CTC, SPEECH_SEQ2SEQ, Head
from approx.tasks.ngram import read_ngram
from approx.tasks.padding import padded_labels
from approx.tasks.recording import Recording
from approx.tasks.settings import names_setting, number_setting, switch_setting, whole_setting
from approx.tasks.table import Row, text_of
from approx.tasks.task import Encoding, Example, Groups, Split, Task, doubling
from approx.text_file import words

RATE = 16_000
"""Sampling rate of the models, in samples per second."""
# Frames per second, and samples per frame, of Wav2Vec2 and HuBERT.
_FRAMES, _HOP = 50, 320
_FIRST_SLICE_SECONDS = 5


@dataclass(frozen=True)
class _Reader:
    """Feature extractor and tokenizer of a checkpoint; equal for checkpoints that can be compared."""

    sha256: str
    processor: Any = field(compare=False, repr=False)


class Transcription(Task):
    """The text of a recording (`Example.inputs`: `recording`, an `approx.tasks.recording.Recording`; the label is its text).

    Decoding is greedy, the likeliest character of every frame, or by beam search. A language model is used only if
    `ngram` names one, even if there is one next to the checkpoint.

    Tokens are frames of 20 ms, the positions of attention in Wav2Vec2 and HuBERT. Case is ignored, since vocabularies
    differ in it: predictions are in upper case, and labels must be.

    A model with an attention mask takes batches of mixed lengths. One without (its first layer is normalised over time,
    `feat_extract_norm: group`) would see the padding, so its batches have recordings of one length only.

    Models with a decoder, such as Whisper, write the text token by token from recordings of up to 30 seconds;
    punctuation does not count.

    Args:
        beams: Number of beams; 1 is greedy.
        ngram: An n-gram model of words in the ARPA format, .arpa or .arpa.gz, that scores the beams.
        ngram_weight: Weight of its log probabilities.
        word_reward: Bonus in nats for each word, which makes up for its preference for few words; only with an n-gram
            model.
        language: Language that a multilingual model with a decoder writes, such as en; None lets the model decide.
        untranscribed: Also read recordings without a transcript, which `transfer` and `distill` train on.

    Raises:
        ApproxError: if a setting is out of range, or the n-gram model cannot be read.
    """

    head: ClassVar[Head] = CTC
    groups: ClassVar[Groups] = Groups("speaker", "recordings without a group are of speakers that are not known")
    metrics = ("wer", "cer")
    sliced_by: ClassVar[str] = "seconds"
    input_name: ClassVar[str] = "input_values"
    input_per_token: ClassVar[int] = _HOP

    fields = ("audio", "text")

    def __init__(
        self,
        beams: int = 1,
        ngram: str | None = None,
        ngram_weight: float = 0.5,
        word_reward: float = 1.5,
        language: str | None = None,
        untranscribed: bool = False,
    ) -> None:
        self._beams = whole_setting(self.name, "beams", beams, 1)
        if ngram is not None and beams == 1:
            raise ApproxError(f"{self.name} uses an n-gram model only with several beams. Set beams, e.g. beams=32.")
        self._ngram_weight = number_setting(self.name, "ngram_weight", ngram_weight, -math.inf, math.inf)
        self._word_reward = number_setting(self.name, "word_reward", word_reward, -math.inf, math.inf)
        self._ngram = None if ngram is None else read_ngram(Path(ngram))
        self._language = None if language is None else names_setting(self.name, "language", language)[0]
        self.untranscribed = switch_setting(self.name, "untranscribed", untranscribed)

    def from_cells(self, cells: dict[str, Any], row: Row) -> tuple[dict[str, Any], Any]:
        """The recording, by its path or its bytes, and its text."""
        recording = Recording.of(f"the recording of {row.place}", row.file(cells["audio"]))
        return {"recording": recording}, " ".join(words(text_of(cells["text"], row.place).upper()))

    def load(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Load a split, as any task; recordings without words are counted, since an error rate divides by words.

        Raises:
            ApproxError: as for any task, or if no recording has words.
        """
        made = super().load(data, split, limit, streaming=streaming)
        silent = sum(example.label == "" for example in made.examples)
        if silent == len(made.examples):
            raise ApproxError(
                f"{self.name}: none of the {silent} transcripts has words, so there is no error rate. Name their "
                "column with --columns text=NAME, or give recordings of speech.",
                Exit.UNAVAILABLE,
            )
        return replace(made, notes=(*made.notes, f"without words: {silent}")) if silent else made

    def writes(self, model: Any) -> bool:
        """Whether a model writes its text with a decoder, such as Whisper."""
        return SPEECH_SEQ2SEQ.is_of(type(model)) and model.main_input_name == "input_features"

    def check(self, model: Any) -> None:
        """Raise if the model has neither a CTC head with an output for the blank nor a decoder."""
        if self.writes(model):
            if self._ngram is not None:
                raise ApproxError(
                    f"An n-gram model fits a CTC head, but the model is a {type(model).__name__}. Leave it out."
                )
            return
        super().check(model)
        config = model.config
        if config.pad_token_id is None or not 0 <= config.pad_token_id < config.vocab_size:
            raise ApproxError(
                f"The CTC head has {config.vocab_size} outputs, but its blank, pad_token_id in config.json, is "
                f"{config.pad_token_id}. Use a checkpoint fine-tuned on speech.",
                Exit.UNSUPPORTED,
            )

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Encode the recording with its length at 16 kHz, cut to `max_length` frames; `collate` decodes it."""
        reader = _reader(processor)
        samples = example.inputs["recording"].samples_at(RATE)
        samples = samples if max_length is None else min(samples, max_length * _HOP)
        if seq2seq_speech.pads_to_one_length(processor.feature_extractor):
            seq2seq_speech.refuse_long(processor.feature_extractor, samples, example.inputs["recording"].name)
        return [{"recording": example.inputs["recording"], "samples": samples, "reader": reader}]

    def tokens(self, encoding: Encoding) -> int:
        """Frames of 20 ms, rounded up."""
        return -(-encoding["samples"] // _HOP)

    def positions(self, encoding: Encoding, config: Any) -> int:
        """Output frames of the convolutions; of a model that hears all recordings at one length, that length."""
        return getattr(config, "max_source_positions", None) or _outputs_of(encoding["samples"], config)

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int:
        """The exact length for a model that does not mask padding."""
        if seq2seq_speech.pads_to_one_length(processor.feature_extractor):
            return 0
        masked = processor.feature_extractor.return_attention_mask and config.feat_extract_norm == "layer"
        # With an adapter, the positions of padding in the outputs are unknown here.
        return 0 if masked and not getattr(config, "add_adapter", False) else encoding["samples"]

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Decode and pad: `input_values` [B, samples], and a mask of the same shape if the checkpoint takes one.

        Models with a decoder take `input_features` [B, bands, frames].
        """
        sounds = [one["recording"].decoded(RATE)[: one["samples"]] for one in encodings]
        if seq2seq_speech.pads_to_one_length(processor.feature_extractor):
            return seq2seq_speech.features(processor.feature_extractor, sounds)
        return dict(processor.feature_extractor(sounds, sampling_rate=RATE, padding=True, return_tensors="pt"))

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """`labels` [B, S]: the characters of each text, in the case of the checkpoint's vocabulary."""
        tokenizer = processor.tokenizer
        if seq2seq_speech.pads_to_one_length(processor.feature_extractor):
            return seq2seq_speech.targets([example.label.lower() for example in examples], tokenizer, config)
        upper = any(token.isupper() for token in tokenizer.get_vocab() if len(token) == 1)
        texts = [example.label if upper else example.label.lower() for example in examples]
        return {"labels": padded_labels([tokenizer(text)["input_ids"] for text in texts])}

    def imitated(self, model: Any, batch: dict[str, Any], processor: Any) -> dict[str, Any]:
        """`labels` [B, S]: what a model with a decoder writes, with its own case and punctuation."""
        texts = seq2seq_speech.as_written(self.outputs(model, batch), processor.tokenizer)
        return seq2seq_speech.targets(texts, processor.tokenizer, model.config)

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        """The tokens that a model with a decoder writes; otherwise the outputs of a forward pass."""
        if "input_features" in batch:
            return seq2seq_speech.written(model, batch, self._beams, self._language)
        return super().outputs(model, batch)

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[str]:
        """The text of each row without repetitions and blanks, in upper case."""
        tokenizer = encodings[0]["reader"].processor.tokenizer
        if seq2seq_speech.pads_to_one_length(encodings[0]["reader"].processor.feature_extractor):
            return seq2seq_speech.texts(outputs, tokenizer)
        if outputs.logits.shape[-1] > len(tokenizer) or tokenizer.pad_token_id != config.pad_token_id:
            raise ApproxError(
                f"its {outputs.logits.shape[-1]} outputs with the blank {config.pad_token_id} do not match the "
                f"{len(tokenizer)} characters of the tokenizer with the blank {tokenizer.pad_token_id}. Put the "
                "model's own tokenizer into its folder.",
                Exit.UNAVAILABLE,
            )
        texts = []
        for logits, one in zip(outputs.logits.float(), encodings, strict=True):
            frames = logits[: _outputs_of(one["samples"], config)]
            # The argmax of NaN is 0, which looks like a prediction.
            if not frames.isfinite().all():
                raise ApproxError("its logits are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
            texts.append((self._searched(frames, tokenizer) if self._beams > 1 else _greedy(frames, tokenizer)).upper())
        return texts

    def _searched(self, logits: Any, tokenizer: Any) -> str:
        frames = logits.double().log_softmax(-1).cpu().numpy()
        bonus = None
        if self._ngram is not None:
            spelling = tokenizer.convert_ids_to_tokens(list(range(frames.shape[1])))
            space = tokenizer.word_delimiter_token_id
            bonus = WordBonus(self._ngram, self._ngram_weight, self._word_reward, spelling, space)
        characters = beam_search(frames, tokenizer.pad_token_id, self._beams, bonus)
        # The blanks are already removed, so repeated characters must stay.
        return tokenizer.decode(list(characters), group_tokens=False)

    def correct(self, predictions: Sequence[Any], labels: Sequence[Any]) -> None:
        """Return None: words, not utterances, are correct or wrong."""

    def slices(
        self, labels: Sequence[Any], lengths: Sequence[int], predictions: Sequence[Any]
    ) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
        """Slice by the length of the recording in seconds."""
        seconds = [length // _FRAMES for length in lengths]
        for start, end in doubling(max(seconds), _FIRST_SLICE_SECONDS):
            rows = [row for row, length in enumerate(seconds) if start <= length < end]
            if rows:
                yield start, end, [predictions[row] for row in rows], [labels[row] for row in rows]


def _greedy(logits: Any, tokenizer: Any) -> str:
    return tokenizer.decode(logits.argmax(-1).tolist())


@functools.lru_cache(maxsize=8)
def _reader(processor: Any) -> _Reader:
    """The reader of a checkpoint's processor; raises if it is not for speech."""
    extractor, tokenizer = (getattr(processor, part, None) for part in ("feature_extractor", "tokenizer"))
    if tokenizer is None or extractor is None or not hasattr(extractor, "return_attention_mask"):
        raise ApproxError(
            f"The checkpoint has a {type(processor).__name__} instead of a speech processor: transcribing needs a "
            "feature extractor (preprocessor_config.json) and a tokenizer (vocab.json, tokenizer_config.json) next to "
            "the weights.",
            Exit.UNAVAILABLE,
        )
    if extractor.sampling_rate != RATE:
        raise ApproxError(
            f"The checkpoint takes {extractor.sampling_rate:,} samples per second; only {RATE:,} is supported. Use a "
            "checkpoint for that rate.",
            Exit.UNSUPPORTED,
        )
    hearing = (getattr(extractor, "do_normalize", None), extractor.padding_value, extractor.return_attention_mask)
    spelling = (type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map)
    return _Reader(hashlib.sha256(repr((hearing, spelling)).encode()).hexdigest(), processor)


def _outputs_of(samples: int, config: Any) -> int:
    """Output frames of the convolutions for a number of samples."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples
