"""Copying: a perfect model scores 1, a guessing one scores chance, and every symbol is scored at its own position."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, evaluate
from approx.evaluation.options import EvaluateOptions
from approx.tasks import open_task
from approx.tasks.copying import SEPARATOR, SYMBOLS
from tiny_classifier import tiny_model, tiny_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", SEPARATOR, *SYMBOLS]


def tokenizer(words=WORDS, front=False):
    vocabulary = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if front:
        made.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def score(task, say, front=False):
    """Scores of a fake model that maps the tokens of a batch to logits."""
    processor, examples = tokenizer(front=front), task.examples()
    encodings = [task.encode(example, processor)[0] for example in examples]
    ids = task.collate(encodings, processor)["input_ids"]
    said = task.predict(SimpleNamespace(logits=say(ids)), encodings, None)
    return task.score(said, [example.label for example in examples])


def one_hot(ids):
    return torch.nn.functional.one_hot(ids, len(WORDS)).float()


@pytest.mark.parametrize("front", [False, True])
def test_a_perfect_model_scores_1(front):
    scores = score(open_task("copy", examples=50), lambda ids: one_hot(ids.roll(-1, 1)), front)
    assert scores == {"token_accuracy": 1.0, "accuracy": 1.0}


def test_guessing_scores_chance():
    def guess(ids):
        logits = torch.rand(*ids.shape, len(WORDS))
        logits[..., 4:14] += 1
        return logits

    scores = score(open_task("copy", examples=400), guess)
    # 400 sequences of 47 symbols: four standard deviations.
    assert scores["token_accuracy"] == pytest.approx(0.1, abs=0.009)
    assert scores["accuracy"] == 0


def test_one_wrong_symbol_costs_a_token_and_a_sequence():
    def nearly(ids):
        logits = one_hot(ids.roll(-1, 1))
        # The first copied symbol becomes a separator in the first sequence, and an unknown token in the second.
        for row, token in enumerate((3, 0)):
            place = (ids[row] == 3).nonzero()[1].item()
            logits[row, place] = one_hot(torch.tensor(token)) * 2
        return logits

    task = open_task("copy", length=16, examples=4)
    symbols = sum(len(example.label) for example in task.examples())
    assert score(task, nearly) == {"token_accuracy": pytest.approx(1 - 2 / symbols), "accuracy": 0.5}


@pytest.mark.parametrize(("length", "symbols"), [(4, 2), (9, 3), (128, 10), (512, 52)])
def test_sequences_are_two_equal_halves_of_drawn_symbols(length, symbols):
    examples = open_task("copy", length=length, symbols=symbols, examples=200).examples()
    counts = [len(example.label) for example in examples]
    assert max(counts) == length // 2 - 1
    assert min(counts) >= max(1, (length // 2 - 1) // 2)
    for example in examples:
        words = example.inputs["text"].split(" ")
        half = [SEPARATOR, *example.label]
        assert words == half * 2
    drawn = np.unique(list("".join(example.label for example in examples)), return_counts=True)[1]
    assert len(drawn) == symbols
    assert drawn.max() < drawn.mean() + 6 * drawn.mean() ** 0.5


def test_a_causal_model_is_compared_end_to_end():
    config = GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=len(WORDS), n_positions=32, bos_token_id=None, eos_token_id=None
    )
    model, task = GPT2LMHeadModel(config).eval(), open_task("copy", length=32, examples=12)
    entry = evaluate({name: Subject(name, model, tokenizer()) for name in ("exact", "same")}, task)
    assert (entry.metric, entry.fraction, entry.variants[0].difference) == ("token_accuracy", True, 0.0)
    assert entry.variants[0].test == "paired bootstrap"
    with pytest.raises(ApproxError, match=r"limit is 32 .*positions of exact"):
        evaluate({"exact": Subject("exact", model, tokenizer())}, open_task("copy", length=64))
    with pytest.raises(ApproxError, match=r"a truncated copy cannot be scored\. Set 'length' to 32 or less"):
        evaluate(
            {"exact": Subject("exact", model, tokenizer())},
            open_task("copy", length=64),
            EvaluateOptions(truncate=True),
        )
    with pytest.raises(ApproxError, match="copy needs a causal language-modelling head"):
        task.check(tiny_model(2))


def test_a_tokenizer_that_does_not_read_symbols_is_refused():
    pieces = Tokenizer(models.BPE({"a": 0, "b": 1, "|": 2}, []))
    for other in (tiny_tokenizer(), tokenizer(WORDS[:8]), PreTrainedTokenizerFast(tokenizer_object=pieces)):
        task = open_task("copy", length=8)
        with pytest.raises(ApproxError, match="needs a tokenizer with one token per symbol") as caught:
            task.encode(task.examples()[0], other)
        assert caught.value.exit_code == Exit.UNSUPPORTED


def test_logits_that_are_not_finite_are_no_prediction():
    with pytest.raises(ApproxError, match="not finite") as caught:
        score(open_task("copy", examples=2), lambda ids: one_hot(ids) * float("nan"))
    assert caught.value.exit_code == Exit.VERIFICATION


def test_rejects_missing_data_and_impossible_settings(tmp_path):
    with pytest.raises(ApproxError, match="cannot read"):
        open_task("copy").load(tmp_path)
    with pytest.raises(ApproxError, match=r"'test'.*train, dev"):
        open_task("copy").load(split="test")
