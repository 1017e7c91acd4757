"""Every head of every family works with its tasks, converted or not, and batching does not change predictions."""

import copy
import json
import string
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import approx
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, evaluate, predict, prepare
from approx.evaluation.options import EvaluateOptions
from approx.tasks import open_task
from tiny_speech import recogniser, some_utterances, speech_processor, write_utterances
from zoo import tiny

ENCODERS = ("Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra")
DECODERS = ("GPT2", "Llama")
WORDS = [
    "the",
    "film",
    "is",
    "not",
    "very",
    "good",
    "bad",
    "dull",
    "fine",
    "long",
    "|",
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "g",
    "h",
    "i",
    "j",
]
TEXT = {"stretch": 60}
HEADS = {
    "ForSequenceClassification": ("glue/stsb", {}, ENCODERS + DECODERS),
    "ForQuestionAnswering": ("squad", {"window": 24, "stride": 4}, ENCODERS + DECODERS),
    "ForMaskedLM": ("mlm", TEXT, ENCODERS),
    "ForCausalLM": ("lm", TEXT, ("Llama", "Roberta", "XLMRoberta", "Electra")),
    "LMHeadModel": ("lm", TEXT, ("GPT2", "Bert")),
}
CASES = [(family + head, task, settings) for head, (task, settings, families) in HEADS.items() for family in families]
CASES += [(name, "copy", {"length": 24, "examples": 8}) for name in ("GPT2LMHeadModel", "LlamaForCausalLM")]


def model_of(architecture, **changes):
    task, _, _ = next(entry for head, entry in HEADS.items() if architecture.endswith(head))
    if task == "lm" and not architecture.startswith(DECODERS):
        changes["is_decoder"] = True
    return tiny(architecture, **changes, **({"num_labels": 1} if task == "glue/stsb" else {}))


