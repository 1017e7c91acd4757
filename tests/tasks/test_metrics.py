"""Every metric equals scikit-learn's or scipy's, and works through `evaluate` without a network."""

import math

import jiwer
import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from approx.errors import ApproxError, Exit
from approx.tasks.metrics import F1, METRICS, Accuracy, Matthews, Pearson, Spearman

OFFICIAL = {
    "accuracy": lambda labels, predictions: sklearn.metrics.accuracy_score(labels, predictions),
    "f1": lambda labels, predictions: sklearn.metrics.f1_score(labels, predictions),
    "matthews": lambda labels, predictions: sklearn.metrics.matthews_corrcoef(labels, predictions),
    "pearson": lambda labels, predictions: stats.pearsonr(labels, predictions)[0],
    "spearman": lambda labels, predictions: stats.spearmanr(labels, predictions)[0],
}


@pytest.mark.filterwarnings("ignore:A single label was found", "ignore:F-score is ill-defined")
@pytest.mark.parametrize("name", ["accuracy", "f1", "matthews"])
@given(pairs=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_class_metrics_equal_scikit_learn(name, pairs):
    predictions, labels = zip(*pairs, strict=True)
    assert METRICS[name].value(predictions, labels) == pytest.approx(OFFICIAL[name](labels, predictions), abs=1e-12)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize("decimals", [0, 6])
def test_correlations_equal_scipy(name, decimals):
    generator = np.random.default_rng(0)
    labels = generator.uniform(0, 5, 200).round(decimals)
    predictions = (labels + generator.normal(size=200)).round(decimals)
    assert METRICS[name].value(predictions.tolist(), labels.tolist()) == pytest.approx(
        OFFICIAL[name](labels, predictions), abs=1e-12
    )


@pytest.mark.parametrize("metric", [Matthews, Pearson, Spearman])
def test_constant_predictions_score_zero_and_not_nan(metric):
    assert metric.value([1, 1, 1], [0, 1, 1]) == 0.0
    assert metric.value([1], [1]) == 0.0


@pytest.mark.parametrize("metric", [Accuracy, F1, Matthews, Pearson, Spearman])
def test_compute_of_evaluate_gives_the_same_number(metric, tmp_path):
    predictions, labels = [0, 1, 1, 0, 1], [0, 1, 0, 0, 1]
    handle = metric(cache_dir=str(tmp_path))
    for prediction, label in zip(predictions, labels, strict=True):
        handle.add(prediction=prediction, reference=label)
    assert handle.compute() == {metric.key: pytest.approx(metric.value(predictions, labels))}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_known_by_its_name_and_says_where_it_is_defined(name, tmp_path):
    handle = METRICS[name](cache_dir=str(tmp_path))
    assert handle.key == name
    assert handle.reference_urls == [METRICS[name].source]
    assert METRICS[name].source.startswith("https://")


SENTENCES = st.lists(st.sampled_from(["A", "BEE", "IT'S", "SEA"]), max_size=6).map(" ".join)


@given(pairs=st.lists(st.tuples(SENTENCES, SENTENCES.filter(bool)), min_size=1, max_size=8))
def test_error_rates_equal_those_of_jiwer_over_all_utterances(pairs):
    predictions, labels = map(list, zip(*pairs, strict=True))
    assert METRICS["wer"].value(predictions, labels) == pytest.approx(jiwer.wer(labels, predictions))
    assert METRICS["cer"].value(predictions, labels) == pytest.approx(jiwer.cer(labels, predictions))


def test_an_error_rate_can_exceed_one_and_less_is_better():
    assert METRICS["wer"]().compute(predictions=["A B C D", ""], references=["E", "A"]) == {"wer": 5 / 2}
    assert METRICS["wer"].evidence(["A B C D", ""], ["E", "A"]).tolist() == [[4, 1], [1, 1]]
    assert METRICS["wer"].lower_is_better
    assert METRICS["wer"].bounds == (0.0, math.inf)


FLAGS = ([[1, 0, 0], [0, 1, 1], [1, 0, 1], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]])
EVIDENCE = {
    "micro_f1": FLAGS,
    "macro_f1": FLAGS,
    "subset_accuracy": FLAGS,
    "accuracy": ([0, 1, 1, 0], [0, 1, 0, 0]),
    "mean_score": ([0.5, 1.0, 0.2, 0.0], [1.0] * 4),
    "token_accuracy": (["ab", "cd", "ef", "gh"], ["ab", "cx", "ef", "xx"]),
    "f1": ([0, 1, 1, 0], [0, 1, 0, 1]),
    "matthews": ([0, 1, 1, 0], [0, 1, 0, 0]),
    "pearson": ([0.1, 2.0, 2.5, 4.0], [0.0, 2.0, 3.0, 3.5]),
    "spearman": ([0.1, 3.0, 2.5, 4.0], [0.0, 2.0, 3.0, 3.5]),
    "answer_f1": (["a b", "c", "d", ""], [["a b"], ["c d"], ["e"], ["f"]]),
    "exact_match": (["x y", "z", "d", ""], [["x y"], ["z"], ["e"], ["f"]]),
    "bits_per_byte": ([{"loss": loss, "count": 4} for loss in (8.0, 9.0, 30.0, 7.0)], [20] * 4),
    "perplexity": ([{"loss": loss, "count": 4} for loss in (8.0, 9.0, 30.0, 7.0)], [20] * 4),
    "masked_loss": ([{"loss": loss, "count": 4} for loss in (8.0, 9.0, 30.0, 7.0)], [20] * 4),
    "entity_f1": ([["B-PER", "O"], ["O", "B-LOC"], ["O", "O"]], [["B-PER", "O"], ["B-LOC", "O"], ["B-LOC", "O"]]),
    "wer": (["A B", "C X", "D"], ["A B", "C D", "D"]),
    "cer": (["A B", "C X", "D"], ["A B", "C D", "D"]),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_lost_example_makes_every_metric_worse_and_a_won_one_better(name):
    """Otherwise an interval of equal predictions would be a point."""
    assert name in EVIDENCE, f"give {name} examples here, and see that `lost` and `won` fit its evidence"
    metric = METRICS[name]
    evidence = metric.evidence(*EVIDENCE[name])
    worse = 1 if metric.lower_is_better else -1
    assert worse * (metric.total(metric.lost(evidence)) - metric.total(evidence)) > 0
    assert worse * (metric.total(metric.won(evidence)) - metric.total(evidence)) < 0
    loss, gain = metric.at_stake(evidence)
    assert 0 < loss < 1000
    assert 0 < gain < 1000


def test_the_stake_of_an_example_is_that_of_those_with_something_to_lose():
    """Whether three or eight of ten are right, each right one can be lost whole."""
    for right in (3, 8):
        evidence = METRICS["accuracy"].evidence([1] * 10, [1] * right + [0] * (10 - right))
        assert METRICS["accuracy"].at_stake(evidence) == pytest.approx((1.0, 1.0))
    words = METRICS["wer"].evidence(["A B C D", ""], ["E F", "A B"])
    # The worst utterance has two errors for each word.
    assert METRICS["wer"].at_stake(words)[0] == pytest.approx(1.0)
    silent = METRICS["bits_per_byte"].evidence([{"loss": 2 * np.log(2) * 20, "count": 4}] * 3, [20] * 3)
    assert METRICS["bits_per_byte"].at_stake(silent) == pytest.approx((6.0, 0.0))


@pytest.mark.parametrize(
    ("name", "predictions", "labels", "cause"),
    [
        ("token_accuracy", [""], [""], "token_accuracy is nan on 1 examples: the sequences have no tokens"),
        ("masked_loss", [{"loss": 0.0, "count": 0}], [20], "masked_loss is nan on 1 examples: no token is scored"),
        ("perplexity", [{"loss": 5000.0, "count": 1}], [20], "perplexity is inf on 1 examples: .*losses are too large"),
    ],
)
def test_a_metric_without_a_value_is_an_error_that_says_why(name, predictions, labels, cause):
    with pytest.raises(ApproxError, match=cause) as caught:
        METRICS[name].value(predictions, labels)
    assert caught.value.exit_code == Exit.UNAVAILABLE


@pytest.mark.parametrize(
    ("name", "labels", "chance"),
    [
        ("accuracy", [0, 1, 1, 2], 0.5),
        ("token_accuracy", ["aab", "a"], 0.75),
        ("f1", [0, 1, 1, 0], 2 / 3),
        ("matthews", [0, 1], 0.0),
        ("exact_match", [["word"], []], 0.5),
        ("answer_f1", [["word"], ["other"]], 0.0),
        ("wer", ["A B", "C"], 1.0),
        ("cer", ["A B", "C"], 1.0),
        ("bits_per_byte", [20], 8.0),
        ("masked_loss", [20], None),
    ],
)
def test_chance_is_the_best_answer_that_ignores_the_input(name, labels, chance):
    assert METRICS[name].chance(labels) == (None if chance is None else pytest.approx(chance))


@pytest.mark.parametrize(
    ("name", "margin", "base", "acceptable"),
    [
        ("accuracy", None, 0.9, 0.01),
        ("accuracy", 0.5, 0.9, 0.005),
        ("wer", None, 0.3, 0.005),
        ("bits_per_byte", None, 1.4, 0.014),
        ("masked_loss", 2.0, 3.0, 0.06),
    ],
)
def test_a_margin_is_in_points_or_for_losses_a_share_of_the_base(name, margin, base, acceptable):
    assert METRICS[name].acceptable(margin, base) == pytest.approx(acceptable)


@pytest.mark.network
@pytest.mark.parametrize(("subset", "name"), [("cola", "matthews"), ("mrpc", "f1"), ("stsb", "pearson")])
def test_metrics_equal_the_official_glue_metric(subset, name):
    import evaluate

    predictions, labels = [0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 0]
    official = evaluate.load("glue", subset).compute(predictions=predictions, references=labels)
    assert official is not None
    key = {"matthews": "matthews_correlation"}.get(name, name)
    assert METRICS[name].value(predictions, labels) == pytest.approx(official[key], abs=1e-9)
