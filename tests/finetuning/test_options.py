"""Durations, budgets, and the training of a stage of a recipe."""

import pytest
from pydantic import ValidationError

from approx.finetuning.options import FinetuneStage, HealStage, allowed_loss
from approx.validation import seconds


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (seconds, "90s", 90.0),
        (seconds, " 1.5m ", 90.0),
        (seconds, "2h", 7200.0),
        (seconds, "0s", None),
        (seconds, "5", None),
        (seconds, "1d", None),
        (allowed_loss, "loss<=0.5", 0.5),
        (allowed_loss, " loss <= 2", 2.0),
        (allowed_loss, "loss<0.5", None),
        (allowed_loss, "kl<=1", None),
    ],
)
def test_reads_durations_and_budgets_or_refuses_them(read, text, value):
    if value is not None:
        assert read(text) == value
        return
    with pytest.raises(ValueError, match=r"e\.g\."):
        read(text)


def test_the_time_is_read_from_its_text():
    assert FinetuneStage(time_budget="2m").seconds == 120.0
    assert FinetuneStage().seconds is None


@pytest.mark.parametrize(
    ("recover", "of_the_base"),
    [
        (None, None),
        (["transfer"], None),
        (["distill"], None),
        (["transfer", "task"], ["task"]),
        (["distill", "lora", "task"], ["lora", "task"]),
        (["lora", "distill"], None),
        (["clm"], ["clm"]),
    ],
)
def test_the_base_is_trained_by_the_modes_that_need_no_conversion(recover, of_the_base):
    stage = HealStage(recover=recover, steps=7, budget="loss<=1", keep_exact=2, variants=["a"])
    assert stage.of_the_base.recover == of_the_base
    assert (stage.of_the_base.steps, stage.of_the_base.budget, stage.of_the_base.keep_exact) == (7, None, None)
    assert stage.training == FinetuneStage(recover=recover, steps=7, budget="loss<=1", keep_exact=2)


def test_defaults_are_as_documented():
    assert FinetuneStage().model_dump(exclude_none=True) == {
        "split": "train",
        "settings": {},
        "streaming": False,
        "pack": False,
        "accumulate": 1,
        "schedule": "cosine",
        "train": "all",
        "transfer": {},
        "projections": False,
        "joint": False,
        "match": "outputs",
        "distill": {"logits": 1.0, "hidden": 1.0, "attention": 0.0, "labels": 0.0, "temperature": 2.0},
        "lora": {"rank": 8, "alpha": 16.0, "dropout": 0.0},
        "validation": 500,
        "recompute": False,
        "seed": 0,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": 0},
        {"epochs": 0},
        {"length": 7},
        {"penalty": -1},
        {"validation": 0},
        {"steps": 0},
        {"seed": -1},
        {"recover": []},
        {"report_to": "mail"},
        {"time_budget": "0s"},
        {"budget": "loss<1"},
        {"train": "some"},
        {"distill": {"temperature": 0}},
        {"distill": {"steps": 0}},
        {"transfer": {"learning_rate": 0}},
        {"transfer": {"mechanism_learning_rate": 1}},
        {"transfer": {"warm_up": 1}},
        {"warm_up": -0.1},
        {"weight_decay": -1},
        {"distill": {"logits": -1}},
        {"distill": {"labels": -1}},
        {"lora": {"rank": 0}},
        {"lora": {"alpha": 0}},
        {"lora": {"dropout": 1}},
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused(wrong):
    with pytest.raises(ValidationError):
        FinetuneStage(**wrong)


def test_a_single_mode_or_text_is_a_list_of_one():
    stage = FinetuneStage.model_validate({"recover": "task", "text": "a.txt"})
    assert (stage.recover, stage.text) == (["task"], ["a.txt"])


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"limit": 7}, 7),
        ({"epochs": 2}, None),
        # 2,000 steps of 32 inputs, and 500 for validation.
        ({"streaming": True}, 64_500),
        ({"streaming": True, "recover": ["transfer", "distill"], "steps": 10}, 160 + 18),
        ({"streaming": True, "recover": ["lora", "clm"], "steps": 10, "batch_size": 9}, 90 + 11),
        ({"streaming": True, "recover": ["distill"], "distill": {"steps": 5, "batch_size": 9}}, 45 + 6),
        ({"streaming": True, "recover": ["clm"], "steps": 10, "validation": 3}, 163),
        ({"streaming": True, "recover": ["clm"], "steps": 10, "limit": 100}, 100),
    ],
)
def test_a_stream_is_read_as_far_as_the_longest_mode_goes(options, most):
    assert FinetuneStage(**options).most_examples == most
