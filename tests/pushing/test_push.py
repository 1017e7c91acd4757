"""Pushes to a hub: what arrives, what a second push does, branches, pull requests, edits on the hub."""

import json
import re
import shutil

import pytest
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file

from approx import api
from approx.checkpoints.manifest import MANIFEST, seal
from approx.errors import ApproxError, Exit
from approx.pushing import push as pushing

from .conftest import Place


def test_uploads_everything_once_and_nothing_the_second_time(converted, place):
    done = api.push(converted, place.repo)
    assert not done.identical
    assert done.check.startswith("largest difference 0.0e+00")
    info = HfApi().repo_info(place.repo)
    assert (info.private, info.sha) == (True, done.commit)
    sealed = json.loads(place.read(MANIFEST))["files"]
    assert set(sealed) | {MANIFEST} <= set(place.files())
    # The card pins the commit that holds the code.
    pinned = re.findall(r'"revision": "(\w+)"', place.read("README.md"))
    assert pinned
    assert "COMMIT" in place.read("README.md", pinned[0])
    assert place.read("config.json", pinned[0]) == place.read("config.json")
    again = api.push(converted, place.repo)
    assert again.identical
    assert again.uploaded == []
    assert again.commit == done.commit


@pytest.mark.sample(0)
def test_another_model_replaces_all_files_of_the_first(converted, other, place):
    api.push(converted, place.repo)
    place.write("notes.txt", "written on the hub")
    done = api.push(other, place.repo)
    assert "approx_mechanisms_local.py" in done.deleted
    files = place.files()
    assert "approx_mechanisms_linear.py" in files
    assert "approx_mechanisms_local.py" not in files
    assert "notes.txt" in files


def test_a_branch_is_created(converted, place):
    assert api.push(converted, place.repo, revision="second").commit
    assert "model.safetensors" in place.files("second")
    assert "model.safetensors" not in place.files("main")
    assert api.push(converted, place.repo, revision="second").identical


@pytest.mark.sample(0)
def test_a_push_to_a_branch_leaves_main_and_is_compared_with_its_own_commit(converted, other, hub):
    first = api.push(converted, "ada/m", public=True)
    done = api.push(other, "ada/m", revision="second", public=True)
    refs = hub.repos["ada/m"].refs
    assert (refs["main"], refs["second"]) == (first.commit, done.commit)
    assert "approx_mechanisms_linear.py" in Place("ada/m").files("second")
    assert "approx_mechanisms_linear.py" not in Place("ada/m").files()
    # A new branch begins with the files of main; those of the other model go.
    assert "approx_mechanisms_local.py" in done.deleted
    assert "approx_mechanisms_local.py" not in Place("ada/m").files("second")
    same = api.push(converted, "ada/m", revision="third", public=True)
    assert refs["third"] == refs["main"] == same.commit
    assert (same.identical, same.uploaded) == (False, [])
    # What it said is what is there.
    assert (done.repo, done.private, done.pull_request) == ("ada/m", False, None)
    assert done.url == f"{hub.endpoint}/ada/m"


@pytest.mark.sample(0)
def test_shows_its_changes_before_it_uploads(converted, other, hub):
    shown, said = [], []

    def agree(upload):
        shown.append(upload)
        assert len(hub.uploads()) == calls
        return True

    calls = 0
    api.push(converted, "ada/m", agree=agree, progress=lambda *step: said.append(step))
    assert said == [
        (f"push: {what}", number, 6)
        for number, what in enumerate(
            [
                "checking the folder",
                "signing in",
                "comparing with the repository",
                "uploading",
                "downloading and comparing",
            ]
        )
    ]
    calls = len(hub.uploads())
    done = api.push(other, "ada/m", agree=agree, revision="two", public=False)
    first, second = shown
    assert (first.repo, first.endpoint, first.revision) == ("ada/m", hub.endpoint, "main")
    assert (first.new, first.private, first.create_pr, first.deleted) == (True, True, False, [])
    assert (second.new, second.private, second.revision) == (False, True, "two")
    assert sorted(first.written) == [name for name, _ in first.files]
    sizes = {name: len(content) for name, content in hub.repos["ada/m"].commits[done.commit].items()}
    assert {name: size for name, size in second.files if name not in ("README.md", MANIFEST)}.items() <= sizes.items()
    assert "COMMIT" in first.card
    assert second.left == []


