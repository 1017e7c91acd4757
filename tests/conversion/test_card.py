"""The model card of a converted folder: its base and the inherited license."""

import re

import pytest
from huggingface_hub import ModelCard

from approx.checkpoints import checkpoint
from approx.checkpoints.history import Base, Conversion, Receipt, Training
from approx.conversion import convert
from approx.planning.plan import Plan, Rule
from forms import ELU
from tiny_study import tiny_checkpoint

PLAN = Plan((Rule("improved-clustered", "all", {"clusters": 4}), Rule("linear", "1", ELU)))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A converted folder."""
    folder = tmp_path_factory.mktemp("cards")
    convert.convert(tiny_checkpoint(folder / "base"), folder / "converted", PLAN)
    return folder / "converted"


CARDS = {
    "a whole one": (
        "---\nlicense: other\nlicense_name: ours\nlanguage: [en, de]\npipeline_tag: text-ranking\ntags: [x]\n---\nText",
        {"license": "other", "license_name": "ours", "language": ["en", "de"], "pipeline_tag": "text-ranking"},
    ),
    "one without data": ("Text", {"pipeline_tag": "text-classification"}),
    "one that names its base": (
        "---\nbase_model: ours/first\n---\nText",
        {"pipeline_tag": "text-classification"},
    ),
    "a damaged one": ("---\nlicense: [\n---\nText", {"pipeline_tag": "text-classification"}),
    "a list": ("---\n- mit\n---\nText", {"pipeline_tag": "text-classification"}),
    "none": (None, {"pipeline_tag": "text-classification"}),
}


@pytest.mark.parametrize(("text", "expected"), CARDS.values(), ids=CARDS)
def test_the_card_of_a_model_from_the_hub_names_its_base_and_repeats_its_license(converted, tmp_path, text, expected):
    opened = checkpoint.load(converted)
    opened.model.config.approx["history"][-1]["base"] |= {"name": "owner/base", "revision": "0123abcd"}
    opened.source.folder = tmp_path
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    (tmp_path / "out").mkdir()
    convert.write_card(tmp_path / "out", opened, Receipt(swapped=[], left=[], cross_attention=0, added=[]))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {
        "base_model": "owner/base",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "tags": ["approx-attention", "improved-clustered", "linear"],
        **expected,
    }
    assert "made from `owner/base`, revision 0123abcd (" in card.text


def test_the_card_of_a_model_from_a_folder_names_no_model_of_the_hub(converted):
    data = ModelCard.load(converted / "README.md").data.to_dict()
    assert data == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["approx-attention", "improved-clustered", "linear"],
    }


def test_the_card_of_a_folder_names_the_base_of_its_base_if_that_is_known(converted, tmp_path):
    opened = checkpoint.load(converted)
    opened.source.folder = tmp_path
    (tmp_path / "README.md").write_text("---\nbase_model: owner/first\nlicense: mit\n---\nText")
    (tmp_path / "out").mkdir()
    convert.write_card(tmp_path / "out", opened, Receipt(swapped=[], left=[], cross_attention=0, added=[]))
    data = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert (data["base_model"], data["base_model_relation"], data["license"]) == ("owner/first", "finetune", "mit")


def test_card_has_cautions_and_the_whole_history(converted):
    text = ModelCard.load(converted / "README.md").text
    assert "- Its quality and speed were not measured here" in text
    assert "nearly broken until it is fine-tuned" in text
    assert (
        "`improved-clustered` (clusters = 4) on layers all; `linear` (feature_map = elu, window = 0, features = 0, gate = False) on layers 1. Calibration: built-in"
        in text
    )


def test_card_escapes_markup_in_the_history():
    bad = "x](https://evil.example) <img src=x> | **y**\n# z"
    base = Base(name=bad, revision=bad, weights_sha256=bad, adapter=bad)
    rule = {"mechanism": bad, "settings": {bad: bad}, "layers": bad, "heads": bad}
    numbers = {"examples": 1, "held_out": 1, "steps": 1, "seconds": 1.0, "seed": 0, "exact": None, "before": None}
    steps = [
        Conversion(approx=bad, base=base, plan=[rule], calibration_length=8),
        Training(
            approx=bad,
            base=base,
            recover=[bad],
            task=bad,
            data_sha256=bad,
            teacher=base,
            measure=bad,
            after=1.0,
            options={"a": bad},
            **numbers,
        ),
    ]
    for step in steps:
        line = convert._sentence(step)
        assert "\n" not in line
        outside = re.sub(r"(`+) .*? \1|`[^`]*`", "", line)
        assert not set("<>*#|") & set(outside)
        assert "](" not in outside
    assert "(clusters = 4)" in convert._rule({"mechanism": "clustered", "settings": {"clusters": 4}})
