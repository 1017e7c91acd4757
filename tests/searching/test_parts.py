"""The parts of the data: what is searched on is never proven on, and groups stay together."""

from typing import Any

import pytest
import torch

from approx.checkpoints import checkpoint
from approx.errors import ApproxError, Exit
from approx.measuring.measure import in_memory
from approx.searching import cost
from approx.searching.options import SearchStage
from approx.tasks import open_task
from approx.tasks.task import Example
from tiny_classifier import WORDS, tiny_tokenizer
from zoo import tiny


def examples(*groups):
    return [Example(f"{number}", {}, 0, group) for number, group in enumerate(groups)]


def test_divides_examples_in_two_at_most_half_of_them_searched():
    every = examples(*[None] * 40)
    for count, searched in ((10, 10), (20, 20), (30, 20)):
        first, second = cost._divided(every, count, 0)
        assert len(first) == searched
        assert sorted([*first, *second], key=lambda one: int(one.id)) == every
    assert cost._divided(every, 10, 0) == cost._divided(every, 10, 0)
    assert cost._divided(every, 10, 0) != cost._divided(every, 10, 1)
    # The first ones of either part are a sample, not the beginning of the file.
    assert [one.id for one in first] != sorted((one.id for one in first), key=int)
    assert [one.id for one in second] != sorted((one.id for one in second), key=int)


def test_groups_stay_together():
    every = examples(*(f"article {number // 5}" for number in range(60)))
    for seed in range(5):
        first, second = cost._divided(every, 30, seed)
        assert not {one.group for one in first} & {one.group for one in second}
        assert len(first) == 30
    # One that is much too large is proven on; one that is a little too large is searched on.
    large = examples(*["a"] * 12, *["b"] * 2)
    assert {one.group for one in cost._divided(large, 4, 0)[0]} == {"b"}


def of_task(base, sentences, **options: Any) -> Any:
    stage = SearchStage(
        **{"length": 48, "budget": "loss<=1", "task": "glue/sst2", "data": str(sentences), "split": "dev", **options}
    )
    return cost.of_task(base, checkpoint.processor(base.source), open_task("glue/sst2"), stage, 0)


def ids(part):
    return [example.id for example in part.prepared.split.examples]


def test_proof_uses_separate_examples_and_gradients_use_the_searched_ones(base, sentences):
    calibration, search, proof = of_task(base, sentences, calibration=12, examples=40, proof=50)
    assert (len(ids(calibration)), len(ids(search)), len(ids(proof))) == (12, 40, 50)
    assert ids(search)[:12] == ids(calibration)
    assert not set(ids(search)) & set(ids(proof))
    assert [part.inputs for part in (calibration, search, proof)] == [12, 40, 50]
    # By default the gradients are of at most 64, the rest is proven on.
    calibration, search, proof = of_task(base, sentences, examples=300)
    assert (len(ids(calibration)), len(ids(search)), len(ids(proof))) == (60, 60, 60)


def test_batches_are_what_the_model_reads_with_its_targets_and_padding(base, sentences):
    _, search, _ = of_task(base, sentences, examples=20)
    assert sorted(row for batch in search.batches for row in batch.rows) == list(range(20))
    assert max(len(batch.rows) for batch in search.batches) == 8
    labels = {row: one.label for row, one in enumerate(search.prepared.split.examples)}
    for batch in search.batches:
        assert batch.inputs["labels"].tolist() == [labels[search.prepared.owners[row]] for row in batch.rows]
        assert torch.equal(batch.mask, batch.inputs["attention_mask"].bool())
        lengths = [len(search.prepared.encodings[row]["input_ids"]) for row in batch.rows]
        assert batch.mask.sum(1).tolist() == lengths
    assert cost.Batch({"input_ids": torch.zeros(1, 2)}, [0]).mask is None


def test_min_length_leaves_out_short_examples(base, sentences):
    _, search, proof = of_task(base, sentences, examples=20, min_length=24)
    for part in (search, proof):
        assert min(part.prepared.lengths) >= 24


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        ({"limit": 19}, "has 19 examples; that leaves 10 for the proof and 9 to compare plans", Exit.UNAVAILABLE),
        ({"min_length": 41}, "examples of at least 41 tokens", Exit.UNAVAILABLE),
        ({"examples": 20, "calibration": 21}, "--calibration is 21 examples, but only 20 compare plans", Exit.USAGE),
    ],
)
def test_too_few_examples_are_refused(base, sentences, options, message, code):
    with pytest.raises(ApproxError, match=message) as caught:
        of_task(base, sentences, **options)
    assert caught.value.exit_code == code


