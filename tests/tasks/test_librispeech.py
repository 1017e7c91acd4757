"""LibriSpeech: official folders, the hub's parquet, kinds of recordings, and mistakes in them."""

import sys

import numpy as np
import pytest
import soundfile
from datasets import Dataset

from approx.errors import ApproxError, Exit
from approx.tasks import librispeech, open_task
from approx.tasks.recording import Recording
from tiny_speech import refused, some_utterances, sound, write_utterances

TASK = open_task("librispeech/test-clean")


@pytest.mark.parametrize("suffix", [".flac", ".wav"])
def test_the_official_layout_is_read_from_every_folder_above_it(tmp_path, suffix):
    spoken = some_utterances()
    folder = write_utterances(tmp_path / "LibriSpeech" / "test-clean", spoken, suffix)
    splits = [TASK.load(data) for data in (tmp_path, tmp_path / "LibriSpeech", folder)]
    assert splits[0] == splits[1] == splits[2]
    (split, *_), examples = splits, {example.id: example for example in splits[0].examples}
    assert (split.name, split.subset, split.notes) == ("test-clean", True, ())
    assert examples.keys() == spoken.keys()
    for name, (words, samples) in spoken.items():
        recording = examples[name].inputs["recording"]
        assert (examples[name].label, examples[name].group) == (words, name[:2])
        assert (recording.samples, recording.rate) == (len(samples), 16_000)
        np.testing.assert_allclose(recording.decoded(16_000), samples, atol=1 / 2**15)
    assert TASK.load(folder, limit=2).examples == split.examples[:2]


def test_a_users_folder_keeps_its_name(tmp_path):
    split = TASK.load(write_utterances(tmp_path / "mine", some_utterances(2)))
    assert (split.name, split.subset) == ("mine", True)


def test_a_split_is_whole_with_all_its_utterances_under_its_own_name(tmp_path, monkeypatch):
    monkeypatch.setitem(librispeech.LIBRISPEECH, "test-clean", ("clean", "test", 3))
    for count, name, subset in ((3, "test-clean", False), (2, "test-clean", True), (3, "mine", True)):
        folder = write_utterances(tmp_path / str(count) / name, some_utterances(count))
        assert TASK.load(folder).subset is subset
        assert TASK.load(folder, limit=2).subset


def test_lists_the_published_splits():
    """Configurations and splits of openslr/librispeech_asr, with the number of utterances from its dataset card."""
    rows = [2703, 2864, 2620, 2939, 28539, 104014, 148688]
    names = [
        "dev-clean",
        "dev-other",
        "test-clean",
        "test-other",
        "train-clean-100",
        "train-clean-360",
        "train-other-500",
    ]
    assert {name: entry[2] for name, entry in librispeech.LIBRISPEECH.items()} == dict(zip(names, rows, strict=True))
    for name, (config, split, _) in librispeech.LIBRISPEECH.items():
        kind, config_of, *hours = name.split("-")
        assert config == config_of
        assert split == ".".join([{"dev": "validation"}.get(kind, kind), *hours])


def test_the_parquet_of_the_hub_is_streamed(tmp_path, monkeypatch):
    write_utterances(tmp_path / "test-clean", spoken := some_utterances())
    rows = []
    for path in sorted(tmp_path.rglob("*.flac")):
        speaker, chapter, _ = path.stem.split("-")
        stored = {"bytes": path.read_bytes(), "path": path.name}
        rows.append(
            {
                "file": path.name,
                "audio": stored,
                "text": spoken[path.stem][0],
                "speaker_id": int(speaker),
                "chapter_id": int(chapter),
                "id": path.stem,
            }
        )
    hub = tmp_path / "hub"
    (hub / "clean").mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(hub / "clean" / "test.parquet")
    (hub / "README.md").write_text(
        "---\ndataset_info:\n- config_name: clean\n  features:\n  - name: file\n    dtype: string\n  - name: audio\n"
        "    dtype:\n      audio:\n        sampling_rate: 16000\n  - name: text\n    dtype: string\n"
        "  - name: speaker_id\n    dtype: int64\n  - name: chapter_id\n    dtype: int64\n  - name: id\n    dtype: "
        "string\nconfigs:\n- config_name: clean\n  data_files:\n  - split: test\n    path: clean/test.parquet\n---\n"
    )
    monkeypatch.setattr(librispeech, "_HUB_DATASET", str(hub))
    streamed, local = TASK.load(), TASK.load(tmp_path / "test-clean")
    assert sorted(streamed.examples, key=lambda one: one.id) == sorted(local.examples, key=lambda one: one.id)
    assert [example.id for example in TASK.load(limit=2).examples] == [row["id"] for row in rows[:2]]
    (hub / "clean" / "test.parquet").write_bytes(b"PAR1 cut off")
    refused("(could not be loaded|The download of .*hub failed)", Exit.UNAVAILABLE, TASK.load)


def test_resamples_another_rate_and_notes_it(tmp_path):
    for rate in (8_000, 44_100):
        spoken = {f"1-{rate}-0000": ("A", sound(1.0, rate))}
        write_utterances(tmp_path, spoken, ".wav", rate)
    write_utterances(tmp_path, {"1-2-0000": ("A", sound(1.0))})
    split = TASK.load(tmp_path)
    assert split.notes == ("resampled to 16,000 Hz from 8,000, 44,100: 2",)
    for example in split.examples:
        recording = example.inputs["recording"]
        heard = recording.decoded(16_000)
        assert len(heard) == recording.samples_at(16_000) == 16_000
        assert heard.dtype == np.float32
        spectrum = np.abs(np.fft.rfft(heard))
        assert abs(int(spectrum.argmax()) - 440) <= 1, "a tone keeps its pitch"


