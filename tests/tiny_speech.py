"""A tiny speech recogniser, its processor, and recordings in LibriSpeech's layout."""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

from approx.errors import ApproxError, Exit
from zoo import tiny

# One frame per 20 ms, as in Wav2Vec2 and HuBERT.
_FRAMES: dict[str, Any] = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (10, 8, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
}
_NORMS = {"layer": {}, "group": {"feat_extract_norm": "group", "do_stable_layer_norm": False}}


def recogniser(norm: str = "layer", family: str = "Wav2Vec2", seed: int = 0, **changes: Any) -> Any:
    return tiny(f"{family}ForCTC", seed, **{**_FRAMES, **_NORMS[norm], **changes})


def speech_processor(
    folder: Path, norm: str = "layer", characters: str = string.ascii_uppercase + "'", **changes: Any
) -> Any:
    """A processor with 32 characters; its vocabulary is written to the folder."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", "|", *characters]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({one: index for index, one in enumerate(vocabulary)}))
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=norm == "layer", do_normalize=True, **changes)
    return Wav2Vec2Processor(extractor, Wav2Vec2CTCTokenizer(str(folder / "vocab.json")))


def sound(seconds: float, rate: int = 16_000, tone: float = 440.0) -> np.ndarray:
    """A tone of varying amplitude with a little noise."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(int(tone)).normal(size=len(time))
    return (0.4 * np.sin(2 * np.pi * tone * time) * np.sin(2 * np.pi * time) + 0.02 * noise).astype(np.float32)


def write_utterances(root: Path, spoken: dict[str, tuple[str, np.ndarray]], suffix: str = ".flac", rate: int = 16_000):
    """Write id -> (words, sound) in the official layout below `root`, the folder of a split."""
    for name, (words, samples) in spoken.items():
        speaker, chapter, _ = name.split("-")
        folder = root / speaker / chapter
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / f"{name}{suffix}", samples, rate)
        with (folder / f"{speaker}-{chapter}.trans.txt").open("a") as file:
            file.write(f"{name} {words}\n")
    return root


def some_utterances(count: int = 7) -> dict[str, tuple[str, np.ndarray]]:
    """Utterances of three speakers and several lengths, two of them equally long."""
    lengths = [0.5, 0.9, 0.5, 1.3, 0.7, 1.1, 0.6]
    words = ["A B", "HELLO WORLD", "GOOD", "IT'S A FILM", "YES", "NO MORE THAN THAT", "WHY"]
    return {
        f"{10 + row % 3}-7-{row:04}": (words[row % 7], sound(lengths[row % 7], tone=300 + 40 * row))
        for row in range(count)
    }


def refused(text: str, exit_code: Exit, action: Callable[[], Any]) -> None:
    with pytest.raises(ApproxError, match=text) as caught:
        action()
    assert caught.value.exit_code == exit_code