def test_inputs_beyond_the_positions_are_refused_or_cut(base, tmp_path):
    folder = tmp_path / "SST-2"
    folder.mkdir()
    rows = [f"{' '.join(['good'] * (100 if number < 5 else 9))}\t{number % 2}" for number in range(40)]
    (folder / "dev.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    with pytest.raises(ApproxError, match="64"):
        of_task(base, folder)
    cut = of_task(base, folder, truncate=True)
    assert max(max(part.prepared.lengths) for part in cut[1:]) == 64
    assert sum(part.prepared.truncated for part in cut[1:]) == 5


def test_the_seed_divides_the_examples(base, sentences):
    def searched(seed):
        stage = SearchStage(
            length=48, budget="loss<=1", task="glue/sst2", data=str(sentences), split="dev", examples=40
        )
        found = cost.of_task(base, checkpoint.processor(base.source), open_task("glue/sst2"), stage, seed)
        return ids(found[1])

    assert searched(0) == searched(0) != searched(1)


def test_ten_examples_on_either_side_are_enough(base, sentences):
    assert [part.inputs for part in of_task(base, sentences, limit=20, calibration=10)] == [10, 10, 10]


def of_text(base, **options):
    stage = SearchStage(**{"length": 48, "budget": "kl<=1", "examples": 12, **options})
    return cost.of_text(base, checkpoint.processor(base.source), stage)


def rows(part):
    return [batch.inputs["input_ids"][0].tolist() for batch in part.batches]


def test_a_text_is_cut_into_rows_of_the_timed_length_the_first_half_searched(base, text):
    calibration, search, proof = of_text(base, text=str(text), calibration=3)
    tokenizer = tiny_tokenizer()
    tokens = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    due = [[begin, *tokens[start : start + 46], end] for start in range(0, 24 * 46, 46)]
    assert rows(search) == due[:12]
    assert rows(proof) == due[12:]
    assert rows(calibration) == due[:3]
    assert [batch.rows for part in (search, proof) for batch in part.batches] == [[n] for n in range(12)] * 2
    assert [part.inputs for part in (calibration, search, proof)] == [3, 12, 12]
    # By default the gradients are of 64 rows at most.
    assert [part.inputs for part in of_text(base, text=str(text), length=24, examples=70)] == [64, 70, 70]


def test_a_short_text_is_cut_into_shorter_rows(base, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text(" ".join(WORDS[4:] * 30), encoding="utf-8")
    _, search, proof = of_text(base, text=str(file))
    assert {len(row) for row in rows(search) + rows(proof)} == {300 // 8 + 2}
    assert (search.inputs, proof.inputs) == (4, 4)


def test_a_model_without_special_tokens_reads_bare_rows(text):
    decoder = in_memory(tiny("GPT2LMHeadModel"), tiny_tokenizer())
    plain = tiny_tokenizer()
    plain.backend_tokenizer.post_processor = None
    stage = SearchStage(length=40, budget="kl<=1", text=str(text), examples=4)
    _, search, _ = cost.of_text(decoder, plain, stage)
    assert {len(row) for row in rows(search)} == {40}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("good " * 255, "has 255 tokens, fewer than the 256"),
        ("naught " * 300, "does not know most words"),
        (" \n", "is empty"),
        (None, "cannot be read"),
    ],
)
def test_refuses_unusable_text(base, tmp_path, words, message):
    file = tmp_path / "text.txt"
    if words is not None:
        file.write_text(words, encoding="utf-8")
    with pytest.raises(ApproxError, match=message) as caught:
        of_text(base, text=str(file))
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_half_of_the_words_known_are_enough_and_256_tokens_too(base, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("good naught " * 128, encoding="utf-8")
    assert of_text(base, text=str(file))[1].inputs == 4


def test_a_text_that_is_not_utf_8_is_refused_without_advice_for_tasks(base, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("für ".encode("latin-1") * 300)
    with pytest.raises(ApproxError, match="line 1: byte 0xfc is not UTF-8") as caught:
        of_text(base, text=str(file))
    assert "--set" not in str(caught.value)


def test_sounds_are_searched_on_the_examples_of_a_task():
    model = tiny("Wav2Vec2ForCTC")
    with pytest.raises(ApproxError, match=r"takes input_values.*--task") as caught:
        of_text(in_memory(model, tiny_tokenizer()))
    assert caught.value.exit_code == Exit.UNSUPPORTED
