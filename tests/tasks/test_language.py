"""Language modelling: every token is scored once, losses equal the model's own, slices are by place; kinds of texts."""

import gzip
import hashlib
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, evaluate
from approx.evaluation.quality import compare
from approx.tasks import Example, open_task
from approx.tasks.language import LanguageModelling
from approx.tasks.masked_language import MaskedLanguageModelling
from approx.tasks.metrics import BitsPerByte, Perplexity
from tiny_classifier import WORDS, tiny_model, tiny_tokenizer

TEXT = " ".join(WORDS[4 + (index * index) % 10] for index in range(150))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "valid.txt").write_text(TEXT)
    return tmp_path


def causal(positions=256):
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=len(WORDS), n_positions=positions)
    config.update({"initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None})
    torch.manual_seed(1)
    return GPT2LMHeadModel(config).eval()


def masked(**changed):
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertConfig(**shape, vocab_size=len(WORDS), max_position_embeddings=32, initializer_range=0.5, **changed)


def score(model, task, data):
    return evaluate({"exact": Subject("exact", model, tiny_tokenizer())}, task, data=data).base.scores


@pytest.mark.parametrize("stretch", [40, 300, 10_000])
def test_a_window_over_everything_gives_the_models_own_loss(data, stretch):
    model, ids = causal(), tiny_tokenizer()(TEXT, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    scores = score(model, open_task("lm", stretch=stretch), data)
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert scores["bits_per_byte"] == pytest.approx(loss * (ids.shape[1] - 1) / math.log(2) / len(TEXT), rel=1e-5)


@given(window=st.integers(2, 64), stride=st.integers(1, 64), stretch=st.integers(1, 400))
def test_every_token_is_scored_once_with_enough_before_it(window, stride, stretch):
    stride = min(stride, window - 1)
    task, tokenizer = LanguageModelling(window, stride, stretch), tiny_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    scored, position = [], 1
    for example in task._stretches(TEXT, "text"):
        for one in task.encode(example, tokenizer, 64):
            shown, count = one["input_ids"], one["scored"]
            assert len(shown) <= window
            assert 0 < count <= stride
            scored += shown[-count:]
            position += count
            assert len(shown) - count >= min(position - count, window - stride)
            assert ids[position - len(shown) : position] == shown
    assert scored == ids[1:]


def test_a_token_for_the_beginning_lets_the_first_word_be_scored(data):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "[CLS]"
    (first, *_) = open_task("lm").encode(Example("a", {"text": TEXT, "start": 0, "end": 20}, 20), tokenizer, 64)
    assert first["input_ids"][0] == tokenizer.bos_token_id
    assert first["scored"] == len(first["input_ids"]) - 1


@pytest.mark.parametrize(("name", "default"), [("lm", 1024), ("mlm", 512)])
def test_windows_are_as_long_as_positions_allow_or_else_the_default(name, default):
    task, tokenizer, text = open_task(name), tiny_tokenizer(), " ".join([TEXT] * 10)
    tokenizer.mask_token = "[UNK]"
    example = Example("a", {"text": text, "start": 0, "end": len(text)}, len(text))
    for limit in (None, 100, default + 100):
        windows = task.encode(example, tokenizer, limit)
        assert max(len(one["input_ids"]) for one in windows) == (limit or default)


def test_slices_of_one_width_hold_the_same_losses(data):
    model = causal()
    subjects = {name: Subject(name, model, tiny_tokenizer()) for name in ("exact", "same")}
    wide, whole = (evaluate(subjects, open_task("lm", stretch=100, bucket=width), data=data) for width in (60, 400))
    assert [(part.from_, part.to) for part in wide.variants[0].slices] == [(0, 60), (60, 120), (120, 180)]
    (every,) = whole.variants[0].slices
    assert every.base == pytest.approx(whole.base.scores["perplexity"])
    assert wide.base.scores == whole.base.scores
    with pytest.raises(ApproxError, match="Setting 'bucket' of the task 'lm' is 0"):
        open_task("lm", bucket=0)


def test_slices_by_the_number_of_preceding_tokens(data):
    model = causal()
    subjects = {name: Subject(name, model, tiny_tokenizer()) for name in ("exact", "same")}
    entry = evaluate(subjects, open_task("lm", stretch=100), data=data)
    assert (entry.metric, entry.fraction, entry.lower_is_better) == ("bits_per_byte", False, True)
    assert (entry.sliced_by, entry.slice_metric) == ("tokens before", "perplexity")
    (same,) = entry.variants
    # Equal on so few stretches, which leave room for a loss that none of them shows.
    assert (same.difference, same.verdict) == (0.0, "inconclusive")
    assert [(part.from_, part.to) for part in same.slices] == [
        (0, 16),
        (16, 32),
        (32, 64),
        (64, 128),
        (128, 256),
    ]
    assert all(part.base == part.converted for part in same.slices)


def test_the_masked_loss_is_that_of_the_hidden_tokens(data):
    torch.manual_seed(2)
    model, task, tokenizer = BertForMaskedLM(masked()).eval(), MaskedLanguageModelling(stretch=120), tiny_tokenizer()
    tokenizer.mask_token = "[UNK]"
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    examples = list(task._stretches(TEXT, "valid"))
    losses, restored = [], []
    for example in examples:
        for one in task.encode(example, tokenizer, 32):
            assert len(one["input_ids"]) <= 32
            whole, labels = list(one["input_ids"]), [-100] * len(one["input_ids"])
            for place, token in one["targets"]:
                assert whole[place] == tokenizer.mask_token_id
                whole[place] = labels[place] = token
            restored += whole[1:-1]
            with torch.no_grad():
                out = model(input_ids=torch.tensor([one["input_ids"]]), labels=torch.tensor([labels]))
            losses += [out.loss.item()] * len(one["targets"])
    assert restored == ids
    subject = Subject("exact", model, tokenizer)
    measured = evaluate({"exact": subject}, task, data=data).base.scores["masked_loss"]
    assert measured == pytest.approx(np.mean(losses), rel=1e-5)
    assert 0.1 < len(losses) / len(ids) < 0.3


@pytest.mark.parametrize(("margin", "verdict"), [(None, "loss beyond margin"), (90.0, "loss within margin")])
def test_the_margin_of_a_language_model_is_a_share_of_its_loss(margin, verdict):
    """Worse by 30 % of the loss: beyond 1 % of it, although the difference is less than one bit per byte."""
    labels = [20] * 30
    said = [{"loss": 20.0 + row % 3, "count": 8, "places": {"1": [20.0, 8]}} for row in range(30)]
    worse = [one | {"loss": one["loss"] * 1.3} for one in said]
    allowed = BitsPerByte.acceptable(margin, BitsPerByte.value(said, labels))
    examples = [
        Example(str(row), {"text": "A text of that many bytes.", "start": 0, "end": 26}, label)
        for row, label in enumerate(labels)
    ]
    entry = compare(open_task("lm"), examples, labels, {"exact": said, "worse": worse}, margin=allowed, seed=0)
    assert 0 < entry.variants[0].difference < 1
    assert entry.variants[0].verdict == verdict
    assert entry.variants[0].scores["perplexity"] > entry.base.scores["perplexity"]


def test_scores_add_up_over_stretches():
    said = [{"loss": 10.0, "count": 4}, {"loss": 2.0, "count": 8}]
    assert Perplexity.value(said, [20, 40]) == pytest.approx(math.e)
    assert BitsPerByte().compute(predictions=said, references=[20, 40]) == {
        "bits_per_byte": pytest.approx(12 / math.log(2) / 60)
    }


def test_heads_and_models_that_see_ahead_are_refused():
    with pytest.raises(ApproxError, match=r"needs a causal language-modelling head.*AutoModelForCausalLM"):
        open_task("lm").check(tiny_model(2))
    with pytest.raises(ApproxError, match="depends on later tokens"):
        open_task("lm").check(BertLMHeadModel(masked()))
    open_task("lm").check(BertLMHeadModel(masked(is_decoder=True)))
    quiet = BertLMHeadModel(masked())
    quiet.register_forward_hook(lambda *call: setattr(call[-1], "logits", call[-1].logits * 1e-3))
    with pytest.raises(ApproxError, match="depends on later tokens"):
        open_task("lm").check(quiet)
    with pytest.raises(ApproxError, match=r"needs a masked language-modelling head.*AutoModelForMaskedLM"):
        open_task("mlm").check(causal())


def test_texts_are_found_and_damaged_ones_named(tmp_path):
    task = open_task("lm")
    with pytest.raises(ApproxError, match="found no text") as caught:
        task.load(tmp_path)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    (tmp_path / "valid.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert (
        "".join(e.inputs["text"][e.inputs["start"] : e.inputs["end"]] for e in task.load(tmp_path, "valid").examples)
        == TEXT
    )
    (tmp_path / "test.txt").write_text("   \n ")
    with pytest.raises(ApproxError, match="0 words"):
        task.load(tmp_path, "test")
    with pytest.raises(ApproxError, match=r"looked for one text file in .*found test\.txt, valid\.txt\.gz"):
        task.load(tmp_path)
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ApproxError, match="is not utf-16, though"):
        task.load(tmp_path / "odd.txt")


def test_the_stretches_of_a_text_are_words_and_bytes_of_it(shared_data):
    split = open_task("lm").load(shared_data / "lm" / "wikitext-2" / "valid.raw.txt", limit=50)
    assert split.subset
    for example in split.examples:
        text = example.inputs["text"][example.inputs["start"] : example.inputs["end"]]
        assert example.label == len(text.encode())
        assert len(text) >= 2000


@pytest.mark.parametrize(("name", "model"), [("lm", causal), ("mlm", lambda: BertForMaskedLM(masked()).eval())])
def test_windows_beyond_the_positions_are_refused_and_not_cut(data, name, model):
    model, tokenizer = model(), tiny_tokenizer()
    tokenizer.mask_token = "[UNK]"
    limit = model.config.max_position_embeddings
    subject = Subject("exact", model, tokenizer)
    with pytest.raises(ApproxError, match=f"is {limit + 1}, but the limit is {limit} tokens.*--max-length {limit + 1}"):
        evaluate({"exact": subject}, open_task(name, window=limit + 1), data=data)
    assert evaluate({"exact": subject}, open_task(name, window=limit), data=data).base.scores


def test_stretches_of_a_long_text_share_its_hash(tmp_path):
    (tmp_path / "text.txt").write_text("word " * 5000)
    first, *_, last = open_task("lm").load(tmp_path / "text.txt").examples
    assert first.brief["text"] == last.brief["text"] == hashlib.sha256(b"word " * 5000).hexdigest()
    assert (first.brief["start"], last.brief["start"]) == (first.inputs["start"], last.inputs["start"])
    assert Example("short", {"text": "a sentence"}, 0).brief == {"text": "a sentence"}


CHAT = [
    {"role": "system", "content": "the film is"},
    {"role": "user", "content": "not very good"},
    {"role": "assistant", "content": "bad"},
]
TEMPLATE = "{% for one in messages %}{{ one.role|replace('system','[CLS]')|replace('user','the')|replace('assistant','is') }} {{ one.content }} [SEP]{% endfor %}"


def chats(folder, *rows):
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "chat.jsonl"


@pytest.mark.parametrize("column", ["messages", "talk"])
def test_a_conversation_is_read_as_the_chat_template_writes_it(column, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    file = chats(
        tmp_path, {column: CHAT}, {column: CHAT[1:], "text": "a text"} if column == "messages" else {column: CHAT}
    )
    task = open_task("lm", columns={} if column == "messages" else {"messages": column})
    examples = task.load(file).examples
    assert len({example.group for example in examples}) == 2
    (window,) = task.encode(examples[0], tokenizer)
    words = "[CLS] the film is [SEP] the not very good [SEP] is bad [SEP]"
    assert tokenizer.convert_ids_to_tokens(window["input_ids"]) == words.split()
    # The first token has nothing before it.
    assert window["scored"] == len(words.split()) - 1
    assert examples[0].label == sum(len(one["content"]) for one in CHAT)
    # A text comes before messages.
    assert ("text" in examples[1].inputs) is (column == "messages")
    tokenizer.mask_token = "[UNK]"
    (hidden,) = open_task("mlm", hidden=0.5).encode(examples[0], tokenizer)
    assert len(hidden["input_ids"]) == len(words.split()) + 2
    scores = evaluate({"exact": Subject("exact", causal(), tokenizer)}, task, data=file).base.scores
    assert scores["perplexity"] > 1


def test_a_template_that_writes_the_beginning_of_a_text_is_not_given_another(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = TEMPLATE, "[CLS]"
    task = open_task("lm")
    first, second = task.load(chats(tmp_path, {"messages": CHAT}, {"messages": CHAT[1:]})).examples
    starts = [
        tokenizer.convert_ids_to_tokens(task.encode(one, tokenizer)[0]["input_ids"])[:2] for one in (first, second)
    ]
    assert starts == [["[CLS]", "the"], ["[CLS]", "the"]]
    assert [task.encode(one, tokenizer)[0]["scored"] for one in (first, second)] == [12, 8]


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": []}, TEMPLATE, "messages are a list of objects, each with a role and a content in words"),
        ({"messages": [{"role": "user"}]}, TEMPLATE, "messages are a list of objects"),
        ({"messages": [{"from": "human", "value": "good"}]}, TEMPLATE, "messages are a list of objects"),
        ({"messages": "good"}, TEMPLATE, "messages are a list of objects"),
        ({"film": "good"}, TEMPLATE, "no column text"),
        ({"messages": CHAT}, None, "has no chat template"),
        (
            {"messages": CHAT},
            "{{ raise_exception('Roles must alternate') }}",
            "does not take the conversation .*Roles must",
        ),
    ],
)
def test_damaged_conversations_and_missing_templates_are_named(row, template, message, tmp_path):
    tokenizer, task = tiny_tokenizer(), open_task("lm")
    tokenizer.chat_template = template
    with pytest.raises(ApproxError, match=message) as caught:
        task.encode(task.load(chats(tmp_path, row)).examples[0], tokenizer)
    assert caught.value.exit_code == (Exit.UNAVAILABLE if template else Exit.UNSUPPORTED)