def test_recordings_without_a_transcript_are_left_out_and_counted(tmp_path):
    folder = write_utterances(tmp_path / "test-clean", some_utterances(3))
    soundfile.write(folder / "10" / "7" / "10-7-0099.flac", sound(0.5), 16_000)
    whole, part = TASK.load(folder).tally, TASK.load(folder, limit=1).tally
    assert whole is not None
    assert part is not None
    assert (whole.read, +whole.skipped) == (3, {"recordings without a transcript": 1})
    assert (part.read, +part.skipped) == (1, {})


def test_a_mistake_in_the_files_is_named(tmp_path):
    folder = write_utterances(tmp_path / "test-clean", some_utterances(1))
    chapter = folder / "10" / "7"
    transcripts, recording = chapter / "10-7.trans.txt", chapter / "10-7-0000.flac"
    words, stored = transcripts.read_text(), recording.read_bytes()

    def load():
        return TASK.load(folder)

    transcripts.write_text(words + "\n10-7-0001 NOT THERE\n")
    refused(r"10-7.trans.txt, line 3: 10-7-0001.flac or 10-7-0001.wav is missing", Exit.UNAVAILABLE, load)
    transcripts.write_text("10-7-0000\n")
    refused("line 1: no words after the id '10-7-0000'", Exit.UNAVAILABLE, load)
    transcripts.write_bytes(b"10-7-0000 \xff\xfe\n")
    refused("is not UTF-8", Exit.UNAVAILABLE, load)
    transcripts.write_text("\n")
    refused("0 transcripts", Exit.UNAVAILABLE, load)
    transcripts.write_text(words)
    for broken in (b"", b"fLaC", b"version https://git-lfs.github.com/spec/v1\n", stored[:20]):
        recording.write_bytes(broken)
        refused("10-7-0000.flac is not a readable recording", Exit.UNAVAILABLE, load)
    soundfile.write(recording, np.zeros((8000, 2)), 16_000)
    refused("has 2 channels", Exit.UNAVAILABLE, load)
    soundfile.write(recording, np.zeros(100), 16_000)
    refused("has 100 samples at 16,000 Hz, less than 0.1 seconds", Exit.UNAVAILABLE, load)
    # The header is intact, so the damage shows only in decoding.
    recording.write_bytes(stored[: len(stored) // 2])
    cut = load().examples[0].inputs["recording"]
    refused("10-7-0000.flac is not a readable recording", Exit.UNAVAILABLE, lambda: cut.decoded(16_000))
    recording.write_bytes(stored)
    refused("changed while it was in use", Exit.UNAVAILABLE, lambda: cut.decoded(16_000))


def test_names_only_the_file_of_a_damaged_recording():
    with pytest.raises(ApproxError, match=r"talk\.flac is not a readable recording") as caught:
        Recording.of("talk.flac", b"text")
    assert "object at" not in str(caught.value)


def test_a_folder_without_the_split_says_what_it_has(tmp_path):
    folder = write_utterances(tmp_path / "dev-other", some_utterances(1))
    for data in (tmp_path, folder):
        refused("looked for test-clean in .*found dev-other", Exit.UNAVAILABLE, lambda data=data: TASK.load(data))
    (tmp_path / "empty").mkdir()
    refused("found no transcripts", Exit.UNAVAILABLE, lambda: TASK.load(tmp_path / "empty"))
    refused("is not a folder", Exit.UNAVAILABLE, lambda: TASK.load(tmp_path / "test-clean.tar.gz"))
    refused("--split dev-other contradicts the task", Exit.USAGE, lambda: TASK.load(folder, "dev-other"))
    refused("'limit'.*is 0", Exit.USAGE, lambda: TASK.load(folder, limit=0))


def test_training_reads_a_training_split(tmp_path):
    write_utterances(tmp_path / "train-clean-100", some_utterances(3))
    assert len(open_task("librispeech/train-clean-100").load(tmp_path, "train").examples) == 3
    write_utterances(tmp_path / "test-clean", some_utterances(3))
    refused("--split train contradicts the task", Exit.USAGE, lambda: TASK.load(tmp_path, "train"))


@pytest.mark.parametrize("package", ["soundfile", "jiwer"])
def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    refused(f"pip install {package}", Exit.MISSING, lambda: TASK.load(tmp_path))


def test_recordings_are_known_by_their_bytes(tmp_path):
    write_utterances(tmp_path / "a", spoken := some_utterances(2))
    first = [example.inputs["recording"] for example in TASK.load(tmp_path / "a").examples]
    write_utterances(tmp_path / "b", {name: (words, samples * 0.5) for name, (words, samples) in spoken.items()})
    other = [example.inputs["recording"] for example in TASK.load(tmp_path / "b").examples]
    again = Recording.of("elsewhere", first[0].source.read_bytes())
    assert repr(again) == repr(first[0])
    assert len({repr(one) for one in first + other}) == 4


def test_the_transcribed_utterances_at_hand_are_all_read(shared_data):
    counts = {}
    for split in ("dev-clean", "test-clean", "test-other"):
        loaded = open_task(f"librispeech/{split}").load(shared_data / "librispeech")
        assert (loaded.name, loaded.subset, loaded.notes) == (split, True, ())
        assert all(example.group == example.id.split("-")[0] for example in loaded.examples)
        counts[split] = len(loaded.examples)
    assert counts == {"dev-clean": 1, "test-clean": 4, "test-other": 50}
    hoped = loaded.examples[0].inputs["recording"]
    assert len(hoped.decoded(16_000)) == hoped.samples