def test_uses_the_message_for_the_commits(converted, hub):
    api.push(converted, "ada/m", message="My words")
    assert hub.repos["ada/m"].messages[1] == "My words"
    assert hub.repos["ada/m"].messages[2].startswith("My words: the card pins ")


@pytest.mark.sample(1)
def test_a_pull_request_is_opened_once(converted, other, place):
    api.push(converted, place.repo)
    try:
        done = api.push(other, place.repo, create_pr=True)
    except ApproxError as error:
        if "takes no pull requests" not in str(error):
            raise
        pytest.skip("this hub has no pull requests")
    assert "/discussions/1" in str(done.pull_request)
    assert "approx_mechanisms_linear.py" in place.files("refs/pr/1")
    assert "approx_mechanisms_linear.py" not in place.files()
    again = api.push(other, place.repo, create_pr=True)
    assert again.identical
    assert again.url == done.pull_request


@pytest.mark.sample(1)
def test_does_not_overwrite_edits_on_the_hub(converted, place):
    api.push(converted, place.repo)
    place.write("README.md", "---\nlicense: mit\n---\nEdited by hand")
    with pytest.raises(ApproxError, match=r"edited on the hub since it was pushed: README.md.*--force") as caught:
        api.push(converted, place.repo)
    assert caught.value.exit_code == Exit.REFUSED
    assert "Edited by hand" in place.read("README.md")
    api.push(converted, place.repo, force=True)
    assert "Edited by hand" not in place.read("README.md")


def test_does_not_overwrite_a_change_during_the_push(converted, other, place):
    api.push(converted, place.repo)

    def somebody_else(upload):
        place.write("config.json", "{}")
        return True

    with pytest.raises(ApproxError, match="changed while this push ran") as caught:
        api.push(other, place.repo, agree=somebody_else)
    assert caught.value.exit_code == Exit.REFUSED
    assert place.read("config.json") == "{}"


def test_the_card_shows_results_next_to_their_baselines(converted, records, place):
    api.push(converted, place.repo, records=records)
    card = ModelCard(place.read("README.md"))
    data = card.data.to_dict()
    assert (data["license"], data["language"], data["library_name"]) == ("mit", "en", "transformers")
    assert (data["base_model"], data["base_model_relation"]) == ("owner/first", "finetune")
    assert (data["datasets"], data["metrics"]) == (["nyu-mll/glue"], ["accuracy"])
    (result,) = data["model-index"][0]["results"]
    assert result["dataset"]["type"] == "nyu-mll/glue"
    assert (result["dataset"]["config"], result["dataset"]["split"]) == ("sst2", "validation")
    assert [one["name"] for one in result["metrics"]] == ["accuracy"]
    task = json.loads(records[0].read_text())["quality"][0]
    assert [one["value"] for one in result["metrics"]] == [task["variants"][0]["scores"]["accuracy"]]
    assert f"| {task['variants'][0]['verdict']}" in card.text
    assert "| crossover |" in card.text
    assert "Its quality and speed were not measured" not in card.text
    for name in ("records/record-1.json", "records/record-2.json"):
        text = place.read(name)
        assert json.loads(text)["command"] == ""
        assert "/ada" not in text
        assert str(records[0].parent) not in text


def damaged(folder, other):
    (folder / "config.json").write_text("{}")


def without_a_file(folder, other):
    (folder / "approx_mechanisms_local.py").unlink()


