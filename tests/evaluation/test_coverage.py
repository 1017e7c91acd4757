"""The count of inputs on which a model approximates, and its effect on the verdict."""

import copy
import dataclasses
from pathlib import Path

import pyarrow.parquet
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from approx.evaluation.evaluate import Subject, evaluate, prepare
from approx.evaluation.inputs import Coverage, coverage, mean_pairs
from approx.evaluation.options import EvaluateOptions
from approx.evaluation.quality import compare
from approx.evaluation.record import Approximated
from approx.evaluation.statistics import verdict
from approx.tasks import Example, Split, open_task
from approx.tasks.metrics import METRICS
from tiny_classifier import WORDS as VOCABULARY
from tiny_classifier import tiny_model, tiny_tokenizer
from typed import known

SST2 = open_task("glue/sst2")
# Words of each sentence; the tokenizer adds two tokens.
WORDS = (3, 8, 1, 12, 5, 2, 8, 4, 3, 6)


@pytest.fixture
def data(tmp_path) -> Path:
    rows = [f"{'good ' * words}\t{row % 2}" for row, words in enumerate(WORDS)]
    (tmp_path / "dev.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return tmp_path


def subject(start: int, exact_below: int = 0, name: str = "other", **more) -> Subject:
    """A model that claims to approximate from `start` real tokens on, in batches at least `exact_below` wide."""
    model = more.pop("model", None) or tiny_model(2)
    return Subject(
        name, model, tiny_tokenizer(), approximates=lambda n, widest: n >= start and widest >= exact_below, **more
    )


def test_examples_and_tokens_are_counted_by_their_own_lengths_and_not_by_the_padding(data):
    one = subject(8)
    prepared = prepare([one], SST2, SST2.load(data), batch_size=10)
    covered = coverage(one, SST2, prepared)
    long = [words + 2 >= 8 for words in WORDS]
    assert covered is not None
    assert covered.examples == long
    assert covered.tokens == sum(w + 2 for w, reached in zip(WORDS, long, strict=True) if reached) / sum(
        words + 2 for words in WORDS
    )
    assert covered.counted == Approximated(examples=4, tokens=covered.tokens)


def test_exact_below_is_compared_with_the_longest_input_of_the_batch(data):
    one = subject(5, exact_below=8)
    whole, pairs = (coverage(one, SST2, prepare([one], SST2, SST2.load(data), batch_size=n)) for n in (10, 2))
    assert whole is not None
    assert pairs is not None
    # Sorted by length, the batches of two are 14 10, 10 8, 7 6, 5 5, 4 3.
    assert sum(whole.examples) == 8
    assert sum(pairs.examples) == 4


def test_an_example_is_approximated_if_any_window_of_it_is(tmp_path):
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=16,
            n_layer=1,
            n_head=2,
            vocab_size=len(VOCABULARY),
            n_positions=64,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    task = open_task("lm", window=8, stride=4, stretch=25)
    (tmp_path / "text.txt").write_text("good film " * 30)
    one = Subject("other", model, tiny_tokenizer(), approximates=lambda n, widest: n >= 8)
    prepared = prepare([one], task, task.load(tmp_path / "text.txt"), batch_size=4)
    windows = [task.positions(encoding, model.config) for encoding in prepared.encodings]
    covered = coverage(one, task, prepared)
    assert covered is not None
    # The first example has windows of 5 and 6 tokens, since no text is before it.
    assert windows[:4] == [5, 6, 8, 8]
    assert covered.examples == [False] + [True] * (len(covered.examples) - 1)
    assert covered.tokens == sum(n for n in windows if n >= 8) / sum(windows)


def test_unconverted_model_has_no_coverage(data):
    stock = Subject("stock", tiny_model(2), tiny_tokenizer())
    assert coverage(stock, SST2, prepare([stock], SST2, SST2.load(data), batch_size=4)) is None


def test_record_counts_coverage_with_stored_outputs(data, tmp_path, monkeypatch):
    base = tiny_model(2)
    # Of random weights no loss could show.
    monkeypatch.setattr(METRICS["accuracy"], "chance", lambda labels: None)
    subjects = {
        "exact": Subject("exact", base, tiny_tokenizer(), identity="a"),
        "short": subject(99, name="short", model=copy.deepcopy(base), identity="b"),
        "long": subject(8, name="long", model=copy.deepcopy(base), identity="c"),
    }
    entries = [
        evaluate(
            subjects,
            SST2,
            EvaluateOptions(margin=100),
            data=data,
            ledgers=tmp_path / "ledgers",
            outputs=tmp_path / "o.parquet",
        )
        for _ in range(2)
    ]
    assert entries[0] == entries[1]
    short, long = entries[1].variants
    assert (short.approximated, short.verdict) == (
        Approximated(examples=0, tokens=0.0),
        "not tested: exact on 100 % of these inputs",
    )
    assert (known(long.approximated).examples, long.verdict) == (4, "no loss")
    outputs = pyarrow.parquet.read_table(tmp_path / "o.parquet").to_pydict()
    assert outputs["approximated/long"] == [words + 2 >= 8 for words in WORDS]
    assert outputs["approximated/short"] == [False] * 10
    assert "approximated/exact" not in outputs


def test_base_has_no_coverage_and_unconverted_variant_keeps_its_verdict():
    labels = [0, 1] * 200
    examples = [Example(str(row), {}, label) for row, label in enumerate(labels)]
    predictions = {"exact": labels, "stock": labels, "converted": labels}
    covered = {"converted": Coverage([True] * 39 + [False] * 361, 0.2)}
    covered = compare(SST2, examples, [9] * 400, predictions, margin=0.02, seed=0, covered=covered)
    stock, converted = covered.variants
    assert (stock.verdict, stock.approximated) == ("no loss", None)
    assert converted.verdict == "not tested: exact on 90 % of these inputs"
    assert converted.approximated == Approximated(examples=39, tokens=0.2)


@pytest.mark.parametrize(
    ("approximated", "expected"),
    [
        (None, "no loss"),
        (0, "not tested: exact on 100 % of these inputs"),
        (1, "not tested: exact on 99 % of these inputs"),
        (99, "not tested: exact on 90 % of these inputs"),
        (100, "no loss"),
        (1000, "no loss"),
    ],
)
def test_a_tenth_of_the_inputs_must_be_approximated(approximated: int | None, expected: str):
    assert verdict((-0.001, 0.001), 0.005, 1000, approximated) == (expected, None)


def test_untested_verdict_needs_no_examples_and_a_loss_stays_a_loss():
    assert verdict((-0.02, 0.02), 0.005, 1000)[0] == "inconclusive"
    assert verdict((-0.02, 0.02), 0.005, 1000, 10) == ("not tested: exact on 99 % of these inputs", None)
    assert verdict((-0.004, -0.001), 0.005, 1000, 10)[0] == "not tested: exact on 99 % of these inputs"
    assert verdict(None, 0.005, 1, 0)[0] == "not tested: exact on 100 % of these inputs"
    assert verdict((-0.2, -0.1), 0.005, 1000, 10) == ("loss beyond margin", None)


def test_averages_pairs_over_inputs_and_counts_no_pairs_where_attention_is_exact(data):
    one = dataclasses.replace(subject(8), approximated_pairs=lambda n, widest: (n - 4) / n)
    covered = known(coverage(one, SST2, prepare([one], SST2, SST2.load(data), batch_size=3)))
    shares = [(words - 2) / (words + 2) if words + 2 >= 8 else 0.0 for words in WORDS]
    assert covered.pairs == pytest.approx(sum(shares) / len(WORDS))
    assert covered.counted.pairs == covered.pairs


def test_interpolates_pairs_between_counted_lengths(data):
    lengths_counted = []

    def share(length: int, widest: int) -> float:
        lengths_counted.append(length)
        return 1 - 100 / length

    one = dataclasses.replace(subject(8), approximated_pairs=share)
    sizes = [(length, 2000) for length in range(100, 2000)]
    found = mean_pairs(one, share, sizes)
    assert len(lengths_counted) <= 32
    assert found == pytest.approx(sum(1 - 100 / length for length, _ in sizes) / len(sizes), abs=0.01)


def test_a_split_in_another_order_counts_the_same(data):
    split = SST2.load(data)
    turned = Split(split.name, split.examples[::-1], split.subset)
    one = subject(8)
    covered, other = (coverage(one, SST2, prepare([one], SST2, part, batch_size=3)) for part in (split, turned))
    assert covered is not None
    assert other is not None
    assert covered.examples == other.examples[::-1]
