"""A comparison writes record, page and figure, resumes without repeating, and refuses what cannot run."""

import json
import shutil

import pytest
import torch

import approx
from approx.arena import arena as arena_module
from approx.arena.arena import arena
from approx.arena.options import SIZES, ArenaStage
from approx.arena.tasks import PROCESSOR, material
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.finetuning.trainer import train

STAGE = ArenaStage(mechanisms=["local"], seeds=2, size="tiny", steps=2, examples=20, test_examples=10)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arena") / "out"
    return folder, arena(STAGE, folder, command="approx lra")


def test_a_comparison_has_the_control_scores_speeds_and_memory(made):
    folder, found = made
    (task,) = found.tasks
    exact, local = task.contestants
    assert (exact.mechanism, local.mechanism, local.settings) == ("exact", "local", {"left": 4, "right": 4})
    for one in task.contestants:
        assert [trial.seed for trial in one.trials] == [0, 1]
        assert one.score == pytest.approx(sum(trial.score for trial in one.trials) / 2)
        assert one.interval[0] <= one.score <= one.interval[1]
        assert one.steps_per_second > 0
        assert one.peak_mb > 0
        assert {trial.steps for trial in one.trials} == {2}
    assert exact.parameters == local.parameters
    stored = json.loads((folder / "lra.json").read_text())
    assert stored["kind"] == "long-range-arena"
    assert stored["tasks"][0]["contestants"][1]["score"] == local.score
    page = (folder / "lra.md").read_text()
    assert "never stand beside scores of conversions" in page
    assert "| local left=4 right=4 |" in page
    assert "![" in page
    assert (folder / "lra.svg").read_text().startswith("<svg")
    assert not list((folder / "training").iterdir())


def test_its_record_is_refused_where_conversions_are_reported(made, tmp_path):
    folder, _ = made
    with pytest.raises(
        ApproxError, match=r"trained from scratch, by approx lra, which never stand beside scores of conversions"
    ):
        record.load(folder / "lra.json")


def test_finished_cells_are_not_repeated_and_others_are_added(made, tmp_path, monkeypatch):
    folder, first = made
    copied = tmp_path / "out"
    shutil.copytree(folder, copied)
    trained = []
    monkeypatch.setattr(
        arena_module,
        "train",
        lambda model, *rest, **more: trained.append(type(model).__name__) or train(model, *rest, **more),
    )
    with pytest.raises(ApproxError, match=r"holds an earlier comparison\. Continue it with --resume") as refused:
        arena(STAGE, copied)
    assert refused.value.exit_code == Exit.REFUSED
    assert arena(STAGE, copied, resume=True, command="approx lra") == first
    assert trained == []
    more = arena(STAGE.model_copy(update={"mechanisms": ["local", "linear"], "seeds": 1}), copied, resume=True)
    assert trained == ["ApproxBertForSequenceClassification"]
    assert [one.trials[0].score for one in more.tasks[0].contestants[:2]] == [
        one.trials[0].score for one in first.tasks[0].contestants
    ]
    assert more.tasks[0].contestants[0].interval is None


def test_a_training_that_fails_stops_no_other_one(tmp_path, monkeypatch):
    def failing(model, *rest, **more):
        if type(model).__name__.startswith("Approx"):
            raise ApproxError("The loss is nan.", Exit.VERIFICATION)
        return train(model, *rest, **more)

    monkeypatch.setattr(arena_module, "train", failing)
    found = arena(STAGE.model_copy(update={"seeds": 1}), tmp_path / "out")
    exact, local = found.tasks[0].contestants
    assert exact.score is not None
    assert local.score is None
    assert found.failed == [("listops, local, seed 0: The loss is nan.", Exit.VERIFICATION)]
    assert "The loss is nan." in (tmp_path / "out" / "lra.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanisms": ["lineer"]}, r"The mechanism 'lineer' is unknown\. Did you mean 'linear'\?"),
        ({"settings": {"linear": {}}}, r"Settings were given for linear, but settings are for .*: local"),
        ({"settings": {"local": {"wide": 3}}}, "wide"),
        ({"data": {"text": "here"}}, r"Data were given for text, but the tasks are listops"),
        ({"tasks": ["listops", "listops"]}, "name one twice"),
        ({"heads": 3}, "cannot be shared by 3 heads"),
    ],
)
def test_what_cannot_run_is_refused_before_any_training(options, message, tmp_path):
    with pytest.raises(ApproxError, match=message):
        arena(STAGE.model_copy(update=options), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ApproxError, match="Give one of them"):
        arena(STAGE, tmp_path / "out", resume=True, force=True)


def test_unknown_tasks_and_options_are_refused(tmp_path):
    with pytest.raises(ApproxError, match="one of listops, text, retrieval"):
        approx.lra(tmp_path / "out", tasks=["chess"])
    with pytest.raises(ApproxError, match="unknown key 'layer'"):
        approx.lra(tmp_path / "out", layer=2)


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_padding_and_the_company_of_a_batch_do_not_change_outputs(pool, tmp_path):
    made = material("listops", SIZES["tiny"]["listops"], None, pool)
    model = made.task.encoder(SIZES["tiny"]["listops"], 0).eval()
    rows = sorted(made.train, key=lambda one: len(one.inputs["input_ids"]))
    batches = [[rows[0]], [rows[0], rows[-1]]]
    with torch.no_grad():
        alone, beside = (
            made.task.outputs(
                model, made.task.collate([made.task.encode(one, PROCESSOR)[0] for one in some], PROCESSOR)
            ).logits[0]
            for some in batches
        )
    torch.testing.assert_close(alone, beside, rtol=1e-5, atol=1e-5)
