"""Names that do not exist, and files changed at random, raise ApproxError at once."""

import contextlib
import json
import math
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from approx.checkpoints import checkpoint
from approx.conversion import convert
from approx.errors import ApproxError, Exit
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan
from tiny_study import tiny_checkpoint
from zoo import error_of, tiny

PLAN = Plan.of("sdpa")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    tiny("BertForSequenceClassification").save_pretrained(folder)
    return folder


def test_names_a_hub_model_that_is_not_cached(tmp_path):
    start = time.monotonic()
    with pytest.raises(ApproxError, match=r"connect to the network|--offline") as caught:
        convert.convert("nobody/no-such-model", tmp_path / "out", PLAN)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    with pytest.raises(ApproxError, match="--offline"):
        checkpoint.locate("nobody/no-such-model", offline=True)
    assert time.monotonic() - start < 5
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["no/such/folder", "./nowhere", "~/nowhere-at-all", "what a name", "a//b", "x" * 300, ""]
)
def test_rejects_missing_folder(name):
    with pytest.raises(ApproxError) as caught:
        checkpoint.locate(name)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_rejects_file_instead_of_folder(good):
    with pytest.raises(ApproxError, match="is a file; give the folder") as caught:
        checkpoint.locate(good / "model.safetensors")
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_rejects_tokenizer_without_vocabulary(good):
    with pytest.raises(ApproxError, match=r"vocabulary is missing.*Copy its files") as caught:
        checkpoint.processor(checkpoint.locate(good))
    assert caught.value.exit_code == Exit.UNAVAILABLE


sizes = st.sampled_from([-1, 0, 1, 2, 3, 31, 33, 1000, 0.5, "32", None, [], {}, True, 10**30])


def test_never_runs_custom_code_and_never_prompts(tmp_path, monkeypatch):
    folder, marker = tiny_checkpoint(tmp_path / "model"), tmp_path / "ran"
    (folder / "own.py").write_text(
        f"from transformers import BertTokenizer\nopen({str(marker)!r}, 'w').close()\nclass Own(BertTokenizer): pass\n"
    )
    config = folder / "tokenizer_config.json"
    custom = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    config.write_text(json.dumps(json.loads(config.read_text()) | custom))
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it prompted"))
    # The tokenizer of the family reads the same files.
    assert type(checkpoint.processor(checkpoint.locate(folder))).__name__ != "Own"
    assert not marker.exists()
    # The code would run if it were trusted.
    with contextlib.suppress(Exception):
        AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert marker.exists()


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_any_config_raises_only_approx_errors(good, tmp_path_factory, data):
    folder = Path(shutil.copytree(good, tmp_path_factory.mktemp("fuzz") / "model"))
    config = json.loads((folder / "config.json").read_text())
    for key in data.draw(st.sets(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(sizes | st.text(max_size=5))
    (folder / "config.json").write_text(json.dumps(config))
    survives(folder)


@settings(max_examples=150)
@given(data=st.data())
def test_any_weights_raise_only_approx_errors(good, tmp_path_factory, data):
    folder = Path(shutil.copytree(good, tmp_path_factory.mktemp("fuzz") / "model"))
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    header = struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header + 8) | st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 1, header]))])
    survives(folder)


def survives(folder):
    def open_and_look() -> None:
        model = checkpoint.load(folder).model
        PLAN.resolve(anatomy(model.config, type(model)))

    error = error_of(open_and_look)
    assert error is None or error.exit_code in (Exit.UNAVAILABLE, Exit.UNSUPPORTED)
    shutil.rmtree(folder.parent)


@pytest.mark.parametrize("numbers", [[1.0, math.nan], [math.inf, 1.0], [math.inf, -math.inf]])
def test_finds_non_finite_weights(numbers):
    tensors = [("ids", torch.tensor([1, 2])), ("weight", torch.tensor(numbers))]
    with pytest.raises(ApproxError, match="NaN or infinite numbers in weight"):
        checkpoint.refuse_non_finite(tensors, "it")


def test_accepts_weights_whose_sum_overflows():
    checkpoint.refuse_non_finite([("weight", torch.tensor([3e38, 3e38]))], "it")
