"""What a push refuses before it uploads anything, and the folder that a dry run writes."""

import base64
import json
import shutil

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import save_file

from approx import api
from approx.checkpoints import checkpoint
from approx.checkpoints.history import RECEIPT
from approx.checkpoints.manifest import MANIFEST, check_seal, seal
from approx.errors import ApproxError, Exit
from approx.pushing import privacy
from approx.pushing.folder import check
from approx.pushing.remote import licence_from_hub

from .conftest import Place

HOME = "/home"
SECRET = "hf_" + "s" * 34


LETTERS = "aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD2fG4hJ6k"
KEYS = [
    "AKIA" + "IOSFODNN7EXAMPLE",
    f"aws_secret_access_key = {LETTERS}",
    LETTERS,
    "AIza" + LETTERS[:35],
    "npm_" + LETTERS[:36],
    "pypi-" + "AgEIcHlwaS5vcmc" + LETTERS,
    f"eyJhbGciOiJIUzI1NiJ9.{'eyJzdWIiOiIxMjM0NTY3ODkwIn0'}.{LETTERS}",
    "-----BEGIN PGP " + "PRIVATE KEY BLOCK-----",
    "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "https://hooks.slack.com/" + f"services/T0123ABCD/B0123ABCD/{LETTERS[:24]}",
    "xoxb-" + "1234567890-abcdefghij",
    "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=" + LETTERS * 2 + "abcdef==",
    LETTERS * 2 + "abcdef==",
    "rk_live_" + LETTERS[:24],
    "sk_live_" + LETTERS[:24],
    "ghp_" + LETTERS[:36],
    "glpat-" + LETTERS[:20],
    "sk-ant-api03-" + LETTERS,
    "sk-" + LETTERS,
    "hf_" + LETTERS[:34],
    "\\u0068f_" + LETTERS[:34],
    "h\\x66_" + LETTERS[:34],
    "%68f_" + LETTERS[:34],
    "postgres://ada:hunter2@db.example.org/x",
    "SG." + LETTERS[:22] + "." + LETTERS,
    base64.b64encode(f"token hf_{LETTERS[:34]}".encode()).decode(),
]


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
    assert done.left == ["notes.log"]
    assert done.files.keys() == {path.relative_to(dry).as_posix() for path in dry.rglob("*") if path.is_file()}
    assert not any(path.is_symlink() for path in dry.rglob("*"))
    before, after = checkpoint.load(folder), checkpoint.load(dry)
    assert before.weights_sha256 == after.weights_sha256
    assert '"revision": "COMMIT"' in ModelCard.load(dry / "README.md").text
    # What it wrote is itself a folder that can be pushed.
    assert api.push(dry, "ada/m", dry_run=folder.with_name("again"), offline=True).files