def another_model(folder, other):
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def other_weights(folder, other):
    """Whole by its own manifest."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: 1.1 * value for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    seal(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damaged, "config.json"),
        (without_a_file, "approx_mechanisms_local.py"),
        (another_model, ""),
        (other_weights, "difference"),
    ],
)
@pytest.mark.sample(2)
def test_compares_the_downloaded_copy(converted, other, hub, monkeypatch, change, said):
    download = pushing.Remote.download

    def tampered(self, commit, folder):
        there = download(self, commit, folder)
        change(there, other)
        return there

    monkeypatch.setattr(pushing.Remote, "download", tampered)
    with pytest.raises(ApproxError, match=rf"downloaded copy differs.*{said}.*--force") as caught:
        api.push(converted, "ada/m")
    assert caught.value.exit_code == Exit.VERIFICATION


def test_nothing_is_uploaded_without_consent(converted, hub):
    with pytest.raises(ApproxError, match="Nothing was uploaded"):
        api.push(converted, "ada/m", agree=lambda upload: False)
    assert hub.uploads() == []


@pytest.mark.sample(0)
def test_a_long_list_of_files_comes_in_pages(converted, hub):
    hub.page = 3
    api.push(converted, "ada/m")
    assert api.push(converted, "ada/m").identical
    assert len(Place("ada/m").files()) > 3


@pytest.mark.slow
def test_the_pushed_model_runs_in_a_pipeline_at_its_pinned_commit(converted, hub):
    # Importing it imports every pipeline.
    from transformers import pipeline

    done = api.push(converted, "ada/m")
    classify = pipeline("text-classification", model="ada/m", revision=done.commit)
    assert classify("the film is good")[0]["label"] in ("negative", "positive")
    card = Place("ada/m").read("README.md")
    assert 'pipeline("text-classification", model="ada/m", **pinned)' in card


@pytest.mark.sample(0)
def test_the_card_has_the_fields_that_the_user_states(converted, hub, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "mine")
    card = folder / "README.md"
    card.write_text("---\nlicense: other\nlicense_name: theirs\nlicense_link: LICENSE\n---\nText\n")
    seal(folder)
    hub.create("owner/base", private=False).commit("main", {"README.md": b"---\nlicense: gpl-3.0\n---\n"}, "card")

    def pushed(repo, **said):
        done = api.push(folder, repo, **said)
        made = ModelCard(Place(repo).read("README.md"))
        return done.notes, made.data.to_dict(), made.text

    notes, data, _ = pushed("ada/plain")
    assert ("base_model" in data, data["license"], data["license_name"]) == (False, "other", "theirs")
    assert "license_link" not in data
    assert [note for note in notes if "license_link 'LICENSE' names no file" in note]
    (folder / "LICENSE").write_text("Terms")
    seal(folder)
    assert pushed("ada/linked")[1]["license_link"] == "LICENSE"
    assert Place("ada/linked").read("LICENSE") == "Terms"
    _, data, text = pushed("ada/said", base_model="owner/base", license="mit", language=["en", "de"])
    assert (data["base_model"], data["base_model_relation"]) == ("owner/base", "finetune")
    assert (data["license"], data["language"], "license_name" in data) == ("mit", ["en", "de"], False)
    assert "made from `owner/base` (" in text
    card.write_text("Text\n")
    seal(folder)
    assert pushed("ada/asked", base_model="owner/base")[1]["license"] == "gpl-3.0"


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"base_model": "a/b/c"}, "--base-model is 'a/b/c'"),
        ({"base_model": "../base"}, "--base-model"),
        ({"license": "MIT License"}, "--license is 'MIT License'"),
        ({"language": "English"}, "--language is 'English'"),
        ({"language": ["en", ""]}, "--language is ''"),
    ],
)
def test_rejects_invalid_card_fields_first(said, wrong, tmp_path):
    with pytest.raises(ApproxError, match=wrong) as caught:
        api.push(tmp_path / "nowhere", "ada/m", **said)
    assert caught.value.exit_code == Exit.USAGE
