"""Companions: what lies beside the weights goes along, sentence-transformers' modules too."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from approx.checkpoints import checkpoint
from approx.conversion import convert
from approx.conversion.companions import copy_companions
from approx.errors import ApproxError, Exit
from approx.planning.plan import Plan, Rule
from tiny_classifier import tiny_tokenizer
from zoo import tiny

PLAN = Plan((Rule("local", "all", {"left": 2, "right": 2}),))
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    folder = tmp_path / "encoder"
    tiny("BertModel").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 16, "do_lower_case": false}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": torch.eye(4)}, folder / "2_Dense" / "model.safetensors")
    return folder


def test_the_modules_of_sentence_transformers_go_along_and_come_back(encoder, tmp_path):
    convert.convert(encoder, tmp_path / "converted", PLAN)
    convert.revert(tmp_path / "converted", tmp_path / "reverted")
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json", "2_Dense/model.safetensors"):
        expected = (encoder / name).read_bytes()
        assert (tmp_path / "converted" / name).read_bytes() == (tmp_path / "reverted" / name).read_bytes() == expected
    card = (tmp_path / "converted" / "README.md").read_text("utf-8")
    assert "library_name: sentence-transformers" in card
    assert "SentenceTransformer(" in card
    checkpoint.load(tmp_path / "converted", offline=True)


def test_a_damaged_module_is_noticed(encoder, tmp_path):
    convert.convert(encoder, tmp_path / "converted", PLAN)
    (tmp_path / "converted" / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ApproxError, match=r"2_Dense/model\.safetensors missing") as caught:
        checkpoint.load(tmp_path / "converted", offline=True)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_a_longer_position_table_lets_sentence_transformers_read_longer_texts(encoder, tmp_path):
    convert.convert(encoder, tmp_path / "converted", PLAN, max_length=96)
    assert json.loads((tmp_path / "converted" / "sentence_bert_config.json").read_text())["max_seq_length"] == 96


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ("{", "is not a list of sentence-transformers' modules"),
        ('{"path": "1_Pooling"}', "is not a list of sentence-transformers' modules"),
        ("[[]]", "is not a list of sentence-transformers' modules"),
        ('[{"path": "../outside"}]', "only relative names inside"),
        ('[{"path": "1_Pooling/.."}]', "only relative names inside"),
        ('[{"path": 1}]', "only relative names inside"),
        ('[{"path": "pickled"}]', "is pickled"),
    ],
)
def test_bad_modules_are_refused_before_anything_is_published(encoder, tmp_path, modules, said):
    (encoder / "modules.json").write_text(modules)
    for place in (tmp_path / "outside", encoder / "pickled"):
        place.mkdir()
    torch.save({}, encoder / "pickled" / "pytorch_model.bin")
    with pytest.raises(ApproxError, match=said):
        convert.convert(encoder, tmp_path / "converted", PLAN)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("own", ["", ".", "./"])
def test_the_folder_of_the_transformer_itself_is_no_module(encoder, tmp_path, own):
    (encoder / "modules.json").write_text(json.dumps([{"path": own}, {"path": "1_Pooling"}]))
    (encoder / "1_Pooling" / "folder.json").mkdir()
    (tmp_path / "copied").mkdir()
    copy_companions(encoder, tmp_path / "copied")
    assert not (tmp_path / "copied" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "copied" / "1_Pooling").iterdir()] == ["config.json"]


def test_folders_that_are_no_modules_stay_behind(encoder, tmp_path):
    shutil.copytree(encoder / "1_Pooling", encoder / "onnx")
    (tmp_path / "copied").mkdir()
    copy_companions(encoder, tmp_path / "copied")
    assert sorted(path.name for path in (tmp_path / "copied").iterdir() if path.is_dir()) == ["1_Pooling", "2_Dense"]
