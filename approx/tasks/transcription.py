"""Transcription of recordings by a model with a CTC head, scored by word error rate.

Source: Graves et al., 2006, "Connectionist Temporal Classification", ICML; Baevski et al., 2020, "wav2vec 2.0", arXiv 2006.11477.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import ApproxError, Exit
from approx.tasks.beam_search import WordBonus, beam_search
from approx.tasks.head import CTC, Head
from approx.tasks.ngram import read_ngram
from approx.tasks.padding import padded_labels
from approx.tasks.settings import number_setting, whole_setting
from approx.tasks.task import Encoding, Example, Task, doubling

RATE = 16_000
"""Samples a second that models read."""
# Frames a second, and samples of one, of Wav2Vec2 and HuBERT.
_FRAMES, _HOP = 50, 320
_FIRST_SLICE_SECONDS = 5


@dataclass(frozen=True)
class _Reader:
    """How a checkpoint reads sound and spells words: checkpoints that are compared have the same."""

    sha256: str
    processor: Any = field(compare=False, repr=False)


class Transcription(Task):
    """Words for a recording (`Example.inputs`: `recording`, an `approx.tasks.recording.Recording`; the label is its text).

    Decoding is greedy, the likeliest character of every frame, unless beams are asked for; a language model is asked where one
    is named, and not because it lies beside a checkpoint.

    Tokens are frames of 20 ms, what the attention of Wav2Vec2 and HuBERT sees. Words are compared without regard to case, in
    which vocabularies differ: predictions are in upper case, and labels have to be.

    A model that takes an attention mask reads batches of several lengths. One that takes none (its first layer is normalised
    over time, `feat_extract_norm: group`) would hear the padding, so its batches hold recordings of one length only.

    Args:
        beams: Beginnings of a text that are followed; 1 is greedy.
        ngram: A model of words in the ARPA format, .arpa or .arpa.gz, that has a say in what the beams are worth.
        ngram_weight: Of its log probabilities.
        word_reward: In nats for each word, against its preference for few words; only beside an n-gram model.

    Raises:
        ApproxError: if a setting is out of range, or the model cannot be read.
    """

    head: ClassVar[Head] = CTC
    metrics = ("wer", "cer")
    sliced_by: ClassVar[str] = "seconds"
    input_name: ClassVar[str] = "input_values"

    def __init__(
        self, beams: int = 1, ngram: str | None = None, ngram_weight: float = 0.5, word_reward: float = 1.5
    ) -> None:
        self._beams = whole_setting(self.name, "beams", beams, 1)
        if ngram is not None and beams == 1:
            raise ApproxError(
                f"An n-gram model was given to {self.name}, but decoding by one beam asks none. Set beams, e.g. beams=32."
            )
        self._ngram_weight = number_setting(self.name, "ngram_weight", ngram_weight, -math.inf, math.inf)
        self._word_reward = number_setting(self.name, "word_reward", word_reward, -math.inf, math.inf)
        self._ngram = None if ngram is None else read_ngram(Path(ngram))

    def check(self, model: Any) -> None:
        """Refuse a model without a CTC head, or whose head has no output for the blank between characters."""
        super().check(model)
        config = model.config
        if config.pad_token_id is None or not 0 <= config.pad_token_id < config.vocab_size:
            raise ApproxError(
                f"The CTC head has {config.vocab_size} outputs, but its blank, pad_token_id in config.json, is "
                f"{config.pad_token_id}. Use a checkpoint fine-tuned on speech.",
                Exit.UNSUPPORTED,
            )

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Note how long the recording is at 16 kHz, cut to `max_length` frames; `collate` decodes it."""
        samples = example.inputs["recording"].samples_at(RATE)
        samples = samples if max_length is None else min(samples, max_length * _HOP)
        return [{"recording": example.inputs["recording"], "samples": samples, "reader": _reader(processor)}]

    def tokens(self, encoding: Encoding) -> int:
        """Frames of 20 ms, the last one perhaps not full."""
        return -(-encoding["samples"] // _HOP)

    def positions(self, encoding: Encoding, config: Any) -> int:
        """Frames that the convolutions make of the recording."""
        return _outputs_of(encoding["samples"], config)

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int:
        """The exact length, where no mask keeps a model from hearing the padding."""
        masked = processor.feature_extractor.return_attention_mask and config.feat_extract_norm == "layer"
        # Behind an adapter it is not known here which outputs are padding.
        return 0 if masked and not getattr(config, "add_adapter", False) else encoding["samples"]

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Decode and pad: `input_values` [B, samples], and a mask of the same shape where the checkpoint takes one."""
        sounds = [one["recording"].decoded(RATE)[: one["samples"]] for one in encodings]
        return dict(processor.feature_extractor(sounds, sampling_rate=RATE, padding=True, return_tensors="pt"))

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """`labels` [B, S]: the characters of each text, in the case of the checkpoint's vocabulary."""
        tokenizer = processor.tokenizer
        upper = any(token.isupper() for token in tokenizer.get_vocab() if len(token) == 1)
        texts = [example.label if upper else example.label.lower() for example in examples]
        return {"labels": padded_labels([tokenizer(text)["input_ids"] for text in texts])}

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[str]:
        """The text of each row, repetitions and blanks taken out, in upper case."""
        tokenizer = encodings[0]["reader"].processor.tokenizer
        if outputs.logits.shape[-1] > len(tokenizer) or tokenizer.pad_token_id != config.pad_token_id:
            raise ApproxError(
                f"its {outputs.logits.shape[-1]} outputs with the blank {config.pad_token_id} are not the {len(tokenizer)} "
                f"characters of the tokenizer, whose blank is {tokenizer.pad_token_id}. Put the model's own tokenizer there.",
                Exit.UNAVAILABLE,
            )
        said = []
        for logits, one in zip(outputs.logits.float(), encodings, strict=True):
            heard = logits[: _outputs_of(one["samples"], config)]
            # An argmax over NaN is the first character, and would pass for a prediction.
            if not heard.isfinite().all():
                raise ApproxError("its logits are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
            said.append((self._searched(heard, tokenizer) if self._beams > 1 else _greedy(heard, tokenizer)).upper())
        return said

    def _searched(self, logits: Any, tokenizer: Any) -> str:
        frames = logits.double().log_softmax(-1).cpu().numpy()
        bonus = None
        if self._ngram is not None:
            spelling = tokenizer.convert_ids_to_tokens(list(range(frames.shape[1])))
            space = tokenizer.word_delimiter_token_id
            bonus = WordBonus(self._ngram, self._ngram_weight, self._word_reward, spelling, space)
        found = beam_search(frames, tokenizer.pad_token_id, self._beams, bonus)
        # Two like characters in a row are two: the blank between them is gone.
        return tokenizer.decode(list(found), group_tokens=False)

    def correct(self, predictions: Sequence[Any], labels: Sequence[Any]) -> None:
        """Right and wrong are matters of words, not of utterances."""

    def slices(
        self, labels: Sequence[Any], lengths: Sequence[int], predictions: Sequence[Any]
    ) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
        """By the length of the recording, in seconds."""
        seconds = [length // _FRAMES for length in lengths]
        for start, end in doubling(max(seconds), _FIRST_SLICE_SECONDS):
            rows = [row for row, length in enumerate(seconds) if start <= length < end]
            if rows:
                yield start, end, [predictions[row] for row in rows], [labels[row] for row in rows]


def _greedy(logits: Any, tokenizer: Any) -> str:
    return tokenizer.decode(logits.argmax(-1).tolist())


@functools.lru_cache(maxsize=8)
def _reader(processor: Any) -> _Reader:
    """What a checkpoint's processor is, if it is one for speech."""
    extractor, tokenizer = (getattr(processor, part, None) for part in ("feature_extractor", "tokenizer"))
    if tokenizer is None or extractor is None or not hasattr(extractor, "return_attention_mask"):
        raise ApproxError(
            f"The checkpoint has a {type(processor).__name__} and no processor for speech: transcribing needs a feature extractor "
            "(preprocessor_config.json) and a tokenizer (vocab.json, tokenizer_config.json) beside the weights.",
            Exit.UNAVAILABLE,
        )
    if extractor.sampling_rate != RATE:
        raise ApproxError(
            f"The checkpoint hears {extractor.sampling_rate:,} samples a second; {RATE:,} is what is supported. Use a checkpoint for "
            "that rate.",
            Exit.UNSUPPORTED,
        )
    hearing = (extractor.do_normalize, extractor.padding_value, extractor.return_attention_mask)
    spelling = (type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map)
    return _Reader(hashlib.sha256(repr((hearing, spelling)).encode()).hexdigest(), processor)


def _outputs_of(samples: int, config: Any) -> int:
    """Frames that the convolutions make of so many samples."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples
