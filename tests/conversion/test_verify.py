"""Verifying converted folders: damaged, edited and inactive ones, and edits that are accepted."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import approx
from approx.checkpoints.checkpoint import load
from approx.checkpoints.manifest import seal
from approx.conversion import convert, verify
from approx.conversion.verify import Damage
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan
from tiny_classifier import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tiny_model(2, ["bad", "good"]).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    convert.convert(folder / "base", folder / "converted", Plan.of("performer", **MECHANISMS["performer"].published))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made / "converted", tmp_path / "converted")


def results(found):
    return {check.name: check.passed for check in found.checks}


def failed(found):
    return [name for name, passed in results(found).items() if passed is False]


def test_a_converted_folder_passes_every_check(folder):
    found = approx.verify(folder)
    assert failed(found) == []
    assert results(found)["attention is really replaced"]
    assert results(found)["reload without approx is bit-equal"]
    assert (found.edited, found.accepted, found.diffs) == ([], False, {})


def test_only_verify_notices_edits_of_a_card(folder):
    with (folder / "README.md").open("a") as card:
        card.write("\nMine.\n")
    load(folder)
    assert failed(verify.verify(folder)) == ["files are those of the manifest"]
    assert verify.verify(folder, accept=True).accepted
    assert verify.verify(folder).edited == []


def test_accept_records_a_renamed_label(folder):
    config = json.loads((folder / "config.json").read_text())
    config["id2label"]["0"] = "terrible"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ApproxError, match=r"was edited: config\.json.*verify .* --accept"):
        load(folder)
    assert verify.verify(folder, accept=True).accepted
    assert load(folder).model.config.id2label[0] == "terrible"


def test_changed_code_is_shown_but_neither_run_nor_accepted(folder):
    model = next(folder.glob("modeling_*.py"))
    model.write_text(model.read_text() + "\nraise RuntimeError\n")
    found = verify.verify(folder, accept=True)
    assert failed(found) == ["files are those of the manifest", "code is what this version writes"]
    assert "+raise RuntimeError" in found.diffs[model.name]
    assert not found.accepted
    # Whoever can change the code can also change the manifest.
    seal(folder)
    found = verify.verify(folder)
    assert failed(found) == ["code is what this version writes"]
    assert "reload without approx is bit-equal" not in results(found)


def test_code_of_another_version_is_not_checked(folder):
    model = next(folder.glob("modeling_*.py"))
    model.write_text(model.read_text() + "\n# older\n")
    config = json.loads((folder / "config.json").read_text())
    config["approx"]["history"][0]["approx"] = "0.0.1"
    (folder / "config.json").write_text(json.dumps(config))
    seal(folder)
    found = verify.verify(folder)
    assert failed(found) == []
    assert results(found)["code is what this version writes"] is None
    assert "+# older" in found.diffs[model.name]


def test_finds_weights_and_code_missing_from_the_manifest(folder):
    (folder / "more.py").write_text("")
    assert failed(verify.verify(folder)) == ["files are those of the manifest", "code is what this version writes"]


@pytest.mark.parametrize(
    ("value", "wrong"), [(torch.nan, "weights load and are finite"), (1.5, "buffers are in range")]
)
def test_finds_buffers_out_of_range(folder, value, wrong):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith(".share"))
    weights[name][0] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    seal(folder)
    assert wrong in failed(verify.verify(folder))


def test_finds_layers_that_stay_exact_where_they_should_approximate(made):
    model = load(made / "converted").model
    layers = [site["layer"] for site in model.config.approx["sites"].values()]
    honest = {layer: Damage(0.1, None, 64) for layer in layers}
    assert verify.active(model, honest).passed
    check = verify.active(model, honest | {layers[-1]: Damage(0.0, None, 64)})
    assert check.passed is False
    assert f"layers {layers[-1]} give" in check.detail


def test_exact_mechanisms_need_no_difference(made, tmp_path):
    convert.convert(made / "base", tmp_path / "flash", Plan.of("flash"))
    found = verify.verify(tmp_path / "flash")
    assert failed(found) == []
    assert results(found)["attention is really replaced"] is None


def test_what_cannot_be_verified_is_refused(made, tmp_path):
    with pytest.raises(ApproxError, match="not a converted checkpoint") as refused:
        verify.verify(made / "base")
    assert refused.value.exit_code == Exit.REFUSED
    (tmp_path / "converted").mkdir()
    for path in (made / "converted").iterdir():
        if path.name != "approx_manifest.json":
            shutil.copy(path, tmp_path / "converted")
    with pytest.raises(ApproxError, match="was not written completely"):
        verify.verify(tmp_path / "converted")


def test_every_range_names_a_tensor_of_its_mechanism():
    named = {name: kind.ranges for name, kind in MECHANISMS.items() if kind.ranges}
    assert named
    for name, ranges in named.items():
        mechanism = MECHANISMS[name](2, 8, causal=False, scale=1.0)
        for each, (low, high) in ranges.items():
            tensor = getattr(mechanism, each)
            assert ((tensor >= low) & (tensor <= high)).all()
