"""One input that a model attends over: a text, a recording or an image, and what its positions are called."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from approx.checkpoints import checkpoint
from approx.errors import ApproxError
from approx.measuring.prediction import check_text, text_of
from approx.planning import positions
from approx.publishing.attention import Axis
from approx.tasks import seq2seq_speech
from approx.tasks.images import Picture
from approx.tasks.recording import Recording
from approx.tasks.transcription import RATE

# Kind of input -> the options that give it, and what such a model reads.
_READS = {
    "input_ids": ("text", "text"),
    "input_values": ("audio", "recordings"),
    "input_features": ("audio", "recordings"),
    "pixel_values": ("image", "images"),
}
# Most tokens that a decoder writes to be looked at.
_WRITTEN = 128
# How much of a text is quoted.
_QUOTED = 300
# Space and line breaks have no picture of their own.
_UNSEEN = {" ": "␣", "\n": "↵", "\t": "⇥", "": "∅"}


@dataclass(frozen=True)
class Read:
    """One input of a model.

    Attributes:
        inputs: Keyword arguments of its forward, of one sample.
        about: What was read, in words.
        text: The text, or what a decoder wrote; empty for an image.
        tokens: The text of each token that the encoder, or a decoder alone, reads; empty for sound and images.
        seconds: Seconds of a position of the encoder, of sound.
        heard: Seconds of the recording.
        decoder: The text of each token that the decoder of an encoder-decoder reads; empty without one.
        written: The text of the token that it writes at each of these.
    """

    inputs: dict[str, Tensor]
    about: str
    text: str
    tokens: list[str]
    seconds: float | None = None
    heard: float | None = None
    decoder: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    def axis(self, length: int, *, block: int) -> Axis:
        """The positions of the encoder, or of a decoder alone."""
        if self.seconds is not None:
            labels = [f"{place * self.seconds:.2f} s" for place in range(length)]
            return Axis(labels, block, "frame", self.seconds)
        if len(self.tokens) == length:
            return Axis(self.tokens, block, "token")
        side = math.isqrt(length)
        first = ["[CLS]", "[DIST]"][: length - side * side] if length - side * side <= 2 else []
        cells = [f"{row + 1},{column + 1}" for row in range(side) for column in range(side)]
        if len(first) + len(cells) == length and not self.tokens:
            return Axis([*first, *cells], block, "patch")
        return Axis([str(place) for place in range(length)], block, "position")


def read(one: checkpoint.Checkpoint, *, text: str | None, audio: str | Path | None, image: str | Path | None) -> Read:
    """Read an input with the tokenizer or processor of a checkpoint; an encoder-decoder writes what its decoder reads.

    Args:
        one: The checkpoint.
        text: A text, or the path of a .txt file.
        audio: Path of a FLAC or WAV file.
        image: Path of an image.

    Raises:
        ApproxError: if not exactly one is given, it is not what the model reads, or it does not fit.
    """
    given = {name: value for name, value in (("text", text), ("audio", audio), ("image", image)) if value is not None}
    kind = one.model.main_input_name
    wanted, plural = _READS.get(kind, ("text", kind))
    reads = f"{one.source.name} reads {plural}"
    if len(given) != 1:
        found = f"{' and '.join(f'--{name}' for name in given)} were given" if given else "none was given"
        raise ApproxError(f"An input is needed, and {found}. {reads}: give one with --{wanted}.")
    ((name, value),) = given.items()
    if name != wanted:
        raise ApproxError(f"--{name} was given, but {reads}. Give one with --{wanted}.")
    reader = checkpoint.processor(one.source)
    device = one.model.device
    if wanted == "text":
        found = _text(one, reader, text_of(str(value)))
    elif wanted == "image":
        pixels = reader(images=[Picture.of(str(value), Path(value)).decoded()], return_tensors="pt")["pixel_values"]
        found = Read({kind: pixels.to(device, one.model.dtype)}, f"image {Path(value).name}", "", [])
    else:
        found = _sound(one, reader, Path(value))
    return _with_decoder(one, reader, found) if getattr(one.model.config, "is_encoder_decoder", False) else found


def _text(one: checkpoint.Checkpoint, tokenizer: Any, text: str) -> Read:
    check_text(one, text)
    ids = tokenizer(text, return_tensors="pt")["input_ids"].to(one.model.device)
    quoted = text if len(text) <= _QUOTED else text[: _QUOTED - 1] + "…"
    return Read({"input_ids": ids}, f"a text of {ids.shape[1]:,} tokens", quoted, pieces(tokenizer, ids[0].tolist()))


def _sound(one: checkpoint.Checkpoint, reader: Any, path: Path) -> Read:
    extractor = getattr(reader, "feature_extractor", reader)
    recording = Recording.of(str(path), path)
    sound, config, kind = recording.decoded(RATE), one.model.config, one.model.main_input_name
    heard = len(sound) / RATE
    about = f"recording {path.name} of {heard:.1f} seconds"
    if kind == "input_features":
        seq2seq_speech.refuse_long(extractor, recording.samples_at(RATE), str(path))
        seconds = extractor.n_samples / extractor.sampling_rate / config.max_source_positions
    else:
        seconds = positions.seconds_per_position(config, kind)
    made = extractor(sound, sampling_rate=RATE, return_tensors="pt")[kind]
    return Read({kind: made.to(one.model.device, one.model.dtype)}, about, "", [], seconds, heard)


def _with_decoder(one: checkpoint.Checkpoint, reader: Any, found: Read) -> Read:
    """Let the model write, and give its decoder what it wrote."""
    tokenizer = getattr(reader, "tokenizer", reader)
    steps: list[list[int]] = []
    last: list[int] = []

    def collect(module: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        ids = kwargs.get("decoder_input_ids")
        if ids is not None:
            row = ids[0].tolist()
            # A text that begins again: a model without a cache, or one that first tells the language.
            if row[0] == one.model.generation_config.decoder_start_token_id:
                steps.clear()
            steps.append(row)
            last[:] = [int(outputs.logits[0, -1].argmax())]

    if not one.model.can_generate():
        start = one.model.config.decoder_start_token_id or 0
        ids = [start]
        written = ids
    else:
        hook = one.model.register_forward_hook(collect, with_kwargs=True)
        limit = positions.limit(one.model.config)
        room = _WRITTEN if limit is None else min(_WRITTEN, limit - 4)
        try:
            with torch.inference_mode():
                one.model.generate(**found.inputs, do_sample=False, num_beams=1, max_new_tokens=room)
        finally:
            hook.remove()
        ids = [token for step in steps for token in step]
        # Whisper returns no token that ends a text, so the last one is that of the last step.
        written = [*ids[1:], *last]
    decoder = torch.tensor([ids], device=one.model.device)
    spoken = [token for token in written if token not in tokenizer.all_special_ids]
    text = tokenizer.decode([token for token in spoken if not is_special(tokenizer.decode([token]))]).strip()
    return Read(
        {**found.inputs, "decoder_input_ids": decoder},
        found.about,
        text if found.seconds is not None else found.text,
        found.tokens,
        found.seconds,
        found.heard,
        tuple(pieces(tokenizer, ids)),
        tuple(pieces(tokenizer, written, spaces=True)),
    )


def pieces(tokenizer: Any, ids: list[int], *, spaces: bool = False) -> list[str]:
    """The text of each token, without the spaces around it unless they are wanted."""
    made = [tokenizer.decode([token]) for token in ids]
    return [one if spaces else one.strip() or _UNSEEN.get(one, "␣") for one in made]


def words(tokens: tuple[str, ...]) -> list[tuple[str, list[int]]]:
    """Tokens joined to words, where one with a space before it begins one: the word, and the places of its tokens.

    Special tokens such as `<|endoftext|>` stand alone.
    """
    found: list[tuple[str, list[int]]] = []
    for place, token in enumerate(tokens):
        special = is_special(token)
        if not found or special or token[:1].isspace() or found[-1][0].startswith("<"):
            found.append((token.strip(), [place]))
        else:
            found[-1] = (found[-1][0] + token.strip(), [*found[-1][1], place])
    return found


def is_special(token: str) -> bool:
    """Whether a token is a sign to the model, such as `<|notimestamps|>`, and no part of a text."""
    return token.startswith("<|") or token in ("<s>", "</s>", "<pad>")
