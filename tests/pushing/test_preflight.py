"""What a push refuses before it uploads anything, and the folder that a dry run writes."""

import json
import shutil

import pytest
from huggingface_hub import ModelCard

from approx import api
from approx.checkpoints import checkpoint
from approx.checkpoints.receipt import RECEIPT
from approx.errors import ApproxError, Exit
from approx.pushing import privacy
from approx.seam.manifest import MANIFEST, check_seal, seal

HOME = "/home"
SECRET = "hf_" + "s" * 34


@pytest.fixture
def folder(converted, tmp_path):
    """A copy of the converted folder, to spoil."""
    return shutil.copytree(converted, tmp_path / "mine")


def spoiled(folder, name, text):
    (folder / name).write_text(text)
    seal(folder)


def changed_json(folder, name, **settings):
    data = json.loads((folder / name).read_text())
    spoiled(folder, name, json.dumps(data | settings))


def refused(folder, code=Exit.REFUSED, **options):
    with pytest.raises(ApproxError) as caught:
        api.push(folder, "ada/m", dry_run=folder.with_name("dry"), offline=True, **options)
    assert caught.value.exit_code == code
    assert not folder.with_name("dry").exists()
    return str(caught.value)


def test_a_dry_run_writes_the_whole_folder_and_it_loads(folder, records):
    (folder / "notes.log").write_text("x")
    done = api.push(folder, "ada/m", records=records, dry_run=folder.with_name("dry"), offline=True)
    dry = folder.with_name("dry")
    check_seal(dry)
    assert done["left"] == ["notes.log"]
    assert done["files"].keys() == {path.relative_to(dry).as_posix() for path in dry.rglob("*") if path.is_file()}
    assert not any(path.is_symlink() for path in dry.rglob("*"))
    before, after = checkpoint.load(folder), checkpoint.load(dry)
    assert before.weights_sha256 == after.weights_sha256
    assert '"revision": "COMMIT"' in ModelCard.load(dry / "README.md").text
    # What it wrote is itself a folder that can be pushed.
    assert api.push(dry, "ada/m", dry_run=folder.with_name("again"), offline=True)["files"]


def test_a_folder_that_is_not_verified_is_refused(folder, converted, tmp_path):
    assert "is not a folder" in refused(tmp_path / "none", Exit.UNAVAILABLE)
    assert "is not converted" in refused(converted.parent / "base")
    (folder / "approx_local.py").unlink()
    assert "is damaged: approx_local.py" in refused(folder, Exit.UNAVAILABLE)


def test_a_failed_check_or_no_receipt_is_refused(folder):
    receipt = json.loads((folder / RECEIPT).read_text())
    receipt["checks"][0]["passed"] = False
    spoiled(folder, RECEIPT, json.dumps(receipt))
    assert f"failed {receipt['checks'][0]['name']}" in refused(folder, Exit.VERIFICATION)
    (folder / RECEIPT).unlink()
    seal(folder)
    assert "has no checks" in refused(folder, Exit.VERIFICATION)


def test_secrets_and_paths_are_refused_by_file_and_line_and_secrets_are_not_repeated(folder):
    spoiled(folder, "special.txt", f"fine\ntoken {SECRET}\nread from {HOME}/ada/data\n")
    said = refused(folder)
    assert "special.txt, line 2: a secret" in said
    assert f"special.txt, line 3: the local path {HOME}/ada/data" in said
    assert SECRET not in said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("-----BEGIN RSA PRIVATE KEY-----", "a secret"),
        ("AKIAIOSFODNN7EXAMPLE", "a secret"),
        ("a value of the environment: correct horse", "a secret"),
        ("C:\\Users\\ada\\model", "the local path C:\\Users\\ada\\model"),
        ("in ~/models/bert", "the local path ~/models/bert"),
        ("by mallory, on a machine", "the name mallory"),
        ('{"a": [{"command": "approx convert x"}]}', "the typed command approx convert x"),
        ("https://example.org/home/ada, 1/2, and/or, mallory-like", None),
    ],
)
def test_what_is_private_is_found(tmp_path, monkeypatch, text, found):
    monkeypatch.setenv("MY_SECRET", "correct horse")
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: "mallory")
    here = privacy.private_here()
    file = tmp_path / "some.json"
    file.write_text(text)
    assert privacy.findings(file, "some.json", here, "ada/m") == ([f"some.json, line 1: {found}"] if found else [])
    # A scrubbed record has none of it.
    data = {"command": "approx x", "a": [text], "path": "../data/SST-2", "id": "owner/name", "n": 1}
    clean = privacy.scrubbed(data, here)
    assert (clean["command"], clean["path"], clean["id"], clean["n"]) == ("", "SST-2", "owner/name", 1)
    if found and not found.startswith("the typed"):
        file.write_text(json.dumps(clean))
        assert privacy.findings(file, "some.json", here, "ada/m") == []


