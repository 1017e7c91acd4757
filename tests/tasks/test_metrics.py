"""Every metric equals scikit-learn's or scipy's, and works through `evaluate` without a network."""

import jiwer
import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

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
    assert METRICS["wer"].widest is None


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
