"""What decoders write: a number hidden in a text, a copy, and a verdict that likelihood alone does not give."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import approx
from approx.errors import ApproxError
from approx.evaluation.record import LIKELIHOOD_ONLY, Quality, Record, judge_likelihoods
from approx.publishing.report import markdown
from approx.publishing.summary import advice
from approx.tasks import open_task
from approx.tasks.generation import prompt, prompts, texts, written
from typed import part_of
from zoo import tiny


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each character."""
    known = ["<end>", *map(chr, range(32, 127)), "\n"]
    made = Tokenizer(models.BPE({one: number for number, one in enumerate(known)}, []))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<end>")


class Writer(torch.nn.Module):
    """Stands for a decoder: it writes texts that are chosen by the prompt, and then the end token."""

    def __init__(self, tokenizer: Any, answer: Any) -> None:
        super().__init__()
        self.tokenizer, self.answer = tokenizer, answer

    def generate(self, ids: torch.Tensor, *, max_new_tokens: int, **ways: Any) -> torch.Tensor:
        rows = []
        for row in ids:
            text = self.answer(self.tokenizer.decode(row))
            new = self.tokenizer(text)["input_ids"][:max_new_tokens]
            rows.append([*row.tolist(), *new, *[0] * (max_new_tokens - len(new))])
        return torch.tensor(rows)


def said(task: Any, answer: Any) -> tuple[list[Any], list[Any]]:
    """Predictions and labels of a task for a model that answers so."""
    tokenizer, examples = letters(), task.examples()
    predictions = []
    for example in examples:
        encodings = task.encode(example, tokenizer)
        out = task.outputs(Writer(tokenizer, answer), task.collate(encodings, tokenizer))
        predictions += task.predict(out, encodings, None)
    return predictions, [example.label for example in examples]


def number_in(text: str) -> str:
    return text.split("The pass key is ")[1].split(".")[0]


@pytest.mark.parametrize("length", [256, 700])
def test_a_passkey_lies_at_its_depth_in_a_text_of_its_length(length):
    task, tokenizer = open_task("passkey", length=length, examples=5), letters()
    for row, example in enumerate(task.examples()):
        (one,) = task.encode(example, tokenizer)
        text = tokenizer.decode(one["input_ids"])
        assert isinstance(text, str)
        assert length - 40 < task.tokens(one) <= length
        assert example.label == f"{number_in(text)} at {25 * row} %"
        assert text.endswith("The pass key is")
        hidden = text[text.index("remember it. ") + 13 : text.rindex(" What is")]
        around = len(hidden) - len("The pass key is 12345. Remember it.")
        assert hidden.index("The pass key is") == pytest.approx(around * row / 4, abs=25)
    with pytest.raises(ApproxError, match=f"Set 'length' to {length - 1} or less"):
        task.encode(example, tokenizer, length - 1)


def test_a_passkey_counts_if_its_digits_are_written_and_is_scored_by_depth():
    task = open_task("passkey", length=300, examples=10)
    predictions, labels = said(task, lambda text: f" {number_in(text)}. It")
    assert predictions == labels
    # One that reads only the end of the text.
    predictions, labels = said(task, lambda text: number_in(text) if text.index("The pass key is ") > 150 else "0")
    accuracy = task.score(predictions, labels)["accuracy"]
    assert 0 < accuracy < 1
    parts = list(task.slices(labels, [300] * 10, predictions))
    assert [(start, end) for start, end, *_ in parts] == [(0, 25), (25, 50), (50, 75), (75, 100), (100, 101)]
    scores = [task.score(part, true)["accuracy"] for _, _, part, true in parts]
    assert scores == sorted(scores)


def test_a_copy_that_is_generated_is_the_models_own():
    """Predicted from true symbols, a single mistake stays single; generated, nothing corrects it."""
    task = open_task("copy", length=24, symbols=5, examples=6, generate=True)
    tokenizer = letters()
    assert open_task("copy").measures == "likelihood"
    assert task.measures == "generation"
    words = PreTrainedTokenizerFast(
        tokenizer_object=_words(["<end>", "|", *"abcde"]), eos_token="<end>", unk_token="<end>"
    )
    examples = task.examples()
    encodings = [task.encode(example, words)[0] for example in examples]
    assert [len(one["input_ids"]) for one in encodings] == [len(example.label) + 2 for example in examples]
    writer: Any = Writer(words, lambda text: text.replace("|", "").strip())
    predictions = []
    for one in encodings:
        predictions += task.predict(task.outputs(writer, task.collate([one], words)), [one], None)
    assert predictions == [example.label for example in examples]
    with pytest.raises(ApproxError, match="Train without it"):
        task.targets(examples, encodings, words, None)
    assert len(tokenizer)