def test_a_name_that_is_in_the_model_id_is_public_anyway(tmp_path, monkeypatch):
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: "mallory")
    file = tmp_path / "README.md"
    file.write_text("by mallory")
    assert privacy.findings(file, "README.md", privacy.private_here(), "mallory/m") == []


def test_places_that_transformers_notes_are_left_out(folder):
    changed_json(
        folder, "tokenizer_config.json", name_or_path=HOME + "/ada/bert", tokenizer_file=HOME + "/ada/tokenizer.json"
    )
    api.push(folder, "ada/m", dry_run=folder.with_name("dry"), offline=True)
    settings = json.loads((folder.with_name("dry") / "tokenizer_config.json").read_text())
    assert not {"name_or_path", "tokenizer_file"} & settings.keys()
    assert json.loads((folder.with_name("dry") / MANIFEST).read_text())["files"]


def test_a_record_of_another_model_is_refused(other, folder, records):
    copy = shutil.copytree(other, folder.with_name("other"))
    assert "is not about this folder: its variants are 'converted'" in refused(copy, records=records)


def test_a_record_that_is_damaged_is_refused(folder, tmp_path):
    (tmp_path / "r.json").write_text("{")
    assert "is damaged" in refused(folder, Exit.UNAVAILABLE, records=[tmp_path / "r.json"])
    assert "cannot be read" in refused(folder, Exit.UNAVAILABLE, records=[tmp_path / "none.json"])


@pytest.mark.parametrize("name", ["m", "a/b/c", "a/b c", "-a/b"])
def test_a_name_that_no_repository_can_have_is_refused(folder, name):
    with pytest.raises(ApproxError, match=r"not the name of a repository.*The form is owner/name"):
        api.push(folder, name, dry_run=folder.with_name("dry"), offline=True)


def test_a_public_repository_has_to_be_meant(converted, hub):
    api.push(converted, "ada/m", public=True)
    assert not hub.repos["ada/m"].private
    with pytest.raises(ApproxError, match="exists and is public"):
        api.push(converted, "ada/m")
    api.push(converted, "ada/quiet")
    assert hub.repos["ada/quiet"].private
    assert "stays so" in " ".join(api.push(converted, "ada/quiet", public=True)["notes"])


def test_a_repository_of_another_model_is_not_written_over(converted, hub):
    hub.create("ada/bert").commit("main", {"config.json": b"{}", "pytorch_model.bin": b"x"}, "by hand")
    with pytest.raises(ApproxError, match=r"holds another model \(config.json\) that approx did not push.*--force"):
        api.push(converted, "ada/bert")
    assert hub.uploads() == []


@pytest.fixture
def from_hub(folder):
    """A folder whose base is on the hub."""
    config = json.loads((folder / "config.json").read_text())
    config["approx"]["history"][-1]["base"] |= {"name": "owner/base", "revision": "0123abcd"}
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\nText")
    spoiled(folder, "config.json", json.dumps(config))
    return folder


def test_the_licence_comes_from_the_hub_if_the_folder_has_none(from_hub, hub):
    hub.create("owner/base", private=False).commit("main", {"README.md": b"---\nlicense: gpl-3.0\n---\n"}, "card")
    api.push(from_hub, "ada/m")
    card = ModelCard(hub.repos["ada/m"].commits[hub.repos["ada/m"].refs["main"]]["README.md"].decode())
    assert (card.data.get("license"), card.data.get("base_model")) == ("gpl-3.0", "owner/base")


def test_a_gated_base_is_not_made_public(from_hub, hub):
    hub.create("owner/base", private=False, gated="manual")
    with pytest.raises(ApproxError, match=r"owner/base is gated.*--public"):
        api.push(from_hub, "ada/m", public=True)
    assert hub.uploads() == []


def test_a_gated_base_whose_card_cannot_be_read_is_told(from_hub, hub):
    from hub_state import Fault

    hub.create("owner/base", private=False)
    hub.faults = [Fault("models/owner/base", 403, "GatedRepo", "Access is restricted")]
    with pytest.raises(ApproxError, match="owner/base is gated, and this token has no access"):
        api.push(from_hub, "ada/m")


def test_without_a_licence_that_is_noted(from_hub):
    done = api.push(from_hub, "ada/m", dry_run=from_hub.with_name("dry"), offline=True)
    assert "No licence is known" in done["notes"][0]
