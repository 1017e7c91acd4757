"""Files next to the weights are copied, sentence-transformers' modules too."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from approx.checkpoints import checkpoint, foreign
from approx.conversion import convert, verify
from approx.conversion.convert import code_to_carry, copy_companions
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
    ("modules", "message"),
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
def test_bad_modules_are_refused_before_anything_is_published(encoder, tmp_path, modules, message):
    (encoder / "modules.json").write_text(modules)
    for place in (tmp_path / "outside", encoder / "pickled"):
        place.mkdir()
    torch.save({}, encoder / "pickled" / "pytorch_model.bin")
    with pytest.raises(ApproxError, match=message):
        convert.convert(encoder, tmp_path / "converted", PLAN)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b'"x"', b"\xef\xbb\xbf{}", b'{"x": "\xff"}'], ids=repr)
def test_refuses_settings_that_are_no_json_object(encoder, tmp_path, text):
    file = encoder / "sentence_bert_config.json"
    file.write_bytes(text)
    with pytest.raises(ApproxError, match=r"sentence_bert_config\.json cannot be read as JSON settings") as caught:
        convert.convert(encoder, tmp_path / "out", PLAN, max_length=96)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["", ".", "./"])
def test_the_folder_of_the_transformer_itself_is_no_module(encoder, tmp_path, path):
    (encoder / "modules.json").write_text(json.dumps([{"path": path}, {"path": "1_Pooling"}]))
    (encoder / "1_Pooling" / "folder.json").mkdir()
    (tmp_path / "copied").mkdir()
    copy_companions(checkpoint.locate(encoder), tmp_path / "copied")
    assert not (tmp_path / "copied" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "copied" / "1_Pooling").iterdir()] == ["config.json"]


def test_copies_only_folders_of_modules(encoder, tmp_path):
    shutil.copytree(encoder / "1_Pooling", encoder / "onnx")
    (tmp_path / "copied").mkdir()
    copy_companions(checkpoint.locate(encoder), tmp_path / "copied")
    assert sorted(path.name for path in (tmp_path / "copied").iterdir() if path.is_dir()) == ["1_Pooling", "2_Dense"]


OWN = "class Mine:\n    raise RuntimeError('this ran')\n"


def own_tokenizer(folder, **settings):
    """Let the tokenizer of a folder be one that only custom code has."""
    file = folder / "tokenizer_config.json"
    named = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | named | settings))
    (folder / "mine.py").write_text("from .words import Word\n" + OWN)
    (folder / "words.py").write_text(OWN)
    (folder / "unused.py").write_text(OWN)


def test_drops_code_that_the_tokenizer_does_without(encoder, tmp_path):
    own_tokenizer(encoder, tokenizer_class="PreTrainedTokenizerFast")
    config = json.loads((encoder / "config.json").read_text())
    config["custom_pipelines"] = {"mine": {"impl": "mine.Mine"}}
    config["auto_map"] = {"AutoModel": "mine.Mine"}
    (encoder / "config.json").write_text(json.dumps(config))
    notes = convert.convert(encoder, tmp_path / "converted", PLAN).notes
    assert [note.split(" names")[0] for note in notes] == [
        "config.json",
        "config.json: custom_pipelines",
        "tokenizer_config.json: auto_map",
    ]
    for name in ("config.json", "tokenizer_config.json"):
        assert "mine" not in (tmp_path / "converted" / name).read_text()
    assert not (tmp_path / "converted" / "mine.py").exists()
    source = checkpoint.locate(tmp_path / "converted")
    assert foreign.differences(tmp_path / "converted", source.config, source.stock_class) == {}


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": "mine.Mine"}},
            "auto_map names mine.Mine",
        ),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Mine", "auto_map": ["mine.Mine", None]},
            "auto_map names mine.Mine",
        ),
        ("modules.json", [{"path": "", "type": "mine.Mine"}], r"modules\.json: 0\.type names mine\.Mine"),
        ("1_Pooling/router_config.json", {"types": {"x": "mine.Mine"}}, r"types\.x names mine\.Mine"),
        ("2_Dense/config.json", {"activation_function": "os.abort"}, r"activation_function names os\.abort"),
        ("config.json", {"sentence_transformers": {"activation_fn": "os.abort"}}, r"activation_fn names os\.abort"),
    ],
)
def test_refuses_a_checkpoint_that_needs_its_own_code(encoder, tmp_path, file, settings, message):
    own_tokenizer(encoder, tokenizer_class="PreTrainedTokenizerFast", auto_map={})
    path = encoder / file
    before = json.loads(path.read_text()) if path.exists() and isinstance(settings, dict) else settings
    path.write_text(json.dumps(before | settings if isinstance(settings, dict) else settings))
    with pytest.raises(ApproxError, match=f"{message}.*--trust-remote-code") as caught:
        convert.convert(encoder, tmp_path / "converted", PLAN)
    assert caught.value.exit_code == Exit.UNSUPPORTED
    assert [one.name for one in tmp_path.iterdir()] == ["encoder"]


def test_copies_custom_code_on_request_and_reports_it(encoder, tmp_path):
    own_tokenizer(encoder)
    (encoder / "modules.json").unlink()
    convert.convert(encoder, tmp_path / "converted", PLAN, trust_remote_code=True)
    for name in ("mine.py", "words.py"):
        assert (tmp_path / "converted" / name).read_bytes() == (encoder / name).read_bytes()
    assert not (tmp_path / "converted" / "unused.py").exists()
    card = (tmp_path / "converted" / "README.md").read_text("utf-8")
    assert "which approx neither wrote nor read nor ran: `mine.py`, `words.py`, copied from `encoder`" in card
    found = verify.verify(tmp_path / "converted")
    code = next(check for check in found.checks if check.name == "code is what this version writes")
    assert (code.passed, "mine.py" in code.detail) == (None, True)
    assert [check.name for check in found.checks if check.passed is False] == []
    # Other code under that name is not what the user trusted.
    (tmp_path / "converted" / "mine.py").write_text("other")
    assert "mine.py" in verify.verify(tmp_path / "converted").diffs


def test_never_copies_code_of_another_repository(encoder, tmp_path):
    own_tokenizer(encoder, auto_map={"AutoTokenizer": "someone/else--mine.Mine"})
    with pytest.raises(ApproxError, match="code of another repository, which no revision pins") as caught:
        convert.convert(encoder, tmp_path / "converted", PLAN, trust_remote_code=True)
    assert caught.value.exit_code == Exit.UNSUPPORTED


@pytest.mark.parametrize("revision", [None, "main", "0123abcd"])
def test_trust_needs_the_commit_of_a_model_of_the_hub(encoder, revision):
    source = checkpoint.locate(encoder)
    source.revision = "0" * 40
    with pytest.raises(ApproxError, match=f"it is now --revision {'0' * 40}"):
        code_to_carry(source, revision)
    assert code_to_carry(source, "0" * 40) == {}


@pytest.mark.parametrize(
    "name", ["LICENSE", "LICENCE.md", "license.txt", "NOTICE", "COPYING", "COPYING.LESSER", "USE_POLICY.md"]
)
def test_copies_the_licence(encoder, tmp_path, name):
    (encoder / name).write_text("Terms")
    (encoder / "licenses.py").write_text("")
    (tmp_path / "copied").mkdir()
    copy_companions(checkpoint.locate(encoder), tmp_path / "copied")
    assert (tmp_path / "copied" / name).read_text() == "Terms"
    assert not (tmp_path / "copied" / "licenses.py").exists()