def test_pushes_a_separate_chat_template(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert "chat_template.jinja" in api.push(folder, "ada/m", dry_run=folder.with_name("dry"), offline=True).files


def test_names_code_of_the_base_that_is_pushed(folder, monkeypatch):
    monkeypatch.setattr("approx.pushing.folder.carried", lambda config: ["tokenization_own.py"])
    assert any("tokenization_own.py" in note for note in check(folder).notes)


def test_reports_a_hub_that_breaks_off_while_the_licence_is_read(monkeypatch):
    def break_off(*arguments, **settings):
        raise ConnectionError("reset")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", break_off)
    with pytest.raises(ApproxError, match=r"^Reading the licence of the base"):
        licence_from_hub("ada/base", public=False)


def test_a_dry_run_replaces_a_folder_only_with_force_and_never_its_own(folder):
    api.push(folder, "ada/m", dry_run=folder.with_name("dry"), offline=True)
    with pytest.raises(ApproxError, match="--force") as caught:
        api.push(folder, "ada/m", dry_run=folder.with_name("dry"), offline=True)
    assert caught.value.exit_code == Exit.REFUSED
    assert api.push(folder, "ada/n", dry_run=folder.with_name("dry"), offline=True, force=True).files
    assert "ada/n" in (folder.with_name("dry") / "README.md").read_text(encoding="utf-8")
    before = sorted(folder.rglob("*"))
    for inside in (folder, folder / "dry"):
        with pytest.raises(ApproxError):
            api.push(folder, "ada/m", dry_run=inside, offline=True, force=True)
    assert sorted(folder.rglob("*")) == before


def test_a_dry_run_reports_its_steps(folder):
    said = []
    api.push(folder, "ada/m", dry_run=folder.with_name("dry"), offline=True, progress=lambda *step: said.append(step))
    assert said == [("push: checking the folder", 0, 2), ("push: writing", 1, 2)]


def test_a_folder_that_is_not_verified_is_refused(folder, converted, tmp_path):
    assert "is not a folder" in refused(tmp_path / "none", Exit.UNAVAILABLE)
    assert "is not converted" in refused(converted.parent / "base")
    (folder / "approx_mechanisms_local.py").unlink()
    assert "is damaged: approx_mechanisms_local.py" in refused(folder, Exit.UNAVAILABLE)


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
        # Names that only look like keys are put together here, so that no scanner finds them in this file.
        *[(text, "a secret") for text in KEYS],
        ("see file:///home/ada/notes", "the local path file:///home/ada/notes"),
        ("C:/Users/ada/model", "the local path C:/Users/ada/model"),
        (r"on \\\\server\\share\\x", r"the local path \\\\server\\share\\x"),
        (r"by m\u0061llory", "the name mallory"),
        ("file mallory_notes", "the name mallory"),
        ("https://example.org/home/ada, 1/2, and/or, mallory-like", None),
        ("Wav2Vec2ForSequenceClassificationOfAudio and " + "0123456789abcdef" * 4, None),
        ("aa2b3c4d5e6f7081928374655647382910abcdef", None),
        ("task-specific-and-long-words-with-risk-management-of-all", None),
    ],
)
def test_finds_private_data(tmp_path, monkeypatch, text, found):
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


def test_a_password_in_an_address_leaves_a_record_whole():
    here = privacy.Private((), (), ())
    for text in ("https://ada:hunter2@example.org/x", "https://ada@example.org/x"):
        assert privacy.scrubbed({"a": text}, here) == {"a": "https://example.org/x"}


def test_names_of_files_and_notes_in_weights_are_searched(tmp_path):
    here = privacy.Private((), (), ("mallory",))
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors", {"by": "mallory"})
    assert privacy.findings(tmp_path / "a.safetensors", "a.safetensors", here, "ada/m") == [
        "a.safetensors, line 1: the name mallory"
    ]
    (tmp_path / "x").write_text("fine")
    assert privacy.findings(tmp_path / "x", "of_mallory.txt", here, "ada/m") == [
        "of_mallory.txt: its name holds the name mallory"
    ]
    (said,) = privacy.findings(tmp_path / "x", f"{SECRET}.txt", here, "ada/m")
    assert said == "a file whose name holds a secret"


@pytest.mark.parametrize("where", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH"])
def test_the_token_in_use_is_found_in_the_bytes_of_any_file(tmp_path, monkeypatch, where):
    token = "a-token-of-no-known-form-0123"
    for name in ("HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH"):
        monkeypatch.setattr(constants, name, str(tmp_path / "none"))
    if where.endswith("PATH"):
        (tmp_path / "stored").write_text(f"[mine]\nhf_token = {token}\n")
        monkeypatch.setattr(constants, where, str(tmp_path / "stored"))
    else:
        monkeypatch.setenv(where, token)
    (tmp_path / "model.safetensors").write_bytes(
        b"\x02" + b"\0" * 7 + b"{}" + b"\0\xff" * 1000 + token.encode() + b"\xff"
    )
    (tmp_path / "tokenizer.json").write_text(f'{{"{token}": 1}}')
    for name in ("model.safetensors", "tokenizer.json"):
        found = privacy.findings(tmp_path / name, name, privacy.private_here(), "ada/m")
        assert found == [f"{name}, line 1: a secret"]


def test_finds_nothing_in_real_vocabularies(shared_data):
    files = [path for path in sorted((shared_data / "tokenizers").rglob("*")) if path.is_file()]
    assert files
    here = privacy.Private(("a secret that nobody has",), (f"{HOME}/mallory",), ("mallory",))
    found = [line for path in files for line in privacy.findings(path, path.name, here, "ada/m")]
    assert found == []


def test_a_name_in_the_model_id_is_public(tmp_path, monkeypatch):
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: "mallory")
    file = tmp_path / "README.md"
    file.write_text("by mallory")
    assert privacy.findings(file, "README.md", privacy.private_here(), "mallory/m") == []


