"""Training from folder to folder: the result loads anywhere, says what was done to it, and is complete or absent."""

import json
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import approx
from approx.checkpoints import checkpoint
from approx.checkpoints.atomic_folder import CLAIM
from approx.checkpoints.history import history, read_receipt, trainings
from approx.conversion.convert import convert, revert
from approx.conversion.verify import verify
from approx.errors import ApproxError, Exit
from approx.finetuning.finetune import Healing, _remember, finetune_folder, rehearse
from approx.finetuning.options import FinetuneStage
from approx.finetuning.trainer import Interrupted
from approx.planning.plan import Plan, Rule
from forms import HEDGEHOG
from tiny_classifier import WORDS, tiny_tokenizer
from tiny_decoder import save
from tiny_study import tiny_checkpoint
from tiny_training import stopping, write_sst2
from zoo import tiny


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finetuning")
    tiny_checkpoint(folder / "base")
    convert(folder / "base", folder / "converted", Plan.of("linear", **{**HEDGEHOG, "window": 1}))
    write_sst2(folder)
    return folder


@pytest.fixture(scope="module")
def whole(study, tmp_path_factory) -> bytes:
    """The weights after a training that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "healed"
    finetune_folder(study / "converted", folder, options_of(study, recover=["task"]))
    return (folder / "model.safetensors").read_bytes()


def options_of(study: Path, **more: Any) -> FinetuneStage:
    usual: dict[str, Any] = {"steps": 6, "batch_size": 8, "learning_rate": 1e-2, "evaluate_every": 3}
    return FinetuneStage(task="glue/sst2", data=str(study / "SST-2"), **{**usual, **more})


@pytest.mark.sample(1)
def test_healed_folder_loads_like_any_other_and_records_its_training(study, tmp_path):
    reported: list[tuple[str, int, int]] = []
    done = finetune_folder(
        study / "converted",
        tmp_path / "healed",
        options_of(study, recover=["transfer", "distill", "task"], seed=5),
        progress=lambda *words: reported.append(words),
    )
    steps_reported = [words for words in reported if " | " not in words[0]]
    assert steps_reported == [
        (what, 0, 1)
        for what in (
            "read the data",
            "score before training",
            "score after training",
            "checking padding and causality",
            "writing",
            "comparing the weights",
            "reloading in a fresh process",
        )
    ]
    assert [phase.mode for phase in done.phases] == ["transfer", "distill", "task"]
    assert all(check.passed is not False for check in done.checks)
    names = [check.name for check in done.checks]
    assert any("padding" in name for name in names)
    assert {"trained weights are bit-equal", "reload without approx is bit-equal"} <= set(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["healed"]
    opened = checkpoint.load(tmp_path / "healed")
    before = checkpoint.load(study / "converted")
    steps = history(opened.model.config.approx)
    assert [step.action for step in steps] == ["convert", "finetune"]
    step = trainings(opened.model.config.approx)[0]
    assert (step.recover, step.task, step.steps) == (["transfer", "distill", "task"], "glue/sst2", 18)
    assert step.base.weights_sha256 == before.weights_sha256
    assert (step.exact, step.before, step.after) == (done.exact, done.before, done.after)
    assert None not in (step.exact, step.before, step.after)
    assert (step.measure, step.examples, step.held_out, step.seed) == ("accuracy", 72, 8, 5)
    assert (step.data_sha256, step.teacher) == (done.data_sha256, None)
    assert step.seconds == pytest.approx(sum(phase.seconds for phase in done.phases))
    assert step.options["learning_rate"] == 1e-2
    assert "data" not in step.options
    assert str(tmp_path) not in (tmp_path / "healed" / "config.json").read_text()
    assert str(study) not in (tmp_path / "healed" / "config.json").read_text()
    states = opened.model.state_dict(), before.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])
    receipt = read_receipt(tmp_path / "healed")
    assert receipt is not None
    assert receipt.verified
    assert receipt.errors != (read_receipt(study / "converted") or receipt).errors
    card = (tmp_path / "healed" / "README.md").read_text()
    assert "\n1. Converted from " in card
    assert "\n2. Trained from " in card
    assert "`transfer,distill,task` on glue/sst2, 18 steps" in card
    assert "Trained from" not in (study / "converted" / "README.md").read_text()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "healed")
    assert type(model).__name__ == "ApproxBertForSequenceClassification"
    # And once more: what was trained can be trained again.
    finetune_folder(tmp_path / "healed", tmp_path / "again", options_of(study, recover=["task"]))
    assert len(trainings(checkpoint.load(tmp_path / "again").model.config.approx)) == 2


def test_trained_weights_are_reverted_only_by_force(study, tmp_path):
    assert finetune_folder(
        study / "converted", tmp_path / "healed", options_of(study, recover=["task"], steps=24)
    ).helped
    with pytest.raises(ApproxError, match="trained after its conversion") as caught:
        revert(tmp_path / "healed", tmp_path / "base")
    assert caught.value.exit_code == Exit.REFUSED
    assert not (tmp_path / "base").exists()
    revert(tmp_path / "healed", tmp_path / "base", force=True)
    assert not checkpoint.load(tmp_path / "base").source.converted


def test_a_folder_whose_mechanisms_alone_were_trained_reverts_to_its_base(study, tmp_path):
    finetune_folder(study / "converted", tmp_path / "healed", options_of(study, recover=["transfer"]))
    revert(tmp_path / "healed", tmp_path / "base")
    found, base = (checkpoint.load(folder).model.state_dict() for folder in (tmp_path / "base", study / "base"))
    assert found.keys() == base.keys()
    assert all(torch.equal(found[name], base[name]) for name in base)


def test_an_exact_checkpoint_is_trained_into_a_plain_folder_and_checkpoints_into_the_working_folder(study, tmp_path):
    found: list[str] = []

    def look(what: str, n: int, total: int) -> None:
        if " | " in what and n == 5:
            found.extend(sorted(path.name for path in (tmp_path / "mine" / "0-task").iterdir()))

    how = {"working": tmp_path / "mine", "progress": look}
    done = finetune_folder(study / "base", tmp_path / "trained", options_of(study), **how)
    assert found == ["checkpoint-3"]
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]
    assert done.exact is None
    assert done.recover == ["task"]
    opened = checkpoint.load(tmp_path / "trained")
    assert not opened.source.converted
    assert "approx" not in json.loads((tmp_path / "trained" / "config.json").read_text())
    checkpoint.processor(opened.source)


def test_adapters_leave_no_trace(study, tmp_path):
    pytest.importorskip("peft")
    done = finetune_folder(study / "converted", tmp_path / "healed", options_of(study, recover=["lora", "task"]))
    assert done.recover == ["lora", "task"]
    phase = done.phases[0]
    assert phase.parameters < 0.5 * sum(p.numel() for p in checkpoint.load(study / "converted").model.parameters())
    names = set(checkpoint.load(tmp_path / "healed").model.state_dict())
    assert names == set(checkpoint.load(study / "converted").model.state_dict())


def test_interrupted_training_is_stored_next_to_the_output_and_resumed(study, whole, tmp_path):
    options = options_of(study, recover=["task"])

    with pytest.raises(Interrupted):
        finetune_folder(study / "converted", tmp_path / "healed", options, progress=stopping(4))
    assert [path.name for path in tmp_path.iterdir()] == ["healed.training"]
    with pytest.raises(ApproxError, match="--resume"):
        finetune_folder(study / "converted", tmp_path / "healed", options)
    # What is resumed is not started over, whatever may be replaced.
    steps: list[int] = []
    finetune_folder(
        study / "converted",
        tmp_path / "healed",
        options,
        resume=True,
        force=True,
        progress=lambda what, n, total: steps.append(n) if " | " in what else None,
    )
    assert steps == [5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["healed"]
    assert (tmp_path / "healed" / "model.safetensors").read_bytes() == whole


def test_a_training_killed_after_its_last_step_is_resumed_to_what_it_wrote(study, tmp_path, monkeypatch):
    options = options_of(study, recover=["transfer"])

    class Killed(BaseException):
        pass

    def die(*args: Any) -> None:
        raise Killed

    monkeypatch.setattr("approx.finetuning.finetune.remove", die)
    with pytest.raises(Killed):
        finetune_folder(study / "converted", tmp_path / "healed", options)
    monkeypatch.undo()
    before = (tmp_path / "healed" / "model.safetensors").read_bytes()
    # An earlier or later version looks for this name.
    assert (tmp_path / "healed.training" / "outcome.json").is_file()
    # Another output of that name is neither replaced nor taken for this training's.
    shutil.copytree(tmp_path, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "healed")
    shutil.copytree(study / "converted", tmp_path / "copy" / "healed")
    with pytest.raises(ApproxError, match="exists already") as caught:
        finetune_folder(study / "converted", tmp_path / "copy" / "healed", options, resume=True)
    assert caught.value.exit_code == Exit.REFUSED
    assert (tmp_path / "copy" / "healed.training").is_dir()
    shutil.rmtree(tmp_path / "copy")
    removed: list[str] = []
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **more: (removed.append(path.name), unlink(path, **more)))
    done = finetune_folder(study / "converted", tmp_path / "healed", options, resume=True)
    monkeypatch.undo()
    # Killed once more, it would find the outcome or nothing to go on from.
    assert removed[-4:-1] == ["training.json", "outcome.json", CLAIM]
    assert [phase.mode for phase in done.phases] == ["transfer"]
    assert all(check.passed is not False for check in done.checks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["healed"]
    assert (tmp_path / "healed" / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_refused_options_with_force_keep_the_unfinished_training(study, tmp_path):
    options = options_of(study, recover=["task"])

    with pytest.raises(Interrupted):
        finetune_folder(study / "converted", tmp_path / "healed", options, progress=stopping(4))
    with pytest.raises(ApproxError, match="plain text"):
        finetune_folder(study / "converted", tmp_path / "healed", options_of(study, recover=["clm"]), force=True)
    assert list((tmp_path / "healed.training").glob("*/checkpoint-4"))
    # Earlier versions wrote no claim.
    (tmp_path / "healed.training" / CLAIM).unlink()
    for _ in range(2):
        assert finetune_folder(study / "converted", tmp_path / "healed", options, force=True).phases
    assert sorted(path.name for path in tmp_path.iterdir()) == ["healed"]


def test_full_disk_ends_training_with_one_line_and_resumes_from_the_saved_state(study, whole, tmp_path):
    options, limits = options_of(study, recover=["task"]), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(what: str, n: int, total: int) -> None:
        if " | " in what and n == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    try:
        with pytest.raises(ApproxError, match="the state after step 3 is kept") as caught:
            finetune_folder(study / "converted", tmp_path / "healed", options, progress=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    finetune_folder(study / "converted", tmp_path / "healed", options, resume=True)
    assert (tmp_path / "healed" / "model.safetensors").read_bytes() == whole


def test_a_teacher_has_to_be_exact_of_the_same_kind_and_to_read_the_same_tokens(study, tmp_path):
    distill = options_of(study, recover=["distill"])
    shutil.copytree(study / "base", tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "other")
    for teacher, options, message in [
        (study / "converted", distill, "has to be an exact"),
        (tmp_path / "other", distill, "differ"),
        (study / "base", options_of(study, recover=["task"]), "only with the mode 'distill'"),
    ]:
        with pytest.raises(ApproxError, match=message):
            finetune_folder(study / "converted", tmp_path / "healed", options, teacher=str(teacher))
    # The base itself has nothing to teach on sentences on which the mechanisms are nearly exact.
    assert finetune_folder(study / "base", tmp_path / "wiser", options_of(study, steps=40)).helped
    longer = options_of(study, recover=["distill"], steps=40)
    done = finetune_folder(study / "converted", tmp_path / "healed", longer, teacher=str(tmp_path / "wiser"))
    step = trainings(checkpoint.load(tmp_path / "healed").model.config.approx)[0]
    assert step.teacher is not None
    assert (step.teacher.name, done.helped) == ("wiser", True)
    # Its weights are not the base's any more.
    with pytest.raises(ApproxError, match="Name it with --teacher"):
        finetune_folder(tmp_path / "healed", tmp_path / "again", distill)


def test_opens_both_checkpoints_with_the_same_arguments(study, tmp_path, monkeypatch):
    opened: list[Any] = []
    original = checkpoint.load

    def load(name: Any, **more: Any) -> Any:
        opened.append((str(name), more))
        return original(name)

    monkeypatch.setattr("approx.finetuning.finetune.checkpoint.load", load)
    options, teacher = options_of(study, recover=["distill"], steps=1), str(study / "base")
    for flag in (True, False):
        ways = {"offline": flag, "merge_adapter": flag, "device": "cpu" if flag else "cuda"}
        rehearse(study / "converted", options, teacher=teacher, revision="a1", **ways)

        def stop(*words: Any) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            finetune_folder(
                study / "converted", tmp_path / "out", options, teacher=teacher, revision="a1", progress=stop, **ways
            )
        # A revision is that of the checkpoint, not of its teacher.
        both = [(str(study / "converted"), {"revision": "a1", **ways}), (teacher, ways)]
        assert opened == [*both, *both]
        opened.clear()


def test_refused_training_leaves_no_files(study, tmp_path):
    for options, message in [
        (options_of(study, split="dev"), "scores are reported on"),
        (options_of(study, recover=["clm"]), "plain text"),
        (options_of(study, recover=["lora", "task"], lora={"targets": ["qeury"]}), "not linear layers"),
    ]:
        with pytest.raises(ApproxError, match=message):
            finetune_folder(study / "converted", tmp_path / "healed", options)
        assert not any(tmp_path.iterdir())
    with pytest.raises(ApproxError, match="lies inside the input checkpoint"):
        finetune_folder(study / "converted", study / "converted" / "healed", options_of(study))
    assert not (study / "converted" / "healed").exists()


def test_a_checkpoint_with_code_of_others_is_refused_before_it_is_trained(study, tmp_path):
    shutil.copytree(study / "base", tmp_path / "own")
    reader = tmp_path / "own" / "tokenizer_config.json"
    reader.write_text(
        json.dumps(
            {
                **json.loads(reader.read_text()),
                "tokenizer_class": "TheirTokenizer",
                "auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]},
            }
        )
    )
    for train in (
        lambda: rehearse(tmp_path / "own", options_of(study)),
        lambda: finetune_folder(tmp_path / "own", tmp_path / "healed", options_of(study)),
    ):
        with pytest.raises(ApproxError, match="needs code that transformers") as caught:
            train()
        assert caught.value.exit_code == Exit.UNSUPPORTED
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_checks_folders_and_sharding_before_it_opens_the_checkpoint(study, tmp_path, monkeypatch):
    options, nowhere = options_of(study), tmp_path / "nowhere"
    (tmp_path / "healed").mkdir()
    (tmp_path / "healed" / "config.json").write_text("{}")
    with pytest.raises(ApproxError, match="exists already") as caught:
        finetune_folder(nowhere, tmp_path / "healed", options)
    assert caught.value.exit_code == Exit.REFUSED
    # A folder of the user that is in the way of the checkpoints, wherever those are wanted.
    for out, working in ((tmp_path / "other", None), (tmp_path / "more", tmp_path / "mine")):
        mine = working or out.with_name("other.training")
        mine.mkdir()
        (mine / "notes.txt").write_text("mine")
        with pytest.raises(
            ApproxError, match=f"{mine.name} exists and is not a training of approx: it holds notes.txt"
        ) as caught:
            finetune_folder(nowhere, out, options, working=working)
        assert caught.value.exit_code == Exit.REFUSED
    with pytest.raises(ApproxError, match="cannot be written"):
        finetune_folder(nowhere, Path("/proc/self/out"), options)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for train in (lambda: rehearse(nowhere, options), lambda: finetune_folder(nowhere, tmp_path / "new", options)):
        with pytest.raises(ApproxError, match="FSDP is requested") as caught:
            train()
        assert caught.value.exit_code == Exit.UNSUPPORTED
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "new").exists()


def test_the_text_that_was_trained_on_is_not_named_in_the_checkpoint(study):
    opened = checkpoint.load(study / "converted")
    done = Healing(
        ["clm"],
        [],
        "perplexity",
        3.0,
        5.0,
        4.0,
        2,
        18,
        "abc",
        {"text": ["private/diary.txt"], "data": "private", "steps": 1},
        1.0,
        [],
    )
    _remember(opened, FinetuneStage(), done, None)
    step = trainings(opened.model.config.approx)[0]
    assert (step.options, step.seconds, step.steps) == ({"steps": 1}, 0.0, 0)
    assert (step.measure, step.exact, step.before, step.after) == ("perplexity", 3.0, 5.0, 4.0)


def test_a_rehearsal_measures_a_step_of_each_mode_and_changes_nothing(study):
    before = (study / "converted" / "model.safetensors").read_bytes()
    # Nothing but adapters is trained here, and a dry run must find something to train all the same.
    assert rehearse(study / "converted", options_of(study, recover=["lora", "distill"])).phases[0].trained > 0
    planned = rehearse(study / "converted", options_of(study, recover=["transfer", "lora", "task"], time_budget="1h"))
    assert [phase.mode for phase in planned.phases] == ["transfer", "task"]
    transfer, task = planned.phases
    assert transfer.trained == 2052
    assert 0 < task.trained < task.parameters
    assert all(phase.seconds > 0 and phase.memory_mb > 0 for phase in planned.phases)
    assert (planned.examples, planned.held_out, planned.measure) == (72, 8, "accuracy")
    assert (planned.name, planned.approximated, planned.notes) == (str(study / "converted"), 1.0, [])
    assert (study / "converted" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in study.iterdir()) == ["SST-2", "base", "converted"]


def test_a_loaded_model_is_trained_in_place_without_any_folder(study):
    model = AutoModelForSequenceClassification.from_pretrained(study / "converted")
    options = options_of(study).model_dump(exclude_defaults=True)
    done = approx.finetune(model, processor=tiny_tokenizer(), **options)
    assert done.recover == ["transfer", "distill"]
    with pytest.raises(ApproxError, match="tokenizer or processor"):
        approx.finetune(model, **options)


@pytest.mark.slow
def test_converts_heals_and_reverts_a_decoder_that_forgets_next_to_exact_layers(tmp_path):
    torch.manual_seed(0)
    base = tiny("LlamaForCausalLM", vocab_size=len(WORDS), num_hidden_layers=3, initializer_range=0.3)
    save(base, tmp_path / "base")
    text = tmp_path / "texts.txt"
    text.write_text("\n".join("the film is good and the book is bad " * 4 for _ in range(40)), encoding="utf-8")
    exact_keys = {"window": 3, "sinks": 1}
    rules = (
        Rule("linear", "1", {"update": "delta", **exact_keys}),
        Rule("linear", "2", {"feature_map": "gated", **exact_keys}),
    )
    convert(tmp_path / "base", tmp_path / "converted", Plan(rules))
    options = FinetuneStage(
        text=[str(text)], length=32, recover=["transfer", "distill"], steps=4, batch_size=4, evaluate_every=2
    )
    done = finetune_folder(tmp_path / "converted", tmp_path / "healed", options)
    assert [phase.mode for phase in done.phases] == ["transfer", "distill"]
    assert {check.name for check in done.checks if check.passed} >= {
        "trained weights are bit-equal",
        "reload without approx is bit-equal",
    }
    before, after = (checkpoint.load(tmp_path / name).model.state_dict() for name in ("converted", "healed"))
    learned = {name.rpartition(".")[-1] for name in after if not torch.equal(before[name], after[name])}
    assert {"decay", "rate", "query_gate", "query_map", "key_map", "key_gate"} <= learned
    assert False not in {check.passed for check in verify(tmp_path / "healed").checks}
    revert(tmp_path / "converted", tmp_path / "reverted")
    again = checkpoint.load(tmp_path / "reverted").model.state_dict()
    assert all(torch.equal(again[name], x) for name, x in base.state_dict().items())
