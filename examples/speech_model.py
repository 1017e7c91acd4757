"""Train a small Wav2Vec2 with a CTC task head on synthetic speech, and write the speech to measure it on.

    python examples/speech_model.py -o runs/speech --reviews ../shared/data/imdb/train.jsonl.gz \\
        --librispeech ../shared/data/librispeech

`espeak-ng` reads sentences of real reviews aloud, in several voices, accents, pitches and speeds. Sentences are short
and have frequent words only. The utterances of three speakers of LibriSpeech are trained on as well. The folders, in
LibriSpeech's layout:

- `model`: the checkpoint;
- `train`: what it was trained on;
- `new-voices`: other sentences, in voices that it was not trained on;
- `new-speakers`: utterances of other speakers of LibriSpeech.

A model of this size that has heard hours of synthetic speech, and minutes of real speech, recognises hardly any real
speech. It shows what a conversion changes in a working Wav2Vec2, and no more. Training takes about 75 minutes on
one core that multiplies bfloat16, and twice as long on others.
"""

import argparse
import gzip
import hashlib
import json
import re
import shutil
import string
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from scipy.signal import resample_poly
from torch import nn
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2Processor,
)

from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing
from approx.tasks.librispeech import LibriSpeech
from approx.tasks.task import Example
from approx.tasks.transcription import RATE
from approx_kernels.dispatch.findings import multiplies_bfloat16

STEPS, BATCH, LEARNING, WARM_UP = 4000, 16, 1e-3, 200
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "|")
ACCENTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-x-gbclan")
VOICES = ("m1", "m2", "m3", "m5", "m7", "f1", "f2", "f3", "f5")
NEW_VOICES = ("m4", "m6", "f4")
# Words per minute, and espeak-ng's unit of pitch.
SPEEDS, PITCHES = (130, 190), (30, 70)
UTTERANCES, NEW_UTTERANCES = 16_000, 300
# Sentences of this many words, all of them among the most frequent ones.
WORDS, FREQUENT = (3, 10), 3000
# Speakers of LibriSpeech that are held out: two of test-other, and those of test-clean.
NEW_SPEAKERS = ("3331", "533")
# Real utterances are few, so each stands in the training set several times.
REPEATED = 8
# Filters of the first layer: frequencies, and the phases of each.
FREQUENCIES, PHASES = 40, 4
WINDOW, HOP = 400, 160


class Utterance(NamedTuple):
    """A sentence and the voice that reads it."""

    speaker: str
    text: str
    voice: str
    speed: int
    pitch: int


