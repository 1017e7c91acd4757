"""Pushes to a hub: what arrives, what a second push does, branches, pull requests, edits on the hub."""

import json
import re

import pytest
from huggingface_hub import HfApi, ModelCard

from approx import api
from approx.errors import ApproxError, Exit
from approx.pushing import upload as pushing
from approx.seam.manifest import MANIFEST


def test_a_push_arrives_whole_and_a_second_one_uploads_nothing(converted, place):
    done = api.push(converted, place.repo)
    assert not done["identical"]
    assert done["check"].startswith("largest difference 0.0e+00")
    info = HfApi().repo_info(place.repo)
    assert (info.private, info.sha) == (True, done["commit"])
    sealed = json.loads(place.read(MANIFEST))["files"]
    assert set(sealed) | {MANIFEST} <= set(place.files())
    # The card pins the commit that holds the code.
    pinned = re.findall(r'"revision": "(\w+)"', place.read("README.md"))
    assert pinned
    assert "COMMIT" in place.read("README.md", pinned[0])
    assert place.read("config.json", pinned[0]) == place.read("config.json")
    again = api.push(converted, place.repo)
    assert again["identical"]
    assert again["uploaded"] == []
    assert again["commit"] == done["commit"]


def test_another_model_takes_the_place_of_the_first_and_no_file_of_it_stays(converted, other, place):
    api.push(converted, place.repo)
    place.write("notes.txt", "written on the hub")
    done = api.push(other, place.repo)
    assert "approx_local.py" in done["deleted"]
    files = place.files()
    assert "approx_linear.py" in files
    assert "approx_local.py" not in files
    assert "notes.txt" in files


def test_a_branch_is_created(converted, place):
    assert api.push(converted, place.repo, revision="second")["commit"]
    assert "model.safetensors" in place.files("second")
    assert "model.safetensors" not in place.files("main")
    assert api.push(converted, place.repo, revision="second")["identical"]


def test_the_message_is_that_of_the_commits(converted, hub):
    api.push(converted, "ada/m", message="My words")
    assert hub.repos["ada/m"].messages[1] == "My words"
    assert hub.repos["ada/m"].messages[2].startswith("My words: the card pins ")


def test_a_pull_request_is_opened_once(converted, other, place):
    api.push(converted, place.repo)
    try:
        done = api.push(other, place.repo, create_pr=True)
    except ApproxError as error:
        if "takes no pull requests" not in str(error):
            raise
        pytest.skip("this hub has no pull requests")
    assert "/discussions/1" in done["pull_request"]
    assert "approx_linear.py" in place.files("refs/pr/1")
    assert "approx_linear.py" not in place.files()
    again = api.push(other, place.repo, create_pr=True)
    assert again["identical"]
    assert again["url"] == done["pull_request"]


def test_what_was_edited_on_the_hub_is_not_written_over(converted, place):
    api.push(converted, place.repo)
    place.write("README.md", "---\nlicense: mit\n---\nEdited by hand")
    with pytest.raises(ApproxError, match=r"edited on the hub since it was pushed: README.md.*--force") as caught:
        api.push(converted, place.repo)
    assert caught.value.exit_code == Exit.REFUSED
    assert "Edited by hand" in place.read("README.md")
    api.push(converted, place.repo, force=True)
    assert "Edited by hand" not in place.read("README.md")


def test_a_change_during_the_push_is_not_written_over(converted, other, place):
    api.push(converted, place.repo)

    def somebody_else(upload):
        place.write("config.json", "{}")
        return True

    with pytest.raises(ApproxError, match="changed while this push ran") as caught:
        api.push(other, place.repo, agree=somebody_else)
    assert caught.value.exit_code == Exit.REFUSED
    assert place.read("config.json") == "{}"


def test_results_are_in_the_card_with_the_baseline_beside_each(converted, records, place):
    api.push(converted, place.repo, records=records)
    card = ModelCard(place.read("README.md"))
    data = card.data.to_dict()
    assert (data["license"], data["language"], data["library_name"]) == ("mit", "en", "transformers")
    assert (data["base_model"], data["base_model_relation"]) == ("owner/first", "finetune")
    assert (data["datasets"], data["metrics"]) == (["nyu-mll/glue"], ["accuracy"])
    (result,) = data["model-index"][0]["results"]
    assert result["dataset"]["type"] == "nyu-mll/glue"
    assert (result["dataset"]["config"], result["dataset"]["split"]) == ("sst2", "validation")
    assert [one["name"] for one in result["metrics"]] == ["accuracy", "accuracy, exact attention"]
    told = json.loads(records[0].read_text())["quality"][0]
    assert [one["value"] for one in result["metrics"]] == [
        told["variants"][0]["scores"]["accuracy"], told["base"]["scores"]["accuracy"],
    ]  # fmt: skip
    assert f"| {told['variants'][0]['verdict']}" in card.text
    assert "| crossover |" in card.text
    assert "Its quality and speed were not measured" not in card.text
    for name in ("records/record-1.json", "records/record-2.json"):
        text = place.read(name)
        assert json.loads(text)["command"] == ""
        assert "/ada" not in text
        assert str(records[0].parent) not in text


def test_what_comes_back_is_compared(converted, hub, monkeypatch):
    download = pushing.Remote.download

    def tampered(self, commit, folder):
        there = download(self, commit, folder)
        (there / "config.json").write_text("{}")
        return there

    monkeypatch.setattr(pushing.Remote, "download", tampered)
    with pytest.raises(ApproxError, match=r"downloaded again is not the same.*config.json") as caught:
        api.push(converted, "ada/m")
    assert caught.value.exit_code == Exit.VERIFICATION


def test_nothing_is_uploaded_without_consent(converted, hub):
    with pytest.raises(ApproxError, match="Nothing was uploaded"):
        api.push(converted, "ada/m", agree=lambda upload: False)
    assert hub.uploads() == []
