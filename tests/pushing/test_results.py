"""What records say on a card: the model's own scores, and when not to use it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from approx.checkpoints.history import Check, Receipt
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.pushing.results import dataset_of, results_of
from typed import record_of

RECEIPT, OTHER = (
    Receipt(swapped=[], left=[], cross_attention=0, added=[], checks=[Check("one", True, detail)])
    for detail in ("a", "b")
)


def variant(name: str, scores: dict[str, float], verdict: str = "no loss", **more: Any) -> dict[str, Any]:
    first = next(iter(scores))
    return {
        "name": name,
        "scores": scores,
        "difference": round(scores[first] - 0.9, 4),
        "interval": [-0.04, 0.0],
        "margin": 0.05,
        "verdict": verdict,
        **more,
    }


def quality(task: str = "glue/sst2", split: str = "dev", verdict: str = "no loss", **scores: Any) -> dict[str, Any]:
    all_scores = scores or {"accuracy": 0.875}
    first = next(iter(all_scores))
    return {
        "task": task,
        "split": split,
        "examples": 40,
        "subset": False,
        "truncated": 0,
        "metric": first,
        "outputs": None,
        "base": {
            "scores": {name: round(value + 0.025, 4) for name, value in all_scores.items()},
            "interval": [0.8, 0.95],
        },
        "variants": [variant("other", dict.fromkeys(all_scores, 0.5)), variant("mine", all_scores, verdict)],
    }


def speed(length: int, ratio: float, interval: tuple[float, float]) -> dict[str, Any]:
    def row(name: str, ratio: float, interval: tuple[float, float]) -> dict[str, Any]:
        low, high = interval
        verdict = "faster" if low > 1 else "slower" if high < 1 else "no clear gain"
        return {
            "name": name,
            "median_ms": 10 / ratio,
            "peak_mb": 1.0,
            "status": "ok",
            "samples": 9,
            "ratio": ratio,
            "interval": [low, high],
            "verdict": verdict,
        }

    return {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "batch": 1,
        "length": length,
        "mode": "forward",
        "inputs": "synthetic",
        "baseline": "sdpa",
        "base": {"median_ms": 10.0, "peak_mb": 1.0, "status": "ok", "samples": 9},
        "variants": [row("other", 3.0, (2.9, 3.1)), row("mine", ratio, interval)],
    }


def written(
    path: Path, quality: Sequence[Any] = (), speed: Sequence[Any] = (), receipts: Any = (OTHER, RECEIPT)
) -> Path:
    names = ("other", "mine")
    data = {
        "schema": 1,
        "title": "t",
        "notice": None,
        "command": "",
        "seed": 0,
        "recipe": None,
        "checkpoint": {
            "name": "base",
            "revision": None,
            "weights_sha256": None,
            "family": "bert",
            "parameters": 9,
            "layers": 2,
            "positions": 32,
        },
        "variants": [
            {
                "name": name,
                "layers": [],
                "verified": True,
                "receipt": None if one is None else one.model_dump(mode="json"),
            }
            for name, one in zip(names, receipts, strict=True)
        ],
        "quality": list(quality),
        "speed": list(speed),
        "crossover": [],
        "trainings": [],
        "environment": {"processor": "a CPU", "cores": 4, "torch": "2.9", "transformers": "5.0"},
    }
    record.save(path, record_of(data))
    return path


def read(
    tmp_path: Path, quality: Sequence[Any] = (), speed: Sequence[Any] = (), pipeline: str | None = "text-classification"
) -> Any:
    return results_of([written(tmp_path / "r.json", quality, speed)], RECEIPT, pipeline)


def test_lists_scores_of_the_model_and_not_of_its_base(tmp_path):
    made = read(tmp_path, [quality(accuracy=0.875, f1=0.75)])
    assert [(one.metric_type, one.metric_name, one.metric_value) for one in made.evaluations] == [
        ("accuracy", "accuracy", 0.875),
        ("f1", "f1", 0.75),
    ]
    (one, *_) = made.evaluations
    assert (one.task_type, one.dataset_name, one.dataset_type) == ("text-classification", "glue/sst2", "nyu-mll/glue")
    assert made.metrics == ["accuracy", "f1"]
    assert made.datasets == ["nyu-mll/glue"]
    assert all(one.task_type == "other" for one in read(tmp_path, [quality()], pipeline=None).evaluations)


@pytest.mark.parametrize(
    ("task", "split", "found"),
    [
        ("glue/sst2", "dev", ("nyu-mll/glue", "sst2", "validation")),
        ("glue/mnli", "dev-matched", ("nyu-mll/glue", "mnli", "validation-matched")),
        ("squad", "dev", ("rajpurkar/squad", None, "validation")),
        ("librispeech/test-other", "test-other", ("openslr/librispeech_asr", "other", "test")),
        ("librispeech/dev-clean", "dev-clean", ("openslr/librispeech_asr", "clean", "validation")),
        # A user's own file keeps its name.
        ("text-classification", "dev", ("text-classification", None, "dev")),
        ("lm", "dev", ("lm", None, "dev")),
    ],
)
def test_names_datasets_by_their_ids_on_the_hub(tmp_path, task, split, found):
    (one,) = read(tmp_path, [quality(task, split)]).evaluations
    assert (one.dataset_type, one.dataset_config) == found[:2]
    assert one.dataset_split == found[2] or task == "glue/mnli"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("answer_f1", "f1"), ("matthews", "matthews_correlation"), ("pearson", "pearsonr"), ("wer", "wer")],
)
def test_names_metrics_as_the_hub_does(tmp_path, ours, theirs):
    all_scores: dict[str, Any] = {ours: 0.5}
    assert read(tmp_path, [quality("squad", **all_scores)]).metrics == [theirs]


@pytest.mark.parametrize(
    ("task", "known"), [("squad", True), ("lm", False), ("needle", False), (None, False), ("no such task", False)]
)
def test_only_official_tasks_have_a_dataset(task, known):
    assert (dataset_of(task) is not None) is known


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("no loss", []),
        ("loss beyond margin", [r"On glue/sst2 it .*2\.5.* more than the margin of"]),
        ("inconclusive", ["On glue/sst2 the loss is not settled: "]),
    ],
)
def test_a_loss_is_a_caution(tmp_path, verdict, said):
    found = read(tmp_path, [quality(verdict=verdict)], [speed(8, 2.0, (1.9, 2.1))]).cautions
    assert len(found) == len(said)
    for one, words in zip(found, said, strict=True):
        assert re.search(words, one), one


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(8, 2.0, (1.9, 2.1)), (16, 2.0, (1.9, 2.1))], []),
        ([(8, 0.8, (0.7, 0.9)), (16, 2.0, (1.9, 2.1))], ["On inputs of fewer than 16 tokens, keep exact attention"]),
        ([(8, 2.0, (1.9, 2.1)), (16, 0.8, (0.7, 0.9))], ["No gain in speed was measured up to 16 tokens"]),
        ([(8, 0.8, (0.7, 0.9)), (16, 0.9, (0.8, 1.0))], ["No gain in speed was measured up to 16 tokens"]),
    ],
)
def test_lengths_at_which_exact_attention_is_as_fast_are_cautions(tmp_path, rows, said):
    found = read(tmp_path, [quality()], [speed(*row) for row in rows]).cautions
    assert len(found) == len(said)
    assert all(one.startswith(words) for one, words in zip(found, said, strict=True))
    # Of a model that loses too much, speed is not the point.
    lossy = read(tmp_path, [quality(verdict="loss beyond margin")], [speed(*row) for row in rows]).cautions
    assert len(lossy) == 1


def test_cautions_name_missing_measurements(tmp_path):
    paths = [written(tmp_path / "a.json", [quality()]), written(tmp_path / "b.json", [], [speed(8, 2.0, (1.9, 2.1))])]
    assert results_of(paths, RECEIPT, None).cautions == []
    assert [one.split(" was")[0] for one in results_of(paths[:1], RECEIPT, None).cautions] == ["Its speed"]
    assert [one.split(" was")[0] for one in results_of(paths[1:], RECEIPT, None).cautions] == ["Its quality"]
    nothing = results_of([], RECEIPT, None)
    assert (nothing.cautions, nothing.markdown, nothing.metrics) == ([], "", [])


def test_the_tables_hold_the_model_and_no_other_variant(tmp_path):
    made = read(tmp_path, [quality()], [speed(8, 2.0, (1.9, 2.1))])
    assert len(made.sections) == 1
    assert "other" not in made.markdown
    assert "3.00" not in made.markdown
    for words in ("87.5", "90.0", "2.00", "a CPU, 4 cores", "PyTorch 2.9, transformers 5.0", "r.json"):
        assert words in made.markdown, words
    assert not any("was not measured" in sentence for sentence in made.sections[0]["sentences"])


def test_a_record_of_another_folder_is_refused(tmp_path):
    path = written(tmp_path / "r.json", [quality()], receipts=(OTHER, None))
    with pytest.raises(
        ApproxError, match=r"r\.json is not about this folder: its variants are 'other', 'mine', and none"
    ) as caught:
        results_of([path], RECEIPT, None)
    assert caught.value.exit_code == Exit.REFUSED


def test_a_card_with_scores_of_two_records_has_each_once(tmp_path):
    paths = [
        written(tmp_path / "a.json", [quality()]),
        written(tmp_path / "b.json", [quality("squad", answer_f1=0.5), quality("lm", perplexity=9.0)]),
    ]
    made = results_of(paths, RECEIPT, None)
    assert [(one.dataset_type, one.metric_type, one.metric_value) for one in made.evaluations] == [
        ("nyu-mll/glue", "accuracy", 0.875),
        ("rajpurkar/squad", "f1", 0.5),
        ("lm", "perplexity", 9.0),
    ]
    assert made.datasets == ["nyu-mll/glue", "rajpurkar/squad"]
    assert made.metrics == ["accuracy", "f1", "perplexity"]
    assert [section["file"] for section in made.sections] == ["a.json", "b.json"]
