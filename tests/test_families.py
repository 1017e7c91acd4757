"""The page of model types says what the tool answers."""

import importlib.util
import re

import pytest
import transformers

from conftest import ROOT

_SPEC = importlib.util.spec_from_file_location("families_page", ROOT / "docs" / "families.py")
assert _SPEC is not None
assert _SPEC.loader is not None
families = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(families)
ROWS = families.read_page()
MADE_WITH = re.search(r"transformers (\S+),", families.PAGE.read_text("utf-8"))


@pytest.fixture(autouse=True)
def same_transformers():
    made_with = MADE_WITH and MADE_WITH[1]
    if made_with != transformers.__version__:
        pytest.skip(f"docs/families.md was made with transformers {made_with}")


def test_the_page_is_what_the_script_writes():
    assert families.page(ROWS) == families.PAGE.read_text("utf-8")


def test_many_types_convert():
    assert sum(row.answer == "converts" for row in ROWS.values()) >= 100
    assert ROWS.keys() == set(families.stock_types())
    assert sum(row.answer in ("unknown", "differs") for row in ROWS.values()) < 40


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("bert", "converts"),
        ("modernbert", "converts"),
        ("gemma3_text", "converts"),
        ("bart", "converts"),
        ("albert", "refused"),
        ("mistral", "refused"),
        ("gpt_oss", "refused"),
        ("swin", "refused"),
        ("t5", "refused"),
        ("clip", "refused"),
        ("encoder-decoder", "refused"),
        ("deberta", "refused"),
        ("resnet", "refused"),
        ("qwen2_5_vl_vision", "refused"),
        ("wav2vec2-bert", "refused"),
        ("glm_moe_dsa", "refused"),
        ("pegasus_x", "refused"),
        ("ministral", "refused"),
        ("speech_to_text", "converts"),
        ("nemotron", "converts"),
    ],
)
def test_a_line_is_what_the_tool_answers(family, answer):
    row = families.row(family)
    assert row == ROWS[family]
    assert row.answer == answer
