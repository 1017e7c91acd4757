"""Transcription by an encoder and a decoder, such as Whisper: the model writes the text token by token.

Source: Radford et al., 2022, "Robust Speech Recognition via Large-Scale Weak Supervision", arXiv 2212.04356.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from approx.errors import ApproxError, Exit
from approx.tasks.padding import padded_labels

# Written text has marks that transcripts of read speech lack; apostrophes belong to words.
_MARKS = re.compile(r"[^\w\s']|_")


def pads_to_one_length(extractor: Any) -> bool:
    """Whether a feature extractor pads all recordings to one length, as that of Whisper."""
    return "input_features" in getattr(extractor, "model_input_names", ()) and hasattr(extractor, "n_samples")


def refuse_long(extractor: Any, samples: int, name: str) -> None:
    """Refuse a recording that a model would not hear to its end.

    Raises:
        ApproxError: if it is longer than the extractor's length.
    """
    if samples > extractor.n_samples:
        rate = extractor.sampling_rate
        raise ApproxError(
            f"{name} has {samples / rate:.1f} seconds, but the checkpoint hears {extractor.n_samples / rate:.0f} at a "
            "time. Cut it, or leave it out.",
            Exit.UNSUPPORTED,
        )


def features(extractor: Any, sounds: Sequence[Any]) -> dict[str, Any]:
    """Spectrograms of one length: `input_features` [B, bands, frames]."""
    made = extractor(sounds, sampling_rate=extractor.sampling_rate, return_tensors="pt")
    return {"input_features": made["input_features"]}


def written(model: Any, batch: Mapping[str, Any], beams: int, language: str | None) -> Any:
    """Token ids that the model writes, [B, L]: the likeliest, or the best of several beams."""
    # The decoder's positions also hold the prompt of up to four tokens.
    room = model.config.max_target_positions - 4
    spoken = {} if language is None else {"language": language, "task": "transcribe"}
    return model.generate(**batch, do_sample=False, num_beams=beams, max_new_tokens=room, **spoken)


def texts(ids: Any, tokenizer: Any) -> list[str]:
    """The words of each row in upper case, without punctuation."""
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [" ".join(_MARKS.sub(" ", text).upper().split()) for text in texts]


def as_written(ids: Any, tokenizer: Any) -> list[str]:
    """The text of each row with its case and punctuation."""
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def targets(texts: Sequence[str], tokenizer: Any, config: Any) -> dict[str, Any]:
    """`labels` [B, L]: the tokens of each text, as transformers' model shifts them."""
    rows = [tokenizer(text)["input_ids"] for text in texts]
    # The model puts this token before them itself.
    return {"labels": padded_labels([row[1:] if row[:1] == [config.decoder_start_token_id] else row for row in rows])}
