"""Tasks of the LM Evaluation Harness: refused without the package, and with it scored as the harness itself does."""

import copy
import importlib.util
import json
from itertools import pairwise
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing

import approx
from approx.errors import ApproxError, Exit
from approx.tasks import Example, open_task
from tiny_classifier import WORDS, tiny_tokenizer
from zoo import tiny

# Their annotations allow less than they take.
harness: Any = lm_eval
harness_model: Any = HFLM


def test_without_the_package_it_is_refused_before_anything_else(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ApproxError, match=r"lm-eval/piqa needs the package lm-eval.*pip install 'lm-eval>=") as caught:
        open_task("lm-eval/piqa")
    assert caught.value.exit_code == Exit.MISSING


def test_a_task_is_named_and_is_not_for_training():
    with pytest.raises(ApproxError, match=r"Name one, e\.g\. lm-eval/hellaswag"):
        open_task("lm-eval/NAME").load()
    with pytest.raises(ApproxError, match="Unknown task 'lm-eval/'"):
        open_task("lm-eval/")
    with pytest.raises(ApproxError, match="for evaluation, not for training"):
        open_task("lm-eval/NAME").targets([], [], None, None)


def test_scores_are_those_of_the_harness(tmp_path):
    rows = [{"text": f"{one} the {two} is", "label": n % 2} for n, (one, two) in enumerate(pairwise(WORDS[4:]))]
    (tmp_path / "films.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "films.yaml").write_text(f"""
task: films
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "films.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: [good, "not very bad"]
doc_to_target: label
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
""")
    base, tokenizer = tiny("GPT2LMHeadModel"), tiny_tokenizer()
    # The harness asks for one of them.
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    converted = copy.deepcopy(base)
    approx.convert(converted, approx.Plan.of("local", left=2, right=0))
    theirs = harness_model(pretrained=base, tokenizer=tokenizer)
    pairs = [["the film is", " good"], ["the film is  ", "not good"], ["", "good film"]]
    asked = [Instance("loglikelihood", {}, tuple(pair), 0) for pair in pairs]
    task = open_task("lm-eval/films")
    encodings = task.encode(Example("some", {"requests": pairs}, 1.0), tokenizer, 64)
    with torch.inference_mode():
        said = task.predict(base(**task.collate(encodings, tokenizer)), encodings, base.config)
    expected = theirs.loglikelihood(asked)
    assert [one[0] for one in said] == pytest.approx([one[0] for one in expected], abs=1e-4)
    assert [one[1] for one in said] == [one[1] for one in expected]
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for shots in (None, 2):
        scores = harness.simple_evaluate(
            theirs,
            tasks=["films"],
            task_manager=manager,
            num_fewshot=shots,
            bootstrap_iters=0,
        )["results"]["films"]
        for metric in ("acc", "acc_norm"):
            settings = {"metric": metric, **({} if shots is None else {"shots": shots})}
            entry = approx.evaluate(
                converted,
                "lm-eval/films",
                against=base,
                processor=tokenizer,
                data=str(tmp_path),
                settings=settings,
                batch_size=3,
            ).quality[0]
            assert entry.base.scores["mean_score"] == pytest.approx(scores[f"{metric},none"])
            assert (entry.task, entry.examples) == ("lm-eval/films", len(rows))
    with pytest.raises(ApproxError, match="Did you mean 'films'"):
        open_task("lm-eval/film").load(tmp_path)
    with pytest.raises(ApproxError, match="It has acc, acc_norm"):
        open_task("lm-eval/films", metric="f1").load(tmp_path)


def test_generated_answers_are_scored_as_by_the_harness(tmp_path):
    words = WORDS[4:]
    rows = [
        {"text": f"{one} {two}", "label": words[n % len(words)]} for n, (one, two) in enumerate(pairwise(words * 3))
    ]
    (tmp_path / "films.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "films.yaml").write_text(f"""
task: films
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "films.jsonl"}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{label}}}}"
generation_kwargs: {{until: [dull], do_sample: false, max_gen_toks: 5}}
filter_list:
  - {{name: first, filter: [{{function: regex, regex_pattern: "(\\\\w+)"}}, {{function: take_first}}]}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
""")
    base, tokenizer = tiny("GPT2LMHeadModel", seed=3, initializer_range=0.6, vocab_size=len(WORDS)), tiny_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    converted = copy.deepcopy(base)
    approx.convert(converted, approx.Plan.of("sinks", sinks=1, window=2))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    theirs = harness.simple_evaluate(
        harness_model(pretrained=base, tokenizer=tokenizer), tasks=["films"], task_manager=manager, bootstrap_iters=0
    )["results"]["films"]
    how = {"against": base, "processor": tokenizer, "data": str(tmp_path), "batch_size": 4}
    made = approx.evaluate(converted, "lm-eval/films", settings={"metric": "exact_match"}, **how)
    (entry,) = made.quality
    assert entry.base.scores["mean_score"] == pytest.approx(theirs["exact_match,first"])
    assert 0 < entry.base.scores["mean_score"] < 1
    assert (entry.measures, entry.examples) == ("generation", len(rows))
    with pytest.raises(ApproxError, match="Set fewer with --set new_tokens"):
        approx.evaluate(converted, "lm-eval/films", settings={"metric": "exact_match", "new_tokens": 99}, **how)