def sentences(reviews: Path) -> list[str]:
    """Short sentences of frequent words, in lower case, in an order that depends on the sentence alone."""
    with gzip.open(reviews, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"].lower() for line in lines]
    counts = Counter(word for text in texts for word in re.findall(r"[a-z']+", text))
    frequent = {word for word, _ in counts.most_common(FREQUENT) if word.strip("'") == word}
    low, high = WORDS
    found = {
        " ".join(words)
        for text in texts
        for sentence in re.split(r"[.!?]+", text)
        if re.fullmatch(r"[a-z' ]+", sentence.strip())
        and low <= len(words := sentence.split()) <= high
        and frequent.issuperset(words)
    }
    return sorted(found, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())


def cast(texts: Sequence[str], voices: Sequence[str], seed: int) -> Iterator[Utterance]:
    """Give each sentence a voice, an accent, a speed and a pitch."""
    random = np.random.default_rng(seed)
    for text in texts:
        voice, accent = (int(random.integers(len(choices))) for choices in (voices, ACCENTS))
        speed, pitch = (int(random.integers(low, high + 1)) for low, high in (SPEEDS, PITCHES))
        # In LibriSpeech, a speaker is a number.
        speaker = f"{9000 + 10 * (ord(voices[voice][0]) * 10 + int(voices[voice][1:])) + accent}"
        yield Utterance(speaker, text, f"{ACCENTS[accent]}+{voices[voice]}", speed, pitch)


def speak(folder: Path, utterances: Sequence[Utterance]) -> None:
    """Write utterances as LibriSpeech does: speaker/chapter/speaker-chapter-number.flac, and one transcript per chapter."""
    counts: Counter[str] = Counter()
    transcripts: dict[str, list[str]] = {}
    jobs = []
    for one in utterances:
        name = f"{one.speaker}-0-{counts[one.speaker]:05d}"
        counts[one.speaker] += 1
        transcripts.setdefault(one.speaker, []).append(f"{name} {one.text.upper()}")
        (folder / one.speaker / "0").mkdir(parents=True, exist_ok=True)
        jobs.append((one, folder / one.speaker / "0" / f"{name}.flac"))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: _say(*job), jobs))
    for speaker, lines in transcripts.items():
        (folder / speaker / "0" / f"{speaker}-0.trans.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _say(one: Utterance, file: Path) -> None:
    command = ["espeak-ng", "-v", one.voice, "-s", f"{one.speed}", "-p", f"{one.pitch}", "-w", f"{file}.wav", one.text]
    subprocess.run(command, check=True)
    sound, rate = soundfile.read(f"{file}.wav", dtype="float32")
    Path(f"{file}.wav").unlink()
    soundfile.write(file, resample_poly(sound, RATE, rate), RATE)


def copy_speakers(librispeech: Path, folder: Path, *, held_out: bool) -> None:
    """Copy the speakers of LibriSpeech that are held out, or the others."""
    for split in ("test-other", "test-clean", "dev-clean"):
        for speaker in sorted((librispeech / split).glob("*")):
            if held_out == (split == "test-clean" or speaker.name in NEW_SPEAKERS):
                shutil.copytree(speaker, folder / speaker.name)


def make_processor() -> Wav2Vec2Processor:
    """Letters, the apostrophe and the word boundary; normalised audio, with an attention mask."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "vocab.json"
        vocabulary = (*SPECIAL, *string.ascii_uppercase, "'")
        path.write_text(json.dumps({character: index for index, character in enumerate(vocabulary)}))
        tokenizer = Wav2Vec2CTCTokenizer(str(path))
    return Wav2Vec2Processor(Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=True), tokenizer)


def make_model(processor: Any) -> Wav2Vec2ForCTC:
    """The untrained model: frames of 20 ms like its larger relatives, six layers of four heads.

    The first layer begins as a bank of windowed sinusoids on the mel scale, in four phases, so that little speech is
    enough.

    Source: Zeghidour et al. 2018, "Learning Filterbanks from Raw Speech for Phone Recognition", arXiv 1711.01161;
    departs from it in the non-linearity, which is Wav2Vec2's own.
    """
    config = Wav2Vec2Config(
        vocab_size=len(processor.tokenizer),
        pad_token_id=processor.tokenizer.pad_token_id,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        conv_dim=(FREQUENCIES * PHASES, 256),
        conv_kernel=(WINDOW, 3),
        conv_stride=(HOP, 2),
        conv_bias=True,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=16,
        hidden_dropout=0.05,
        attention_dropout=0.05,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
    )
    model = Wav2Vec2ForCTC(config)
    first: Any = model.get_submodule("wav2vec2.feature_extractor.conv_layers.0.conv")
    with torch.no_grad():
        first.weight.copy_(sinusoids()[:, None])
        first.bias.zero_()
    return model


def sinusoids() -> torch.Tensor:
    """Windowed sinusoids from 80 Hz to 7,600 Hz, equally spaced in mel, [filters, WINDOW]."""
    low, high = (2595 * np.log10(1 + hertz / 700) for hertz in (80, 7600))
    hertz = 700 * (10 ** (np.linspace(low, high, FREQUENCIES) / 2595) - 1)
    phases = np.arange(PHASES) * 2 * np.pi / PHASES
    seconds = np.arange(WINDOW) / RATE
    waves = np.cos(2 * np.pi * hertz[:, None, None] * seconds + phases[:, None]) * np.hanning(WINDOW)
    return torch.tensor(waves.reshape(-1, WINDOW) / np.sqrt(WINDOW), dtype=torch.float32)


def train(model: Wav2Vec2ForCTC, processor: Any, examples: list[Example], steps: int, seed: int) -> None:
    """Train in place, on batches of utterances of similar length."""
    random = np.random.default_rng(seed)
    sounds = [example.inputs["recording"].decoded(RATE) for example in examples]
    order = sorted(range(len(sounds)), key=lambda row: len(sounds[row]))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING, betas=(0.9, 0.98), weight_decay=0.01)
    turns = [batch for _ in range(-(-steps // len(batches))) for batch in random.permutation(len(batches))]
    started = time.monotonic()
    model.train()
    for step, turn in enumerate(turns[:steps], start=1):
        rows = batches[turn]
        inputs = processor.feature_extractor(
            [sounds[row] for row in rows], sampling_rate=RATE, padding=True, return_tensors="pt"
        )
        spelled = processor.tokenizer([examples[row].label for row in rows], padding=True, return_tensors="pt")
        labels = spelled["input_ids"].masked_fill(spelled["attention_mask"] == 0, -100)
        optimizer.param_groups[0]["lr"] = LEARNING * min(step / WARM_UP, 2 * (steps - step + 1) / steps, 1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bfloat16()):
            loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d} of {steps}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


def main() -> None:
    """Speak, train and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--reviews", type=Path, required=True, help="texts to read aloud: train.jsonl.gz of IMDb")
    parser.add_argument("--librispeech", type=Path, required=True, help="the folder LibriSpeech")
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    refuse_existing(arguments.out, force=arguments.force)
    torch.manual_seed(arguments.seed)
    texts = sentences(arguments.reviews)
    print(f"{len(texts):,} sentences", flush=True)
    processor = make_processor()
    model = make_model(processor)
    with atomic_folder(arguments.out, force=arguments.force) as folder:
        spoken = texts[NEW_UTTERANCES : NEW_UTTERANCES + UTTERANCES]
        speak(folder / "new-voices", list(cast(texts[:NEW_UTTERANCES], NEW_VOICES, arguments.seed + 1)))
        speak(folder / "train", list(cast(spoken, VOICES, arguments.seed)))
        copy_speakers(arguments.librispeech, folder / "new-speakers", held_out=True)
        copy_speakers(arguments.librispeech, folder / "train", held_out=False)
        examples = LibriSpeech("train-clean-100").load(folder / "train").examples
        real = [example for example in examples if int(example.group or 0) < 9000]
        print(f"{len(examples):,} utterances, {len(real)} of them real", flush=True)
        train(model, processor, [*examples, *real * (REPEATED - 1)], STEPS, arguments.seed)
        model.save_pretrained(folder / "model")
        processor.save_pretrained(folder / "model")


if __name__ == "__main__":
    main()
