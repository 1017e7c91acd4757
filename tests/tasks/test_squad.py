"""SQuAD: windows without gaps, spans as text, no answer, the official layout and mistakes in it."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from approx.errors import ApproxError, Exit
from approx.tasks import Example, open_task
from approx.tasks.answer_words import answer_words
from approx.tasks.metrics import AnswerF1, ExactMatch
from tiny_classifier import WORDS, tiny_tokenizer

CONTEXT = "the film is good"
QUESTION = {"id": "q1", "question": " what is good ", "answers": [{"text": "the film"}]}


def written(tmp_path, *asked, version="1.1", name=None):
    paragraph = {"context": CONTEXT, "qas": list(asked)}
    text = json.dumps({"version": version, "data": [{"title": "Films", "paragraphs": [paragraph]}]})
    (tmp_path / (name or f"dev-v{version}.json")).write_text(text)
    return tmp_path


def logits(width, *likely):
    """Start and end logits of a row, high at the given (start, end)."""
    start, end = torch.zeros(1, width), torch.zeros(1, width)
    for first, last, height in likely:
        start[0, first] = end[0, last] = height
    return SimpleNamespace(start_logits=start, end_logits=end)


def test_the_official_layout_is_read(tmp_path):
    split = open_task("squad").load(written(tmp_path, QUESTION))
    assert (split.name, split.subset) == ("dev-v1.1", False)
    # Scoring does not need the positions of answers.
    assert split.examples == [Example("q1", {"question": "what is good", "context": CONTEXT}, ["the film"], "Films")]


@given(words=st.integers(1, 60), window=st.integers(24, 40), stride=st.integers(0, 10))
def test_windows_lose_no_word_and_overlap_by_the_stride(words, window, stride):
    context = " ".join(WORDS[4 + index % (len(WORDS) - 4)] for index in range(words))
    task, tokenizer = open_task("squad", window=window, stride=stride), tiny_tokenizer()
    windows = task.encode(Example("a", {"question": WORDS[4], "context": context}, []), tokenizer)
    spans = [[tuple(span) for span in one["offsets"] if span] for one in windows]
    assert all(len(one["input_ids"]) == len(one["offsets"]) <= window for one in windows)
    seen = sorted({span for part in spans for span in part})
    assert [context[begin:end] for begin, end in seen] == context.split()
    for before, after in itertools.pairwise(spans):
        assert before[len(before) - stride :] == after[:stride]


def test_the_likeliest_span_of_all_windows_is_the_answer():
    task, tokenizer = open_task("squad", window=20, stride=2), tiny_tokenizer()
    example = Example("a", {"question": "film", "context": " ".join(WORDS[4:] * 6)}, [])
    windows = task.encode(example, tokenizer)
    assert len(windows) > 2
    heights = [1.0 + row for row in range(len(windows))]
    parts = []
    for height, one in zip(heights, windows, strict=True):
        places = [index for index, span in enumerate(one["offsets"]) if span]
        parts += task.predict(logits(len(one["input_ids"]), (places[1], places[2], height)), [one], None)
    begin, end = windows[-1]["offsets"][places[1]][0], windows[-1]["offsets"][places[2]][1]
    assert task.combine(example, parts) == example.inputs["context"][begin:end]
    assert len(task.combine(example, parts).split()) == 2


def test_no_answer_wins_only_in_version_2_and_only_by_its_margin():
    tokenizer = tiny_tokenizer()
    example = Example("a", {"question": "film", "context": CONTEXT}, [])
    for version, margin, expected in (("squad", 0.0, "the"), ("squad_v2", 0.0, ""), ("squad_v2", 5.0, "the")):
        task = open_task(version, None, **({"no_answer_margin": margin} if version == "squad_v2" else {}))
        (one,) = task.encode(example, tokenizer)
        first = next(index for index, span in enumerate(one["offsets"]) if span)
        parts = task.predict(logits(len(one["input_ids"]), (first, first, 1.0), (0, 0, 3.0)), [one], None)
        assert task.combine(example, parts) == expected


@pytest.mark.parametrize(
    ("none", "spans", "answer"),
    [
        ([9.0, 1.0], [2.0, 0.0], "the"),
        ([1.0, 9.0], [2.0, 0.0], "the"),
        ([9.0, 3.0], [2.0, 0.0], ""),
        # The best span is what every window without an answer has to beat.
        ([3.0, 3.0], [2.0, 4.0], "film"),
        ([2.0, 9.0], [2.0, 0.0], "the"),
    ],
)
def test_no_answer_wins_only_if_every_window_prefers_it(none, spans, answer):
    """A window that lacks the answer always prefers none, and says nothing of the others."""
    example = Example("a", {"question": "what", "context": "the film"}, [])
    places = ([0, 3], [4, 8])
    parts = [{"none": one, "spans": [[score, *place]]} for one, score, place in zip(none, spans, places, strict=True)]
    assert open_task("squad_v2").combine(example, parts) == answer


def test_answers_lie_within_the_text_and_are_short_enough():
    task, tokenizer = open_task("squad", longest_answer=2), tiny_tokenizer()
    example = Example("a", {"question": "film is good", "context": CONTEXT}, [])
    (one,) = task.encode(example, tokenizer)
    first = next(index for index, span in enumerate(one["offsets"]) if span)
    # The likeliest spans are invalid: in the question, backwards, too long.
    likely = [(1, 2, 9.0), (first + 3, first, 8.0), (first, first + 3, 7.0), (first + 1, first + 2, 1.0)]
    (part,) = task.predict(logits(len(one["input_ids"]), *likely), [one], None)
    assert all(len(CONTEXT[begin:end].split()) <= 2 and begin < end for _, begin, end in part["spans"])


@pytest.mark.parametrize(
    ("text", "words"),
    [("The  Film!", ["film"]), ("a-b, an", ["ab"]), ("thesis", ["thesis"]), ("U.S.", ["us"]), ("a film", ["film"])],
)
def test_answers_are_compared_without_case_punctuation_and_articles(text, words):
    assert answer_words(text) == words


def test_scores_use_the_closest_answer_and_handle_missing_ones():
    said = ["the good film", "", "film", ""]
    given_answers = [["a film", "good old film"], [], [], ["film"]]
    assert ExactMatch().compute(predictions=said, references=given_answers) == {"exact_match": 0.25}
    assert AnswerF1.evidence(said, given_answers)[:, 0].tolist() == [pytest.approx(0.8), 1.0, 0.0, 0.0]


SAID = st.sampled_from(
    ["", ".", "The", "a film", "The good film!", "good, old film", "film film", "U.S.", "us", "2,000"]
)


@pytest.mark.parametrize("version", [1, 2])
@given(asked=st.lists(st.tuples(SAID, st.lists(SAID, max_size=3)), min_size=1, max_size=6))
def test_a_prediction_file_scores_what_the_official_rules_say(tmp_path_factory, version, asked):
    """A file of predictions in the official format, question id -> answer, beside one of questions."""
    folder = tmp_path_factory.mktemp("squad")
    asked = [(said, answers or ["x"] if version == 1 else answers) for said, answers in asked]
    questions = [
        {"id": str(row), "question": "what", "answers": [{"text": text} for text in answers]}
        | ({"is_impossible": not answers} if version == 2 else {})
        for row, (_, answers) in enumerate(asked)
    ]
    (folder / "predictions.json").write_text(json.dumps({str(row): said for row, (said, _) in enumerate(asked)}))
    predictions = json.loads((folder / "predictions.json").read_text())
    task, layout = ("squad", "1.1") if version == 1 else ("squad_v2", "2.0")
    examples = open_task(task).examples(written(folder, *questions, version=layout))
    scores = [official(predictions[question["id"]], question["answers"], version) for question in questions]
    paired = [predictions[example.id] for example in examples], [example.label for example in examples]
    exact, f1 = (sum(column) / len(asked) for column in zip(*scores, strict=True))
    assert (ExactMatch.value(*paired), AnswerF1.value(*paired)) == pytest.approx((exact, f1))


def official(said, answers, version):
    """Exact match and F1 of one question, an independent implementation of evaluate-v1.1.py and evaluate-v2.0.py."""
    given_answers = [answer["text"] for answer in answers]
    if version == 2:
        given_answers = [text for text in given_answers if answer_words(text)] or [""]
    said_words, best = answer_words(said), 0.0
    for text in given_answers:
        words = answer_words(text)
        if version == 2 and not (said_words and words):
            best = max(best, float(said_words == words))
            continue
        shared = sum(min(said_words.count(word), words.count(word)) for word in set(words))
        if shared:
            precision, recall = shared / len(said_words), shared / len(words)
            best = max(best, 2 * precision * recall / (precision + recall))
    return float(any(" ".join(said_words) == " ".join(answer_words(text)) for text in given_answers)), best


@pytest.mark.network
@pytest.mark.parametrize("version", ["squad", "squad_v2"])
def test_scores_equal_those_of_the_official_metric(version):
    import evaluate

    said, given_answers = ["the good film", "x y", ""], [["a film", "good old film"], ["y z"], ["film"]]
    official = evaluate.load(version)
    more = {"no_answer_probability": 0.0} if version == "squad_v2" else {}
    theirs = official.compute(
        predictions=[{"id": str(row), "prediction_text": text, **more} for row, text in enumerate(said)],
        references=[
            {"id": str(row), "answers": {"text": texts, "answer_start": [0] * len(texts)}}
            for row, texts in enumerate(given_answers)
        ],
    )
    assert theirs is not None
    assert AnswerF1.value(said, given_answers) * 100 == pytest.approx(theirs["f1"])
    exact = theirs.get("exact_match", theirs.get("exact"))
    assert ExactMatch.value(said, given_answers) * 100 == pytest.approx(exact)


def test_the_trained_checkpoint_scores_what_it_is_known_to_score(shared_data, shared_checkpoints):
    from approx.checkpoints import checkpoint
    from approx.evaluation.evaluate import Subject, evaluate
    from approx.evaluation.options import EvaluateOptions

    opened = checkpoint.load(str(shared_checkpoints / "minilm-squad"))
    subject = Subject("exact", opened.model, checkpoint.processor(opened.source))
    entry = evaluate(
        {"exact": subject}, open_task("squad", articles=["Oxygen"]), EvaluateOptions(limit=60), data=shared_data
    )
    assert entry.subset
    # 59.5 on all six held-out articles; sixty questions may differ from that by chance.
    assert entry.base.scores["answer_f1"] == pytest.approx(0.6, abs=0.15)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"id": "q", "question": "what", "answers": []}, r"dev-v1\.1\.json: question q has no answers"),
        (
            {"id": "q", "question": "what", "is_impossible": True},
            r"dev-v1\.1\.json: question q .* Use the task squad_v2",
        ),
        ({"id": "q", "answers": [{"text": "film"}]}, "not the layout of SQuAD: a part has no key 'question'"),
    ],
    ids=["no answers", "impossible", "no question"],
)
def test_questions_that_cannot_be_scored_are_refused(tmp_path, asked, words):
    with pytest.raises(ApproxError, match=words):
        open_task("squad").load(written(tmp_path, asked))


ASKED = {"id": "q1", "title": "T", "question": "who", "context": CONTEXT}


@pytest.mark.parametrize(
    ("answers", "label", "start"),
    [
        ({"text": ["the film"], "answer_start": [0]}, ["the film"], 0),
        ({"text": [], "answer_start": []}, [], None),
        ([{"text": "the film", "answer_start": 0}], ["the film"], 0),
        (["the film", "film"], ["the film", "film"], None),
        ("the film", ["the film"], None),
        ('{"text": ["film"], "answer_start": [4]}', ["film"], 4),
        ("[the] film", ["[the] film"], None),
        ("", [], None),
    ],
)
@pytest.mark.parametrize("name", ["flat.json", "list.json", "flat.jsonl"])
def test_a_table_with_a_question_in_each_row_is_read(tmp_path, name, answers, label, start):
    row = {**ASKED, "answers": answers}
    text = {"flat.json": {"version": "1", "data": [row, row]}, "list.json": [row, row]}.get(name)
    (tmp_path / name).write_text(json.dumps(text) if text else "\n".join([json.dumps(row)] * 2))
    split = open_task("squad_v2").load(tmp_path / name)
    inputs = {"question": "who", "context": CONTEXT} | ({} if start is None else {"answer_start": start})
    assert split.examples == [Example("q1", inputs, label, "T")] * 2
    assert (split.name, split.subset, split.tally.read if split.tally else None) == (name.partition(".")[0], True, 2)


def test_a_table_of_questions_may_name_its_columns_and_need_no_titles(tmp_path):
    (tmp_path / "dev.csv").write_text(f"frage,text,antwort\nwho,{CONTEXT},film\nwhat,{CONTEXT},\n")
    columns = {"question": "frage", "context": "text", "answers": "antwort"}
    examples = open_task("squad_v2", columns=columns).load(tmp_path / "dev.csv").examples
    assert [(one.id, one.label, one.group) for one in examples] == [
        ("dev-0", ["film"], CONTEXT),
        ("dev-1", [], CONTEXT),
    ]
    with pytest.raises(ApproxError, match=r"question dev-1 has no answers and cannot be scored.*squad_v2"):
        open_task("squad", columns=columns).load(tmp_path / "dev.csv")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**ASKED, "answers": 3}, r'line 1: answers are {"text": .* found 3'),
        ({**ASKED, "answers": {"text": ["a"], "answer_start": []}}, "line 1: answers are"),
        (ASKED, "line 1: no column answers, or it is empty; the columns are id, title, question, context"),
    ],
)
def test_a_row_without_a_question_and_answers_is_named(tmp_path, row, words):
    (tmp_path / "flat.json").write_text(json.dumps([row]))
    with pytest.raises(ApproxError, match=words) as caught:
        open_task("squad").load(tmp_path / "flat.json")
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_impossible_questions_belong_to_version_2(tmp_path):
    folder = written(tmp_path, {"id": "q", "question": "what", "answers": [], "is_impossible": True}, version="2.0")
    assert open_task("squad_v2").load(folder).examples[0].label == []


def test_damaged_and_missing_files_are_named(tmp_path):
    with pytest.raises(ApproxError, match=r"looked for dev-v1.1.json .*, found no json") as caught:
        open_task("squad").load(tmp_path)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    (tmp_path / "dev-v1.1.json").write_text('{"data": [')
    with pytest.raises(ApproxError, match="is not JSON"):
        open_task("squad").load(tmp_path)
    with pytest.raises(ApproxError, match=r"unknown article 'Film'; there are 1. Did you mean 'Films'"):
        open_task("squad", articles=["Film"]).load(written(tmp_path, QUESTION))


def test_a_question_without_room_for_its_text_is_refused():
    example = Example("long", {"question": " ".join(["film"] * 30), "context": CONTEXT}, [])
    with pytest.raises(ApproxError, match="leaves no room for the text in windows of 32"):
        open_task("squad", window=32, stride=4).encode(example, tiny_tokenizer())
    with pytest.raises(ApproxError, match="is 64, but the limit is 32 tokens"):
        open_task("squad", window=64, stride=4).encode(example, tiny_tokenizer(), 32)


def test_keeps_the_likeliest_spans():
    """The three likeliest starts are 6, 5 and 1; only the last is before the likeliest end, 2."""
    starts, ends = torch.zeros(1, 9), torch.zeros(1, 9)
    starts[0, [6, 5, 1]] = torch.tensor([10.0, 9.0, 8.0])
    ends[0, [2, 7, 8]] = torch.tensor([20.0, 1.0, 0.5])
    windows = [{"input_ids": [0] * 9, "offsets": [None, *([place, place + 1] for place in range(1, 9))]}]
    outputs = SimpleNamespace(start_logits=starts, end_logits=ends)
    (said,) = open_task("squad", best=3).predict(outputs, windows, None)
    assert said["spans"] == [[28.0, 1, 3], [11.0, 6, 8], [10.5, 6, 9]]


def test_a_file_of_squad_1_is_not_scored_as_squad_2(tmp_path):
    question = {"id": "a", "question": "Who?", "answers": [{"text": "he", "answer_start": 0}]}
    path = tmp_path / "questions.json"

    def write(**more: bool) -> None:
        paragraph = {"context": "he is", "qas": [question | more]}
        path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [paragraph]}]}), encoding="utf-8")

    write()
    assert len(open_task("squad").load(path).examples) == 1
    with pytest.raises(ApproxError, match=r"is of SQuAD 1\.1.*Use the task squad") as caught:
        open_task("squad_v2").load(path)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    write(is_impossible=False)
    assert len(open_task("squad_v2").load(path).examples) == 1