def _words(known: list[str]) -> Tokenizer:
    made = Tokenizer(models.WordLevel({one: number for number, one in enumerate(known)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def test_texts_end_at_the_first_token_that_holds_what_ends_them():
    tokenizer = letters()
    one = prompt(tokenizer, "ab", 6, until=("\n", "z"))
    assert [tokenizer.decode([token]) for token in one["stops"]] == ["<end>", "z", "\n"]
    row = tokenizer("qz\nq")["input_ids"]
    assert texts(torch.tensor([row, tokenizer("qqqq")["input_ids"]]), [one, one]) == ["q", "qqqq"]


def test_what_is_written_is_what_generate_writes_with_exact_and_converted_attention():
    model = tiny("GPT2LMHeadModel", seed=3, vocab_size=98, initializer_range=0.6, eos_token_id=None, bos_token_id=None)
    batch = prompts([prompt(letters(), text, 9) for text in ("some text", "more text")])
    for _ in range(2):
        got = written(model, batch, exactly=True)
        ids = batch["input_ids"]
        for _ in range(9):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(got, ids[:, 9:])
        approx.convert(model, approx.Plan.of("sinks", sinks=2, window=4)) if not hasattr(
            model.config, "approx"
        ) else None


def record(*quality: Quality) -> Record:
    variants = [{"name": "linear", "layers": [{"layer": 0, "mechanism": "linear"}], "verified": True}]
    return part_of(Record, schema=1, variants=variants, quality=list(quality))


def likelihood(**more: Any) -> dict[str, Any]:
    """Bits per byte as good as those of exact attention."""
    entry = {"name": "linear", "difference": 0.001, "interval": [-0.002, 0.004], "margin": 0.01, "verdict": "no loss"}
    about = {
        "task": "lm",
        "measures": "likelihood",
        "metric": "bits_per_byte",
        "fraction": False,
        "lower_is_better": True,
    }
    base = {"scores": {"bits_per_byte": 1.0}, "interval": [0.9, 1.1]}
    return {**about, "base": base, "variants": [{**entry, "scores": {"bits_per_byte": 1.001}, **more}]}


def needle(lost: float) -> dict[str, Any]:
    """Numbers that are found less often than with exact attention."""
    verdict = "loss beyond margin" if lost else "no loss"
    entry = {"name": "linear", "difference": -lost, "interval": [-lost - 0.005, -lost + 0.005], "margin": 0.01}
    entry |= {"scores": {"accuracy": 0.95 - lost}, "verdict": verdict}
    base = {"scores": {"accuracy": 0.95}, "interval": [0.9, 0.98]}
    return {"task": "passkey", "measures": "generation", "metric": "accuracy", "base": base, "variants": [entry]}


def test_twenty_points_lost_in_generation_at_equal_likelihood_are_caught():
    alone, found, lost = (
        record(*judge_likelihoods([part_of(Quality, **one) for one in tasks]))
        for tasks in ([likelihood()], [likelihood(), needle(0.0)], [likelihood(), needle(0.2)])
    )
    assert [task.variants[0].verdict for task in alone.quality] == [LIKELIHOOD_ONLY]
    (said,) = advice(alone)
    assert said.decision == "not settled"
    assert "likelihood only: generation not measured (approx evaluate MODEL --task passkey" in said.reason
    assert LIKELIHOOD_ONLY in markdown([alone])

    assert [task.variants[0].verdict for task in found.quality] == ["no loss", "no loss"]
    assert [task.variants[0].verdict for task in lost.quality] == ["no loss", "loss beyond margin"]
    (said,) = advice(lost)
    assert said.decision == "do not use"
    assert "20.0" in said.reason


@pytest.mark.parametrize(
    ("interval", "verdict", "expected"),
    [
        ([-0.002, 0.004], "no loss", "no loss"),
        ([0.001, 0.004], "loss within margin", "loss within margin"),
        ([0.02, 0.04], "loss beyond margin", "loss beyond margin"),
        ([-0.02, 0.04], "inconclusive", "inconclusive"),
    ],
)
def test_a_verdict_on_likelihood_returns_when_generation_is_measured_later(interval, verdict, expected):
    task = part_of(Quality, **likelihood(interval=interval, verdict=verdict))
    (alone,) = judge_likelihoods([task])
    small = verdict in ("no loss", "loss within margin")
    assert alone.variants[0].verdict == (LIKELIHOOD_ONLY if small else verdict)
    assert judge_likelihoods([alone]) == [alone]
    again, _ = judge_likelihoods([alone, part_of(Quality, **needle(0.0))])
    assert again.variants[0].verdict == expected
    # Of another variant nothing is known by that.
    other = part_of(Quality, **needle(0.0))
    other.variants[0].name = "another"
    assert judge_likelihoods([alone, other])[0] == alone