def test_removes_paths_that_transformers_stores(folder):
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
def test_rejects_invalid_repository_names(folder, name):
    with pytest.raises(ApproxError, match=r"not the name of a repository.*The form is owner/name"):
        api.push(folder, name, dry_run=folder.with_name("dry"), offline=True)


@pytest.mark.sample(1)
def test_requires_public_for_a_public_repository(converted, hub):
    api.push(converted, "ada/m", public=True)
    assert not hub.repos["ada/m"].private
    with pytest.raises(ApproxError, match="exists and is public"):
        api.push(converted, "ada/m")
    api.push(converted, "ada/quiet")
    assert hub.repos["ada/quiet"].private
    assert "stays so" in " ".join(api.push(converted, "ada/quiet", public=True).notes)


@pytest.mark.sample(0)
def test_does_not_overwrite_another_models_repository(converted, hub):
    hub.create("ada/bert").commit("main", {"config.json": b"{}", "pytorch_model.bin": b"x"}, "by hand")
    with pytest.raises(ApproxError, match=r"holds another model \(config.json\) that approx did not push.*--force"):
        api.push(converted, "ada/bert")
    assert hub.uploads() == []
    for number, name in enumerate(("a.bin", "model.safetensors", "config.json")):
        hub.create(f"ada/b{number}").commit("main", {name: b"{}"}, "by hand")
        with pytest.raises(ApproxError, match=f"holds another model .{name}") as caught:
            api.push(converted, f"ada/b{number}")
        assert caught.value.exit_code == Exit.REFUSED
    # A repository without a model may have been made for this one.
    hub.create("ada/new").commit("main", {"notes.txt": b"soon"}, "by hand")
    api.push(converted, "ada/new")
    api.push(converted, "ada/bert", force=True)
    assert {"model.safetensors", "pytorch_model.bin"} <= set(Place("ada/bert").files())


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


def test_a_dry_run_asks_the_hub_about_the_base_and_goes_on_without_an_answer(from_hub, hub):
    from hub_state import Fault

    hub.create("owner/base", private=False).commit("main", {"README.md": b"---\nlicense: gpl-3.0\n---\n"}, "card")

    def dry(**options):
        hub.calls.clear()
        done = api.push(from_hub, "ada/m", dry_run=from_hub.with_name("dry"), force=True, **options)
        return ModelCard(done.card).data.get("license"), done.notes

    assert dry() == ("gpl-3.0", [])
    assert dry(offline=True)[0] is None
    assert hub.calls == []
    hub.faults = [Fault("models/owner/base", 403, message="Forbidden")]
    licence, (first, *_) = dry()
    assert licence is None
    assert "may not write" in first or "Reading the licence" in first
    hub.faults = []
    hub.repos["owner/base"].gated = "manual"
    with pytest.raises(ApproxError, match=r"owner/base is gated.*--public") as caught:
        dry(public=True)
    assert caught.value.exit_code == Exit.REFUSED
    assert dry()[0] == "gpl-3.0"


def test_a_gated_base_is_not_made_public(from_hub, hub):
    hub.create("owner/base", private=False, gated="manual")
    with pytest.raises(ApproxError, match=r"owner/base is gated.*--public"):
        api.push(from_hub, "ada/m", public=True)
    assert hub.uploads() == []


def test_reports_a_gated_base_whose_card_cannot_be_read(from_hub, hub):
    from hub_state import Fault

    hub.create("owner/base", private=False)
    hub.faults = [Fault("models/owner/base", 403, "GatedRepo", "Access is restricted")]
    with pytest.raises(ApproxError, match="owner/base is gated, and this token has no access"):
        api.push(from_hub, "ada/m")


def test_notes_a_missing_licence(from_hub):
    done = api.push(from_hub, "ada/m", dry_run=from_hub.with_name("dry"), offline=True)
    assert "No licence is known" in done.notes[0]