def tokenizer_of(config):
    """A tokenizer of words with the special tokens of the family."""
    family = config.model_type
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    if config.pad_token_id == 1:
        special[:2] = "<s>", "<pad>"
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single, pair = {
        "gpt2": ("$A", "$A $B"),
        "llama": ("<s> $A", "<s> $A <s> $B"),
        "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        "xlm-roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    }.get(family, ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1"))
    around = [(token, vocabulary[token]) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=around)
    names = ["input_ids", *(["token_type_ids"] if family in ("bert", "electra") else []), "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", mask_token="<mask>", model_input_names=names
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A dozen sentences as scored pairs, as texts with questions, and as one text."""
    folder, random = tmp_path_factory.mktemp("heads"), np.random.default_rng(0)
    rows = [" ".join(random.choice(WORDS[:10], size=random.integers(1, 15))) for _ in range(12)]
    pairs = [f"{first}\t{second}\t{row / 4}" for row, (first, second) in enumerate(zip(rows, rows[::-1], strict=True))]
    (folder / "stsb.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *pairs]))
    asked = [{"id": str(row), "question": rows[-row], "answers": [{"text": "dull"}]} for row in range(1, 4)]
    paragraphs = [{"context": " ".join(rows[:4]), "qas": asked[:2]}, {"context": rows[4], "qas": asked[2:]}]
    (folder / "squad.json").write_text(json.dumps({"data": [{"title": "Films", "paragraphs": paragraphs}]}))
    (folder / "text.txt").write_text(" ".join(rows))
    return {
        "glue/stsb": folder / "stsb.tsv",
        "squad": folder / "squad.json",
        "lm": folder / "text.txt",
        "mlm": folder / "text.txt",
    }


def predictions(model, processor, task, data, batch_size):
    subject = Subject("exact", model, processor)
    return predict(subject, task, prepare([subject], task, task.load(data), batch_size=batch_size))


def numbers(said):
    """Predictions for a comparison within rounding; answers and symbols stay texts."""
    return said if not isinstance(said[0], dict) else [one["loss"] for one in said]


def same(first, second):
    first, second = numbers(first), numbers(second)
    return first == (second if isinstance(second[0], str) else pytest.approx(second, abs=1e-5, rel=1e-5))


@pytest.mark.parametrize(
    ("architecture", "name", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.sample(2)
def test_base_and_converted_are_compared_and_batches_change_nothing(architecture, name, settings, data):
    model, task = model_of(architecture), open_task(name, **settings)
    processor = tokenizer_of(model.config)
    # With masked padding, the tokenizer's padding side and token do not matter.
    processor.padding_side = "left"
    converted = copy.deepcopy(model)
    approx.convert(converted, approx.Plan.of("local", left=2, right=2))
    task.check(converted)
    subjects = {"exact": Subject("exact", model, processor), "local": Subject("local", converted, processor)}
    entry = evaluate(subjects, task, EvaluateOptions(batch_size=4), data=data.get(name))
    assert [row.name for row in entry.variants] == ["local"]
    for one in (model, converted):
        alone = predictions(one, processor, task, data.get(name), 1)
        assert same(predictions(one, processor, task, data.get(name), 4), alone)


@pytest.mark.parametrize("family", ["Wav2Vec2", "Hubert"])
def test_speech_is_compared(family, tmp_path):
    model, processor = recogniser(family=family), speech_processor(tmp_path / "processor")
    converted = copy.deepcopy(model)
    approx.convert(converted, approx.Plan.of("local", left=2, right=2))
    subjects = {"exact": Subject("exact", model, processor), "local": Subject("local", converted, processor)}
    task = open_task("librispeech/dev-clean")
    entry = evaluate(
        subjects, task, EvaluateOptions(batch_size=2), data=write_utterances(tmp_path / "dev-clean", some_utterances(3))
    )
    assert (entry.metric, entry.variants[0].name) == ("wer", "local")


PADDINGS = {
    "no padding token at all": (None, None),
    "none of the tokenizer": (None, 0),
    "none of the config": ("<pad>", None),
    "another of the tokenizer": ("</s>", 0),
}


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForQuestionAnswering"])
@pytest.mark.parametrize("family", ["Bert", *DECODERS])
@pytest.mark.parametrize(("token", "number"), PADDINGS.values(), ids=PADDINGS)
@pytest.mark.sample(8)
def test_a_row_is_read_to_its_end_whatever_padding_tokenizer_and_config_name(family, head, token, number, data):
    name, settings, _ = HEADS[head]
    model, task = model_of(family + head, pad_token_id=number), open_task(name, **settings)
    processor, labelled = tokenizer_of(model.config), tokenizer_of(model.config)
    processor.pad_token = token
    alone = predictions(model, labelled, task, data[name], 1)
    assert same(predictions(model, processor, task, data[name], 1), alone)
    assert same(predictions(model, processor, task, data[name], 4), alone)


TASKS_OF = {
    "glue/stsb": "ForSequenceClassification",
    "squad": "ForQuestionAnswering",
    "mlm": "ForMaskedLM",
    "librispeech/dev-clean": "ForCTC",
}


@pytest.mark.parametrize("name", [*TASKS_OF, "lm", "copy"])
def test_a_task_refuses_every_other_head(name):
    others = [head for task, head in TASKS_OF.items() if task != name]
    for architecture in [("Wav2Vec2" if head == "ForCTC" else "Bert") + head for head in others]:
        with pytest.raises(ApproxError, match=f"{name} needs a .* head, but the model is a {architecture}") as caught:
            open_task(name).check(tiny(architecture))
        assert caught.value.exit_code == Exit.UNSUPPORTED


def batch_of(task, model, processor, data, count=4):
    """The first rows of a task as model inputs, with their targets."""
    pairs = [(each, one) for each in task.load(data).examples for one in task.encode(each, processor, 64)][:count]
    examples, encodings = zip(*pairs, strict=True)
    targets = task.targets(examples, encodings, processor, model.config)
    return examples, encodings, task.collate(encodings, processor), targets


TRAINED = ("BertForSequenceClassification", "BertForQuestionAnswering", "BertForMaskedLM", "GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("architecture", "name", "settings"),
    [case for case in CASES if case[0] in TRAINED] + [("Wav2Vec2ForCTC", "librispeech/dev-clean", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_loss_of_transformers_goes_down_on_the_targets(architecture, name, settings, data, tmp_path):
    task = open_task(name, **settings)
    if name.startswith("librispeech"):
        model, processor = recogniser(), speech_processor(tmp_path / "processor")
        data = {name: write_utterances(tmp_path / "dev-clean", some_utterances(3))}
    else:
        model = model_of(architecture)
        processor = tokenizer_of(model.config)
    _, _, inputs, targets = batch_of(task, model, processor, data.get(name))
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(**inputs, **targets).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2] > 0


@pytest.mark.parametrize(("architecture", "name"), [("BertForMaskedLM", "mlm"), ("GPT2LMHeadModel", "lm")])
def test_a_language_model_is_trained_on_the_tokens_that_it_is_scored_on(architecture, name, data):
    model, task = model_of(architecture).eval(), open_task(name, None, **TEXT)
    examples, encodings, inputs, targets = batch_of(task, model, tokenizer_of(model.config), data[name])
    with torch.inference_mode():
        outputs = model(**inputs, **targets)
    parts = task.predict(outputs, encodings, model.config)
    said = [task.combine(example, [part]) for example, part in zip(examples, parts, strict=True)]
    assert outputs.loss.item() == pytest.approx(sum(one["loss"] for one in said) / sum(one["count"] for one in said))


def test_a_copy_is_trained_alone():
    model, task = model_of("GPT2LMHeadModel"), open_task("copy", length=24, examples=8)
    examples, encodings, inputs, targets = batch_of(task, model, tokenizer_of(model.config), None)
    logits = torch.nn.functional.one_hot(inputs["input_ids"].roll(-1, 1), model.config.vocab_size)
    assert task.predict(SimpleNamespace(logits=logits), encodings, model.config) == [one.label for one in examples]
    trained = targets["labels"] != -100
    assert trained.sum(1).tolist() == [len(one.label) for one in examples]
    assert torch.equal(targets["labels"][trained], inputs["input_ids"][trained])


def test_classes_are_trained_in_the_order_of_the_model(tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\ngood film\t1\nbad film\t0\n")
    model = tiny("BertForSequenceClassification", id2label={0: "positive", 1: "negative"})
    task = open_task("glue/sst2")
    examples, encodings, _, targets = batch_of(task, model, tokenizer_of(model.config), tmp_path / "dev.tsv")
    assert targets["labels"].tolist() == [0, 1]
    logits = torch.nn.functional.one_hot(targets["labels"], 2).float()
    assert task.predict(SimpleNamespace(logits=logits), encodings, model.config) == [one.label for one in examples]


def test_answers_are_trained_where_a_window_holds_them(tmp_path):
    context = "the film is very dull not good is the film very bad not fine"
    answers = [{"text": "the film", "answer_start": context.rindex("the film")}]
    asked = [
        {"id": "second", "question": "good film", "answers": answers},
        {"id": "none", "question": "good", "answers": [], "is_impossible": True},
        {"id": "unplaced", "question": "fine", "answers": [{"text": "very dull"}]},
    ]
    page = {"data": [{"title": "Films", "paragraphs": [{"context": context, "qas": asked}]}]}
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(page))
    task, model = open_task("squad_v2", window=16, stride=4), model_of("BertForQuestionAnswering")
    examples, encodings, _, targets = batch_of(task, model, tokenizer_of(model.config), tmp_path, count=99)
    starts, ends = targets["start_positions"], targets["end_positions"]
    said = {}
    for example, one, start, end in zip(examples, encodings, starts.tolist(), ends.tolist(), strict=True):
        if start:
            place = (one["offsets"][start][0], one["offsets"][end][1])
            said.setdefault(example.id, set()).add(place)
        else:
            assert end == 0
    assert said == {"second": {(34, 42)}, "unplaced": {(12, 21)}}
    assert context[34:42] == "the film"
    assert context[12:21] == "very dull"
    # Some windows do not contain the answer.
    assert len([one for one in examples if one.id == "second"]) > 1


def test_words_are_spelled_in_the_case_of_the_vocabulary(tmp_path):
    rows = write_utterances(tmp_path / "dev-clean", some_utterances(2))
    task = open_task("librispeech/dev-clean")
    for characters in (string.ascii_uppercase + "'", string.ascii_lowercase + "'"):
        processor = speech_processor(tmp_path / characters, characters=characters)
        examples, _, _, targets = batch_of(task, recogniser(), processor, rows)
        for example, row in zip(examples, targets["labels"], strict=True):
            spelled = processor.tokenizer.decode(row[row >= 0], group_tokens=False)
            assert spelled.upper() == example.label
