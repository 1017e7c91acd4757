"""Training examples: held out by group, in an order that the seed alone decides."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import config as settings

from approx.errors import ApproxError, Exit
from approx.finetuning.options import FinetuneStage
from approx.finetuning.trainer import (
    Schedule,
    _example_hash,
    digest_of,
    overlap,
    read_data,
    steps_of_pass,
    tensors_to,
)
from approx.tasks.example import Example, Split
from approx.tasks.task import Task
from tiny_classifier import tiny_model, tiny_tokenizer
from tiny_decoder import tiny_gpt2
from tiny_study import LABELS, SENTENCES
from tiny_training import masking_tokenizer
from zoo import tiny

SENTENCE_ROWS = [f"{SENTENCES[row % len(SENTENCES)]}\t{row % 2}" for row in range(40)]


@pytest.fixture
def sst2(tmp_path):
    (tmp_path / "SST-2").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "SST-2" / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *SENTENCE_ROWS]) + "\n")
    return str(tmp_path / "SST-2")


def data_of(options: FinetuneStage, model=None, *, labelled: bool = True, language="clm"):
    return read_data(options, model or tiny_model(2, LABELS), tiny_tokenizer(), labelled=labelled, language=language)


def test_a_tenth_is_held_out_at_most_and_never_trained_on(sst2):
    made = data_of(FinetuneStage(task="glue/sst2", data=sst2))
    trained, held_out = ({example.id for example in split.examples} for split in (made.split, made.held_out))
    assert (len(trained), len(held_out)) == (36, 4)
    assert not trained & held_out
    assert len(data_of(FinetuneStage(task="glue/sst2", data=sst2, validation=2)).held_out.examples) == 2
    again = data_of(FinetuneStage(task="glue/sst2", data=sst2))
    assert again.sha256 == made.sha256
    assert data_of(FinetuneStage(task="glue/sst2", data=sst2, seed=1)).sha256 != made.sha256


def test_batch_has_targets_only_where_a_mode_reads_labels(sst2):
    options = FinetuneStage(task="glue/sst2", data=sst2)
    batch = data_of(options).batch([0, 1, 2], 0)
    assert set(batch) >= {"input_ids", "attention_mask", "labels"}
    examples, tokenizer = data_of(options).split.examples, tiny_tokenizer()
    assert batch["labels"].tolist() == [example.label for example in examples[:3]]
    for row, mask, example in zip(batch["input_ids"], batch["attention_mask"], examples, strict=False):
        assert row[mask.bool()].tolist() == tokenizer(example.inputs["text"])["input_ids"]
    assert "labels" not in data_of(options, labelled=False).batch([0], 0)


def test_the_split_that_scores_are_reported_on_is_refused(sst2):
    with pytest.raises(ApproxError, match="scores are reported on") as caught:
        data_of(FinetuneStage(task="glue/sst2", data=sst2, split="dev"))
    assert caught.value.exit_code == Exit.REFUSED
    # A setting that selects no part of the split does not help.
    with pytest.raises(ApproxError, match="scores are reported on"):
        data_of(FinetuneStage(task="needle", settings={"length": 128}, split="dev"))


def test_min_length_leaves_out_short_inputs(sst2):
    every, longer = (data_of(FinetuneStage(task="glue/sst2", data=sst2, min_length=least)) for least in (None, 7))
    lengths = [longer.tokens(row) for row in range(len(longer.rows))]
    assert min(lengths) >= 7 > min(every.tokens(row) for row in range(len(every.rows)))
    examples = {example.id for data in (longer.split, longer.held_out) for example in data.examples}
    assert 0 < len(examples) < 40
    with pytest.raises(ApproxError, match=r"none of \d+ examples has the 1000 tokens of --min-length") as caught:
        data_of(FinetuneStage(task="glue/sst2", data=sst2, min_length=1000))
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_min_length_keeps_an_input_of_exactly_that_length(sst2):
    every = data_of(FinetuneStage(task="glue/sst2", data=sst2))
    longest = max(every.tokens(row) for row in range(len(every.rows)))
    data = data_of(FinetuneStage(task="glue/sst2", data=sst2, min_length=longest))
    assert {data.tokens(row) for row in range(len(data.rows))} == {longest}
    assert data.split.name == "train"


def test_accepts_lengths_up_to_the_positions_of_the_model(sst2):
    assert data_of(FinetuneStage(task="glue/sst2", data=sst2, length=32)).limit == 32
    assert data_of(FinetuneStage(task="glue/sst2", data=sst2)).limit == 32
    short = data_of(FinetuneStage(task="glue/sst2", data=sst2, length=8))
    assert (short.limit, max(short.tokens(row) for row in range(len(short.rows)))) == (8, 8)


def test_inputs_without_tokens_are_left_out_and_some_must_be_left(sst2, monkeypatch):
    original = read_data.__globals__["open_task"]
    empty = {"good"}

    def opened(name: str, **settings: Any) -> Any:
        task = original(name, **settings)
        encode = task.encode
        task.encode = lambda example, *more: (
            [{"input_ids": []}] if empty & set(example.inputs["text"].split()) else encode(example, *more)
        )
        return task

    monkeypatch.setattr("approx.finetuning.trainer.open_task", opened)
    made = data_of(FinetuneStage(task="glue/sst2", data=sst2))
    texts = [made.split.examples[number].inputs["text"].split() for number, _ in made.rows]
    assert not any("good" in words for words in texts)
    assert 0 < len(texts) < len(made.split.examples)
    empty |= {word for row in SENTENCE_ROWS for word in row.partition("\t")[0].split()}
    with pytest.raises(ApproxError, match="no training example has any tokens") as caught:
        data_of(FinetuneStage(task="glue/sst2", data=sst2))
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_an_example_without_inputs_is_too_short_for_any_length():
    task: Any = SimpleNamespace(
        name="lm", tokens=len, encode=lambda example, processor, limit: example.inputs["windows"]
    )
    examples = [Example(str(row), {"windows": windows}, None) for row, windows in enumerate(([], ["ab", "c"]))]
    chosen = Task.at_least(task, Split("train", examples, False), None, 1).examples
    assert [example.id for example in chosen] == ["1"]


def test_the_names_of_a_head_order_its_labels(sst2):
    plain, turned = (
        data_of(FinetuneStage(task="glue/sst2", data=sst2), tiny_model(2, names)) for names in (LABELS, LABELS[::-1])
    )
    at = [data.batch([0], 0)["labels"].item() for data in (plain, turned)]
    assert at[0] == 1 - at[1]


def test_a_model_of_another_kind_is_refused_before_its_head_fails(sst2):
    with pytest.raises(ApproxError, match="glue/sst2") as caught:
        data_of(FinetuneStage(task="glue/sst2", data=sst2), tiny_model(2, LABELS).bert)
    assert caught.value.exit_code == Exit.UNSUPPORTED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither was given"),
        ({"task": "glue/sst2", "text": ["a.txt"]}, "both were given"),
        ({"task": "glue/sst2", "limit": 1}, "At least two"),
        ({"task": "glue/sst2", "length": 64}, "takes 32 positions"),
    ],
)
def test_refuses_unreadable_data(sst2, options, message):
    with pytest.raises(ApproxError, match=message):
        data_of(FinetuneStage(**options, data=sst2))


def test_every_pass_sees_every_input_once_in_another_order(sst2):
    made = data_of(FinetuneStage(task="glue/sst2", data=sst2))
    passes = steps_of_pass(36, 6)
    order = Schedule(made, 6, 3 * passes, seed=0)
    assert len(order) == 3 * passes * 6
    taken = [order[place] for place in range(len(order))]
    for passed in range(3):
        rows = [row for row, of in taken if of == passed]
        assert sorted(rows) == list(range(36))
    assert [row for row, of in taken if of == 0] != [row for row, of in taken if of == 1]
    # A resumed process reads from the middle first.
    assert Schedule(made, 6, 3 * passes, seed=0)[70] == taken[70]
    assert [Schedule(made, 6, passes, seed=1)[place] for place in range(36)] != taken[:36]


@pytest.mark.parametrize(
    ("rows", "size", "digest"),
    [(5, 8, "9e82521174de34cd"), (8, 8, "bade3c39096c77f6"), (59, 8, "42c83fcaf4b6e8f3"), (450, 4, "a2059fb20bfb1be0")],
)
def test_the_order_of_a_seed_is_that_of_every_version_so_that_a_training_can_be_resumed(rows, size, digest):
    data: Any = SimpleNamespace(rows=range(rows), tokens=lambda row: 5 + row * 7 % 31)
    order = Schedule(data, size, 2 * steps_of_pass(rows, size), seed=7)
    taken = [order[place] for place in range(len(order))]
    assert hashlib.sha256(json.dumps(taken).encode()).hexdigest()[:16] == digest


def test_inputs_that_fill_no_batch_wait_for_the_next_pass(sst2):
    made = data_of(FinetuneStage(task="glue/sst2", data=sst2))
    assert [steps_of_pass(36, size) for size in (8, 36, 37)] == [4, 1, 1]
    order = Schedule(made, 8, 8, seed=0)
    taken = [order[place] for place in range(len(order))]
    assert [passed for _, passed in taken] == [0] * 32 + [1] * 32
    rows = [{row for row, of in taken if of == passed} for passed in (0, 1)]
    assert [len(each) for each in rows] == [32, 32]
    assert rows[0] != rows[1]


def test_batches_come_in_no_order_of_length(sst2):
    made = data_of(FinetuneStage(task="glue/sst2", data=sst2))
    order = Schedule(made, 6, 6, seed=0)
    firsts = [made.tokens(order[place][0]) for place in range(0, 36, 6)]
    assert firsts != sorted(firsts)
    assert firsts != sorted(firsts, reverse=True)


def test_inputs_of_a_batch_are_about_as_long(sst2):
    made = data_of(FinetuneStage(task="glue/sst2", data=sst2))
    order = Schedule(made, 6, 6, seed=0)
    spreads = []
    for start in range(0, 36, 6):
        lengths = [made.tokens(order[place][0]) for place in range(start, start + 6)]
        spreads.append(max(lengths) - min(lengths))
    assert sum(spreads) <= 6


def test_fewer_inputs_than_a_batch_holds_are_taken_again(sst2):
    made = data_of(FinetuneStage(task="glue/sst2", data=sst2, limit=4))
    order = Schedule(made, 8, 2, seed=0)
    assert {order[place][0] for place in range(8)} == {0, 1, 2}


def test_text_is_predicted_and_hides_other_words_in_every_pass(corpus):

    tokenizer = masking_tokenizer()
    model = tiny("BertForMaskedLM")
    made = read_data(FinetuneStage(text=[corpus], length=16), model, tokenizer, labelled=True, language="mlm")
    first, second, again = made.batch([0], 0), made.batch([0], 1), made.batch([0], 1)
    assert first["input_ids"][0].tolist() == made.encodings[0]["input_ids"]
    assert not torch.equal(first["labels"], second["labels"])
    assert torch.equal(second["labels"], again["labels"])
    hidden = second["labels"][0] != -100
    assert second["input_ids"][0][hidden].tolist() == [tokenizer.mask_token_id] * int(hidden.sum())


def test_batches_of_later_passes_keep_the_length(corpus):

    tokenizer = masking_tokenizer()
    options = FinetuneStage(task="mlm", data=corpus, length=16)
    made = read_data(options, tiny("BertForMaskedLM"), tokenizer, labelled=True, language="mlm")
    assert [made.batch([0], passed)["input_ids"].shape[1] for passed in (0, 1)] == [16, 16]


def test_the_end_of_a_text_is_held_out(corpus):

    made = read_data(
        FinetuneStage(text=[corpus], length=16),
        tiny("GPT2LMHeadModel"),
        tiny_tokenizer(),
        labelled=True,
        language="clm",
    )
    last_trained = max(example.inputs["end"] for example in made.split.examples)
    assert min(example.inputs["start"] for example in made.held_out.examples) >= last_trained


def test_evaluation_examples_that_were_trained_on_are_counted(sst2, tmp_path):
    from dataclasses import replace

    from approx.tasks import open_task

    options = FinetuneStage(task="glue/sst2", data=sst2)
    examples = open_task("glue/sst2").examples(Path(sst2), "train")
    assert overlap(options, examples[:7]) == 7
    # Text and label decide, whatever the row is called.
    assert overlap(options, [replace(one, id="elsewhere") for one in examples[:3]]) == 3
    assert (
        overlap(options, [replace(examples[0], label=1 - examples[0].label, inputs={"text": "new"}), examples[1]]) == 1
    )
    # So does every input, in any order.
    pair = replace(examples[0], inputs={**examples[0].inputs, "text_pair": "more"})
    assert overlap(options, [pair]) == 0
    assert _example_hash(pair) == _example_hash(replace(pair, inputs=dict(reversed(pair.inputs.items()))))
    text = tmp_path / "text.txt"
    text.write_text("the film")
    assert overlap(FinetuneStage(text=[str(text)]), examples) == 0


def test_the_hash_of_the_examples_goes_by_their_content(sst2, tmp_path):
    options = FinetuneStage(task="glue/sst2", data=sst2)
    known = digest_of(options)
    assert digest_of(FinetuneStage(task="glue/sst2", data=sst2, seed=9)) == known
    assert digest_of(FinetuneStage(task="glue/sst2", data=sst2, limit=39)) != known
    # It is in the records of trainings, and a resumption goes by it.
    assert known == "bdaf35766c91caaf889849675a7c5bf9dbf62272704d288e5fe3452890ed49fa"
    file = Path(sst2) / "train.tsv"
    file.write_text(file.read_text().replace("fine", "dull"))
    assert digest_of(options) != known
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, one in enumerate(texts):
        one.write_text(f"text {number}")
    digests = {digest_of(FinetuneStage(text=[str(one) for one in some])) for some in (texts[:1], texts[1:], texts)}
    assert len(digests) == 3


def test_examples_of_one_group_cannot_be_held_out(tmp_path):
    rows = [f'{{"text": "film {row}", "label": {row % 2}, "group": "one"}}' for row in range(30)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    options = FinetuneStage(task="text-classification", data=str(tmp_path / "train.jsonl"), settings={"labels": "0,1"})
    with pytest.raises(
        ApproxError, match="its 30 training examples are of 1 group, so that none can be held out"
    ) as caught:
        data_of(options, tiny_model(2, ["0", "1"]))
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_groups_stay_whole_and_the_seed_chooses_those_held_out(tmp_path):
    rows = [f'{{"text": "film {row}", "label": {row % 2}, "group": "{row % 20}"}}' for row in range(60)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    held_out = []
    for seed, count in ((0, 4), (0, 4), (1, 4), (0, 6), (0, 500)):
        options = FinetuneStage(
            task="text-classification",
            data=str(tmp_path / "train.jsonl"),
            settings={"labels": "0,1"},
            seed=seed,
            validation=count,
        )
        made = data_of(options, tiny_model(2, ["0", "1"]))
        groups = [{example.group for example in split.examples} for split in (made.held_out, made.split)]
        assert (len(groups[0]), len(groups[1])) == (2, 18)
        assert not groups[0] & groups[1]
        assert (len(made.held_out.examples), len(made.split.examples)) == (6, 54)
        held_out.append([example.id for example in made.held_out.examples])
    assert held_out[0] == held_out[1] == held_out[3] == held_out[4]
    assert held_out[0] != held_out[2]


def test_an_input_keeps_the_target_of_its_own_window(tmp_path):
    """Two questions to a context that takes several windows: each row's answer is read back from that row's tokens."""

    words = ["the", "film", "is", "not", "very", "good"] * 10
    words[7], words[50] = "dull", "fine"
    context = " ".join(words)
    answers = {f"{number}-{word}": word for number in range(8) for word in ("dull", "fine")}
    entries = [
        {"id": name, "question": "film", "answers": [{"text": word, "answer_start": context.index(word)}]}
        for name, word in answers.items()
    ]
    articles = [
        {
            "title": f"article {number}",
            "paragraphs": [{"context": context, "qas": entries[2 * number : 2 * number + 2]}],
        }
        for number in range(8)
    ]
    (tmp_path / "dev-v1.1.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    settings = {"articles": [article["title"] for article in articles], "window": 24, "stride": 8}
    # A part of the split that scores are reported on may be trained on; the rest is left to report on.
    options = FinetuneStage(task="squad", data=str(tmp_path), split="dev", settings=settings, validation=1)
    made = data_of(options, tiny("BertForQuestionAnswering"))
    assert len(made.rows) > 2 * len(made.split.examples)
    batch, tokenizer = made.batch(range(len(made.rows)), 0), tiny_tokenizer()
    found = set()
    for row, ids in enumerate(batch["input_ids"]):
        start, end = int(batch["start_positions"][row]), int(batch["end_positions"][row])
        example, window = made.rows[row]
        if start:
            assert tokenizer.decode(ids[start : end + 1]) == answers[made.split.examples[example].id]
            found.add((example, window))
    assert {example for example, _ in found} == set(range(len(made.split.examples)))
    assert {window > 0 for _, window in found} == {False, True}


@pytest.mark.parametrize(("language", "architecture"), [("clm", "GPT2LMHeadModel"), ("mlm", "BertForMaskedLM")])
def test_texts_are_read_whole_one_after_the_other_in_windows_of_the_length(language, architecture, tmp_path):

    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for word, file in zip(("the", "bad"), files, strict=True):
        file.write_text(f"{word} " * 400)
    tokenizer = masking_tokenizer()
    options = FinetuneStage(text=[str(file) for file in files], length=16, validation=1)
    made = read_data(options, tiny(architecture), tokenizer, labelled=True, language=language)
    assert {example.inputs["text"][:3] for example in made.split.examples} == {"the", "bad"}
    assert made.held_out.examples[-1].inputs["text"].startswith("bad")
    assert len(made.held_out.examples) == 1
    assert max(made.tokens(row) for row in range(len(made.rows))) == 16
    # About one window of English for an example.
    stretches = [example.inputs["end"] - example.inputs["start"] for example in made.split.examples]
    assert sorted(stretches)[len(stretches) // 2] in range(64, 72)
    if language == "clm":
        # Every token but the first of a text is a target once, since windows share a single token.
        whole = [e for e in (*made.split.examples, *made.held_out.examples) if e.inputs["text"].startswith("the")]
        targets = sum(
            int((made.batch([row], 0)["labels"][:, 1:] != -100).sum())
            for row, (number, _) in enumerate(made.rows)
            if made.split.examples[number] in whole
        )
        assert targets == 399


def test_a_model_without_a_limit_reads_text_in_windows_of_512_tokens(tmp_path, monkeypatch):

    file = tmp_path / "a.txt"
    file.write_text("bad " * 3000)
    monkeypatch.setattr("approx.planning.positions.limit", lambda config: None)
    options = FinetuneStage(text=[str(file)])
    made = read_data(options, tiny("GPT2LMHeadModel"), tiny_tokenizer(), labelled=True, language="clm")
    assert max(made.tokens(row) for row in range(len(made.rows))) == 512


def test_only_floats_take_the_dtype_of_the_model():
    batch = {"input_ids": torch.tensor([1]), "input_values": torch.tensor([0.5]), "attention_mask": torch.tensor([1])}
    moved = tensors_to(torch.device("cpu"), batch, torch.bfloat16)
    assert [x.dtype for x in moved.values()] == [torch.int64, torch.bfloat16, torch.int64]


def test_a_task_for_another_kind_of_input_is_refused_without_labels_too(tmp_path):

    with pytest.raises(ApproxError, match=r"makes input_ids, but a Wav2Vec2ForCTC takes input_values") as caught:
        data_of(FinetuneStage(task="needle", settings={"length": 64}), tiny("Wav2Vec2ForCTC"), labelled=False)
    assert caught.value.exit_code == Exit.UNSUPPORTED


SHORT = [
    "the film is good",
    "bad",
    "very dull",
    "the film is not very good",
    "fine long film",
    "dull",
    "is it good",
    "bad film",
] * 3


@pytest.mark.parametrize(("language", "begin"), [("clm", None), ("clm", "[CLS]"), ("mlm", None)])
def test_short_texts_are_joined_up_to_the_length(language, begin, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.mask_token = begin, "[UNK]"
    long = " ".join(["is"] * 60)
    rows = [*SHORT[:6], long, *SHORT[6:]]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    model = tiny_gpt2() if language == "clm" else tiny("BertForMaskedLM", vocab_size=14)
    made, loose = (
        read_data(
            FinetuneStage(text=[str(tmp_path / "texts.jsonl")], length=16, pack=pack),
            model,
            tokenizer,
            labelled=True,
            language=language,
        )
        for pack in (True, False)
    )
    # No text is lost, cut or moved.
    every = [*made.split.examples, *made.held_out.examples]
    pieces = [one.inputs["text"][one.inputs["start"] : one.inputs["end"]] for one in every]
    assert " ".join(pieces).replace("[SEP]", " ").split() == " ".join(rows).split()
    assert pieces[0].startswith("[SEP]".join(SHORT[:3]))
    # What is longer than an input is read as before.
    assert [one.inputs["text"] for one in every].count(long) == [
        one.inputs["text"] for one in loose.split.examples
    ].count(long)
    lengths = [made.tokens(row) for row in range(len(made.rows))]
    assert len(lengths) < 0.7 * len(loose.rows)
    assert max(lengths) <= 16
    of_packs = [
        n for n, (row, _) in zip(lengths, made.rows, strict=True) if made.split.examples[row].inputs["text"] != long
    ]
    assert sorted(of_packs)[1] >= 10
    if language == "clm":
        ids, labels = (made.batch([0], 0)[name][0].tolist() for name in ("input_ids", "labels"))
        assert tokenizer.decode(ids).count("[SEP]") >= 2
        assert labels == [-100, *ids[1:]]
        assert (tokenizer.decode(ids[:1]) == "[CLS]") is (begin is not None)


def test_conversations_are_joined_as_their_template_writes_them(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    row = json.dumps({"messages": [{"role": "user", "content": "good"}, {"role": "assistant", "content": "very bad"}]})
    (tmp_path / "chat.jsonl").write_text(f"{row}\n" * 12)
    options = FinetuneStage(text=[str(tmp_path / "chat.jsonl")], length=8, pack=True)
    made = read_data(options, tiny_gpt2(), tokenizer, labelled=True, language="clm")
    assert made.split.examples[0].inputs["text"] == "good very bad [SEP]" * 2


def test_only_texts_are_joined_and_only_with_a_token_between_them(sst2, tmp_path):
    with pytest.raises(ApproxError, match="joins texts for language modelling, and glue/sst2 has examples of its own"):
        data_of(FinetuneStage(task="glue/sst2", data=sst2, pack=True))
    (tmp_path / "t.jsonl").write_text('{"text": "good film"}\n' * 3)
    tokenizer = tiny_tokenizer()
    tokenizer.sep_token = None
    options = FinetuneStage(text=[str(tmp_path / "t.jsonl")], length=8, pack=True)
    with pytest.raises(ApproxError, match="end token between texts, and this one has none"):
        read_data(options, tiny_gpt2(), tokenizer, labelled=True, language="clm")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A dataset of 400 short texts for training, damaged behind them."""
    monkeypatch.setattr(settings, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": SHORT[row % len(SHORT)]} for row in range(400)]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "2.jsonl").write_text("no JSON\n" * 20)
    files = "  - split: train\n    path: '*.jsonl'\n"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n")
    return f"hub:{tmp_path}"


def streamed(data: str, **options: Any) -> Any:
    stage = FinetuneStage(task="lm", data=data, streaming=True, recover=["distill"], batch_size=4, length=16, **options)
    return read_data(stage, tiny_gpt2(), tiny_tokenizer(), labelled=False, language="clm")


def test_a_stream_is_read_as_far_as_the_steps_take_it(hub):
    made = streamed(hub, steps=9)
    assert (len(made.split.examples), len(made.held_out.examples)) == (37, 4)
    assert [example.inputs["text"] for example in made.split.examples[:3]] == SHORT[:3]
    assert len(streamed(hub, steps=9, limit=20).split.examples) == 18
    # Everything would be read otherwise.
    with pytest.raises(ApproxError, match=r"download of .* failed"):
        streamed(hub, steps=9000)
    with pytest.raises(ApproxError, match=r"Give --steps instead\."):
        streamed(hub, epochs=2)


def test_more_texts_of_a_stream_are_read_where_they_are_joined(hub):
    made = streamed(hub, steps=9, pack=True)
    every = [*made.split.examples, *made.held_out.examples]
    assert len(every) >= 41
    assert made.tokens(0) > 8
    assert 80 < sum(example.inputs["text"].count("[SEP]") for example in every) < 300


def test_a_text_is_forgotten_behind_what_the_steps_take(tmp_path):
    (tmp_path / "text.txt").write_text("the film is good " * 3000)
    made = {}
    for streaming in (True, False):
        options = FinetuneStage(
            text=[str(tmp_path / "text.txt")], recover=["clm"], steps=4, batch_size=5, length=16, streaming=streaming
        )
        made[streaming] = read_data(options, tiny_gpt2(), tiny_tokenizer(), labelled=True, language="clm")
    short, whole = made[True], made[False]
    assert len(short.split.examples) + len(short.held_out.examples) == 23
    assert len(short.split.examples[0].inputs["text"]) < 23 * 70 < len(whole.split.examples[0].inputs["text"])
    assert short.encodings == whole.encodings[: len(short.encodings)]
    first = FinetuneStage(text=[str(tmp_path / "text.txt")], limit=30, length=16)
    assert len(read_data(first, tiny_gpt2(), tiny_tokenizer(), labelled=True, language="clm").split.examples) == 27
