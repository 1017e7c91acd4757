"""`approx finetune` as it is typed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import BertForSequenceClassification

import killable
from conftest import ROOT
from forms import HEDGEHOG
from tiny_classifier import tiny_tokenizer
from tiny_study import tiny_checkpoint

from .conftest import call

ROWS = [f"{word} the film is\t{label}" for word, label in [("good", 1), ("bad", 0), ("fine", 1), ("dull", 0)] * 20]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    tiny_checkpoint(folder / "base")
    answer = call(
        "convert",
        folder / "base",
        "-o",
        folder / "converted",
        "-m",
        "linear",
        "--set",
        "feature_map=hedgehog",
        "--set",
        "gate=false",
    )
    assert answer.code == 0, answer.err
    (folder / "SST-2").mkdir()
    for split in ("train", "dev"):
        text = "\n".join(["sentence\tlabel", *ROWS]) + "\n"
        (folder / "SST-2" / f"{split}.tsv").write_text(text, encoding="utf-8")
    return folder


def words_of(study: Path, *more: object) -> list[str]:
    usual = ["--task", "glue/sst2", "--data", study / "SST-2", "--steps", "6", "--batch-size", "8", "--device", "cpu"]
    return ["finetune", str(study / "converted"), *map(str, [*usual, *more])]


def test_trains_and_reports_the_changes(study, tmp_path):
    answer = call(*words_of(study, "-o", tmp_path / "healed", "--json"))
    assert answer.code == 0, answer.err
    assert [phase["mode"] for phase in answer.json["phases"]] == ["transfer", "distill"]
    answer = call(*words_of(study, "-o", tmp_path / "healed", "--recover", "task", "--force"))
    assert answer.code == 0, answer.err
    assert "accuracy on 8 held-out training examples" in answer.out
    assert "exact attention, before training" in answer.out
    assert "finetune task | " in answer.err
    assert "rate" in answer.err
    assert call("inspect", tmp_path / "healed").out.count("Made by:") == 2
    scored = call(
        "evaluate", tmp_path / "healed", "--against", study / "base", "--task", "glue/sst2", "--data", study / "SST-2"
    )
    assert scored.code == 0, scored.err


def test_prints_how_far_each_layer_moves_the_outputs_and_which_stay_exact(study, tmp_path):
    # Weights so large that attention matters.
    model = BertForSequenceClassification.from_pretrained(study / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    converted = tmp_path / "converted"
    assert call("convert", tmp_path / "base", "-o", converted, "-m", "local", "--set", "left=0").code == 0
    words = ["finetune", converted, *words_of(study, "--dry-run", "--recover", "task", "--keep-exact")[2:]]
    answer = call(*words, "1")
    assert answer.code == 0, answer.err
    assert "moves the outputs by (nats)" in answer.out
    assert len(re.findall(r"^ [01] +local ", answer.out, re.M)) == 2
    assert re.search(r"Layer [01] stays exact: converted alone, it moves the outputs by", answer.out)
    answer = call(*words, "2")
    assert answer.code == 2
    assert "Keep at most 1" in answer.err


def test_a_mode_has_settings_of_its_own(study):
    words = ["--learning-rate", "0.5", "--transfer", "learning_rate=0.03", "--transfer", "steps=7", "--no-bfloat16"]
    answer = call(*words_of(study, "--dry-run", *words, "--distill", "learning_rate=0.25", "--distill", "hidden=0"))
    assert answer.code == 0, answer.err
    rows = {
        row.split()[0]: row.split() for row in answer.out.splitlines() if row.split()[:1] in (["transfer"], ["distill"])
    }
    assert (rows["transfer"][1], rows["transfer"][3]) == ("7", "3.0e-02")
    assert rows["distill"][3] == "2.5e-01"


def test_a_dry_run_writes_nothing(study, tmp_path):
    answer = call(
        *words_of(study, "--dry-run", "--recover", "lora,task", "--lora", "rank=2", "--lora", "targets=query,value")
    )
    assert answer.code == 0, answer.err
    assert "Nothing was written" in answer.out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--steps", "0"], 2, "--steps: a finite number of at least 1 is needed, found 0"),
        (["--epochs", "0"], 2, "--epochs: a finite number above 0.0 is needed, found 0.0"),
        (["--max-steps", "3"], 2, "--steps and its earlier name --max-steps were both given"),
        (["--distill", "hidden=x"], 2, "--distill.hidden: a number is needed, found 'x'"),
        (["--lora", "targets=query,", "--lora", "rank=0"], 2, "--lora.rank: a finite number of at least 1"),
        (["--recover", "heal"], 2, "'heal'"),
        (["--recover", "transfr"], 2, "Did you mean 'transfer'?"),
        (["--recover", "lora"], 2, "'lora' comes last"),
        (["--time-budget", "half an hour"], 2, "e.g. 90s, 30m or 2h"),
        (["--budget", "0.5"], 2, "loss<=POINTS"),
        (["--learning-rate", "0"], 2, "above 0"),
        (["--distill", "hiden=0"], 2, "Did you mean 'hidden'?"),
        (["--split", "dev"], 8, "scores are reported on"),
        (["--data", "nowhere"], 5, "nowhere"),
        (["--text", "a.txt"], 2, "both were given"),
        (["--transfer", "learning_rate=0"], 2, "--transfer.learning_rate: a finite number above 0"),
        (["--transfer", "hidden=1"], 2, "--transfer"),
        (["--warm-up", "1"], 2, "--warm-up: a finite number below 1"),
        (["--teacher", "base", "--recover", "task"], 2, "only with the mode 'distill'"),
        (["--resume"], 5, "nothing to resume"),
        (
            ["--penalty", "1", "--recover", "task", "--train", "none"],
            2,
            "--train: one of all, attention, head is needed, found 'none'",
        ),
    ],
)
def test_refuses_impossible_trainings_in_one_line_and_leaves_no_files(study, tmp_path, more, code, message):
    answer = call(*words_of(study, "-o", tmp_path / "healed", *more))
    assert (answer.code, message in answer.err) == (code, True), answer.err
    assert answer.err.count("error: ") == 1
    assert not any(tmp_path.iterdir())


def test_names_missing_output_and_examples(study):
    assert "Name it with -o" in call("finetune", study / "converted", "--task", "glue/sst2").err
    answer = call("finetune", study / "converted", "-o", "healed")
    assert (answer.code, "neither was given" in answer.err) == (2, True)


@pytest.mark.parametrize("more", [["-o", "healed"], ["--dry-run"]])
def test_fsdp_is_refused_before_anything_is_read(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    answer = call("finetune", tmp_path / "absent", "--task", "glue/sst2", *more)
    assert (answer.code, answer.err.count("error: ")) == (3, 1), answer.err
    for words in ("FSDP is requested", "DDP", "torchrun --nproc-per-node 3 --no-python approx finetune"):
        assert words in answer.err
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert "FSDP" not in call("finetune", tmp_path / "absent", "--task", "glue/sst2", *more).err


@pytest.mark.slow
def test_accelerate_launch_asks_for_fsdp_by_the_variable_that_is_refused(study, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--num_processes", "2", "--dynamo_backend", "no", "--use_fsdp", "--fsdp_version", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run(
        [*launch, ROOT / "cli.py", *words_of(study, "-o", tmp_path / "healed")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    assert "FSDP is requested" in done.stderr, done.stderr[-3000:]
    assert "--nproc-per-node 2 " in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_resumes_to_the_same_weights_after_a_kill_at_any_moment(study, tmp_path):
    """SIGKILL in the middle of steps, of a checkpoint, of a mode; then Ctrl-C, which ends in a line of its own."""
    words = words_of(study, "--evaluate-every", "2")
    process = killable.start(*words, "-o", tmp_path / "whole", errors=tmp_path / "errors")
    process.join(300)
    assert process.exitcode == 0, (tmp_path / "errors").read_text()
    working = tmp_path / "healed.training"
    places = [
        "0-transfer/checkpoint-2",
        "0-transfer/checkpoint-4/complete.json",
        "1-distill/checkpoint-2/model.safetensors",
    ]
    for number, place in enumerate(places):
        resume = ["--resume"] if number else []
        process = killable.start(*words, "-o", tmp_path / "healed", *resume, errors=tmp_path / "errors")
        while not (working / place).exists() and process.is_alive():
            time.sleep(0.002)
        assert killable.ended(process, signal.SIGKILL) == -signal.SIGKILL, (tmp_path / "errors").read_text()
        assert not (tmp_path / "healed").exists()
    process = killable.start(*words, "-o", tmp_path / "healed", "--resume", errors=tmp_path / "errors")
    while not (working / "1-distill" / "checkpoint-4").exists() and process.is_alive():
        time.sleep(0.002)
    if process.is_alive():
        assert killable.ended(process, signal.SIGINT) == 130, (tmp_path / "errors").read_text()
        assert "run the same command with --resume" in (tmp_path / "errors").read_text()
    answer = call(*words, "-o", tmp_path / "healed", "--resume")
    assert answer.code == 0, answer.err
    assert not working.exists()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("healed", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_two_processes_reach_the_loss_of_one(study, tmp_path):
    # Dropout draws other numbers in other processes.
    import torch
    from transformers import AutoModelForSequenceClassification

    from approx.conversion.convert import convert
    from approx.planning.plan import Plan

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(study / "base")
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    model.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).write_bytes((study / "base" / name).read_bytes())
    convert(tmp_path / "base", tmp_path / "converted", Plan.of("linear", **HEDGEHOG))
    words = [*words_of(study, "--json", "--evaluate-every", "3"), "-o"]
    words[1] = str(tmp_path / "converted")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    curves = []
    for processes in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        done = subprocess.run(
            [*command, ROOT / "cli.py", *words, tmp_path / f"healed{processes}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answer = json.loads(done.stdout)
        curves.append(
            [
                [point[key] for key in ("loss", "validation") if key in point]
                for phase in answer["phases"]
                for point in phase["curve"]
            ]
        )
    one, two = ([x for point in curve for x in point] for curve in curves)
    assert len(one) == len(two) > 12
    assert two == pytest.approx(one, abs=1e-5)
