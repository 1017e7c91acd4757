"""The tutorials, command by command, on small models and data with the names that the pages use."""

import csv
from pathlib import Path

import pytest
import soundfile
import torch

from test_docs import ROOT, blocks, commands, run
from tiny_classifier import WORDS, tiny_model, tiny_tokenizer
from tiny_decoder import save, tiny_gpt2
from tiny_speech import recogniser, some_utterances, sound, speech_processor, write_utterances

# Where nothing fits, a search exits with 7, as the page says.
ALLOWED = {"search": (0, 7)}


def classifier(folder: Path) -> None:
    torch.manual_seed(0)
    tiny_model(2, ["bad", "good"], positions=512).save_pretrained(folder / "my-classifier")
    tiny_tokenizer().save_pretrained(folder / "my-classifier")
    random = torch.Generator().manual_seed(0)
    with (folder / "reviews.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["review", "opinion"])
        for number in range(40):
            count = int(torch.randint(20, 700, (), generator=random))
            words = torch.randint(4, len(WORDS), (count,), generator=random)
            rows.writerow([" ".join(WORDS[int(word)] for word in words), ("bad", "good")[number % 2]])


def language_model(folder: Path) -> None:
    save(tiny_gpt2(positions=1024), folder / "my-gpt2")
    random = torch.Generator().manual_seed(0)
    for name, count in (("train.txt", 6000), ("test.txt", 1500)):
        words = torch.randint(4, len(WORDS), (count,), generator=random)
        (folder / name).write_text(" ".join(WORDS[int(word)] for word in words))


def speech(folder: Path) -> None:
    processor = speech_processor(folder / "my-wav2vec2")
    model = recogniser(vocab_size=len(processor.tokenizer))
    model.save_pretrained(folder / "my-wav2vec2")
    processor.save_pretrained(folder / "my-wav2vec2")
    write_utterances(folder / "LibriSpeech" / "test-clean", some_utterances())
    soundfile.write(folder / "speech.flac", sound(1.0), 16_000)


TUTORIALS = {"tutorial-classifier": classifier, "tutorial-language-model": language_model, "tutorial-speech": speech}


def test_every_tutorial_runs():
    assert {page.stem for page in (ROOT / "docs").glob("tutorial-*.md")} == set(TUTORIALS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_each_command_of_a_tutorial_works(name, tmp_path, monkeypatch):
    TUTORIALS[name](tmp_path)
    monkeypatch.chdir(tmp_path)
    steps = [
        words
        for block in blocks((ROOT / "docs" / f"{name}.md").read_text("utf-8"))
        if block.language == "bash"
        for words in commands(block)
    ]
    assert len(steps) > 5
    for _, *words in steps:
        code, output = run(*words, "-q")
        assert code in ALLOWED.get(words[0], (0,)), f"{words}: {output}"
