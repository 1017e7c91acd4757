import json

import pyarrow.parquet
import pytest
import torch

from approx import api
from approx.errors import Exit
from approx.evaluation import record
from approx.evaluation.record import Approximated
from approx.measuring import products
from approx.tasks.metrics import METRICS
from tiny_study import tiny_checkpoint

from .conftest import call

QUICK = ("--rounds", "3", "--seconds", "0")


def test_evaluate_compares_with_the_base_and_keeps_every_output(base, converted, data, tmp_path):
    scored = ("evaluate", converted, "--against", base, "--task", "glue/sst2")
    answer = call(*scored, "--data", data, "-o", "my records/r.json", "--margin", "0.5")
    assert answer.code == 0, answer.err
    assert "con verted" in answer.out
    assert "24 examples, a subset" in answer.out
    made = record.load(tmp_path / "my records" / "r.json")
    (entry,) = made.quality
    assert entry.variants[0].margin == 0.005
    assert made.variants[0].verified
    table = pyarrow.parquet.read_table(tmp_path / "my records" / str(entry.outputs))
    assert table.num_rows == 24
    # The parent of the task's folder works too, and nothing is replaced without --force.
    assert call(*scored, "--data", data.parent, "--limit", "4", "--json").json["quality"][0]["examples"] == 4
    assert call(*scored, "--data", data, "-o", "my records/r.json").code == 8
    (tmp_path / "my records" / "r.json").unlink()
    assert call(*scored, "--data", data, "-o", "my records/r.json").code == 8
    assert pyarrow.parquet.read_table(tmp_path / "my records" / str(entry.outputs)) == table


def test_compares_a_converted_checkpoint_with_its_exact_self_and_a_stock_one_with_nothing(base, converted, data):
    task = ("--task", "glue/sst2", "--data", data, "--json")
    alone, itself = call("evaluate", base, *task).json, call("evaluate", converted, *task).json
    assert alone["quality"][0]["variants"] == []
    assert itself["checkpoint"]["name"].endswith("con verted with exact attention")
    assert [row["name"] for row in itself["quality"][0]["variants"]] == ["con verted"]
    # The base is restored bit by bit.
    assert itself["quality"][0]["base"] == alone["quality"][0]["base"]


@pytest.fixture
def any_score_is_better_than_chance(monkeypatch):
    """Random weights are at chance, where no loss could show."""
    monkeypatch.setattr(METRICS["accuracy"], "chance", lambda labels: None)


def test_a_base_at_chance_is_not_tested(base, converted, data):
    words = ("evaluate", converted, "--against", base, "--task", "glue/sst2", "--data", data, "--margin", "100")
    assert call(*words, "--json").json["quality"][0]["variants"][0]["verdict"] == "the base is at chance"
    failed = call(*words, "--fail-over")
    assert failed.code == 7
    assert "is 'the base is at chance', and --fail-over accepts only a tested loss" in failed.err


def test_fail_over_is_for_losses_beyond_the_margin(base, converted, data, any_score_is_better_than_chance):
    task = ("--task", "glue/sst2", "--data", data, "--fail-over")
    assert call("evaluate", converted, *task, "--margin", "100").code == 0
    alone = call("evaluate", base, *task)
    assert alone.code == 2
    assert "--against" in alone.err


def test_a_loss_beyond_the_margin_exits_with_7(base, data, tmp_path, any_score_is_better_than_chance):
    """The worst variant: with its head negated, it is wrong on every example that the base gets right."""
    import torch
    import transformers

    right = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    with torch.no_grad():
        right.classifier.weight.zero_()
        right.classifier.bias.copy_(torch.tensor([1.0, 0.0]))
    wrong = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    wrong.load_state_dict({**right.state_dict(), "classifier.bias": -right.classifier.bias})
    for name, model in (("right", right), ("wrong", wrong)):
        model.save_pretrained(tmp_path / name)
        transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / name)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "the film\t0\n" * 30, encoding="utf-8")
    words = ("evaluate", "wrong", "--against", "right", "--task", "glue/sst2", "--data", "dev.tsv", "--margin", "5")
    assert call(*words).code == 0
    answer = call(*words, "--fail-over", "--json")
    assert answer.code == 7
    assert answer.err.splitlines()[-1] == "error: The loss on glue/sst2 is beyond the margin of 5.0 points."


def test_no_loss_on_inputs_that_are_exact_is_not_tested(base, data, tmp_path, any_score_is_better_than_chance):
    """With a window over every whole sentence, the converted model equals the base."""
    wide = ("-m", "local", "--set", "left=20", "--set", "right=20")
    assert call("convert", base, "-o", "wide", *wide).code == 0
    said = "not tested: exact on 100 % of these inputs"
    words = ("evaluate", "wide", "--against", base, "--task", "glue/sst2", "--data", data, "--margin", "100")
    shown = call(*words, "-o", "r.json")
    assert shown.code == 0
    assert said in shown.out
    (entry,) = record.load(tmp_path / "r.json").quality[0].variants
    assert (entry.verdict, entry.approximated) == (said, Approximated(examples=0, tokens=0.0, pairs=0.0))
    assert call(*words, "--json").json["quality"][0]["variants"][0]["verdict"] == said
    failed = call(*words, "--fail-over")
    assert failed.code == 7
    assert said in failed.err.splitlines()[-1]
    assert call(*words, "--fail-over", "--allow-untested").code == 0
    alone = call(*words, "--allow-untested")
    assert alone.code == 2
    assert "--fail-over" in alone.err
    assert call("report", "r.json", "-o", "page").code == 0
    for name in ("index.html", "report.md", "quality.csv", "report.json"):
        assert said in (tmp_path / "page" / name).read_text("utf-8"), name


def test_counts_the_approximated_share_by_length(base, tmp_path, any_score_is_better_than_chance):
    """With a window of 4 tokens to each side, sentences of 6 or more tokens are approximated."""
    assert call("convert", base, "-o", "narrow", "-m", "local", "--set", "left=4", "--set", "right=4").code == 0
    sentences = ["good " * words for words in (1, 2, 3, 3, 4, 5, 18, 1, 1, 1)]
    rows = [f"{sentence}\t{row % 2}" for row, sentence in enumerate(sentences)]
    (tmp_path / "dev.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    words = ("evaluate", "narrow", "--against", base, "--task", "glue/sst2", "--data", "dev.tsv", "--margin", "100")
    entry = call(*words, "--json").json["quality"][0]["variants"][0]
    # With two special tokens each: 6, 7 and 20 of 59.
    pairs = entry["approximated"].pop("pairs")
    assert entry["approximated"] == {"examples": 3, "tokens": 33 / 59}
    # Beyond a distance of 4, of n tokens (n - 5)(n - 4) pairs are left out; seven inputs are exact.
    assert pairs == pytest.approx(sum((n - 5) * (n - 4) / n**2 for n in (6, 7, 20)) / 10)
    assert entry["verdict"] == "no loss"
    assert "30 % of inputs" in call(*words).out


def test_a_base_with_another_tokenizer_is_refused(converted, data, tmp_path):
    other = tiny_checkpoint(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["film"], vocabulary["good"] = vocabulary["good"], vocabulary["film"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    answer = call("evaluate", converted, "--against", other, "--task", "glue/sst2", "--data", data)
    assert answer.code == 2
    assert "The tokenizers of con verted and exact differ" in answer.err


def test_inputs_beyond_the_positions_are_refused_or_cut_and_counted(base, tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "good " * 60 + "\t1\nbad\t0\n", encoding="utf-8")
    words = ("evaluate", base, "--task", "glue/sst2", "--data", "dev.tsv")
    answer = call(*words)
    assert answer.code == 2
    assert "62 tokens, the limit is 32" in answer.err
    assert "1 of them truncated" in call(*words, "--truncate").out
    assert "2 of them truncated; read to 2 tokens" in call(*words, "--max-length", "2").out
    absurd = call(*words, "--max-length", "50")
    assert absurd.code == 2
    assert "the limit is 32 (the positions of exact)" in absurd.err
    assert "with --max-length 32" in absurd.err


def test_a_base_with_fewer_positions_is_extended_or_the_inputs_of_both_are_cut(base, tmp_path):
    """With attention that is exact on these inputs, the extended base is the converted model."""
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "good " * 60 + "\t1\nbad\t0\n", encoding="utf-8")
    convert = ("convert", base, "-o", "long", "-m", "local", "--set", "left=99", "--set", "right=99")
    assert call(*convert, "--max-length", "64").code == 0
    words = ("evaluate", "long", "--against", base, "--task", "glue/sst2", "--data", "dev.tsv")
    answer = call(*words)
    assert answer.code == 2
    assert "has 62 tokens, the limit is 32 (the positions of exact)" in answer.err
    assert "--extend-base" in answer.err
    assert "--truncate" in answer.err
    assert call(*words, "--extend-base", "-o", "extended.json").code == 0
    made = record.load(tmp_path / "extended.json")
    assert made.quality[0].notes == ["positions of exact extended from 32 to 64"]
    assert (made.quality[0].truncated, made.checkpoint.positions) == (0, 32)
    assert made.quality[0].variants[0].scores == made.quality[0].base.scores
    outputs = pyarrow.parquet.read_table(tmp_path / "extended.parquet").to_pylist()
    assert all(row["prediction/exact"] == row["prediction/long"] for row in outputs)
    assert call(*words, "--max-length", "16", "-o", "cut.json").code == 0
    cut = record.load(tmp_path / "cut.json").quality[0]
    assert (cut.truncated, cut.notes) == (1, ["read to 16 tokens"])
    needless = call("evaluate", "long", "--task", "glue/sst2", "--data", "dev.tsv", "--extend-base")
    assert needless.code == 2
    assert "Leave out --extend-base" in needless.err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_evaluates_in_sixteen_bits(converted, data, dtype):
    answer = call("evaluate", converted, "--task", "glue/sst2", "--data", data, "--dtype", dtype)
    assert answer.code == 0, answer.err


def test_fast_products_apply_to_base_and_converted_and_are_recorded(converted, data, tmp_path, monkeypatch):
    monkeypatch.setattr(products, "obstacle", lambda device="cpu", dtype="float32": None)
    seen, forward = [], torch.nn.Linear.forward
    monkeypatch.setattr(
        torch.nn.Linear, "forward", lambda *arguments: seen.append(products._switch()) or forward(*arguments)
    )
    words = ("evaluate", converted, "--task", "glue/sst2", "--data", data, "--fresh")
    assert call(*words, "-o", "plain.json").code == 0
    assert set(seen) == {"none"}
    seen.clear()
    answer = call(*words, "--fast-products", "-o", "fast.json")
    assert answer.code == 0, answer.err
    assert set(seen) == {"bf16"}
    assert "fast float32 products" in " ".join(answer.out.split())
    for name, fast in (("plain", False), ("fast", True)):
        assert record.load(tmp_path / f"{name}.json").quality[0].fast_products is fast
    seen.clear()
    answer = call("bench", converted, "--lengths", "8", *QUICK, "--fast-products", "-o", "speed.json")
    assert answer.code == 0, answer.err
    assert set(seen) == {"bf16"}
    assert "fast products" in " ".join(answer.out.split())
    assert record.load(tmp_path / "speed.json").speed[0].fast_products is True
    assert products._switch() == "none"


@pytest.mark.parametrize("command", [("evaluate",), ("bench", "--lengths", "8")], ids=["evaluate", "bench"])
def test_fast_products_that_cannot_help_are_refused(command, base, data):
    task = ("--task", "glue/sst2", "--data", data)
    answer = call(*command, base, *task, "--dtype", "bfloat16", "--fast-products")
    assert answer.code == Exit.UNSUPPORTED
    assert "the dtype is bfloat16; they work in float32 only" in " ".join(answer.err.split())


def test_bench_times_a_stock_checkpoint_against_no_attention(base):
    answer = call("bench", base, "--lengths", "8", *QUICK)
    assert answer.code == 0, answer.err
    assert "attention-free" in answer.out
    assert "synthetic inputs, float32 on cpu" in answer.out


def test_bench_times_a_converted_checkpoint_on_texts_and_beyond_its_positions(converted, data, tmp_path):
    words = (
        "bench",
        converted,
        "--lengths",
        "8,48",
        "--batch-size",
        "2",
        "--task",
        "glue/sst2",
        "--data",
        data,
        *QUICK,
    )
    refused = call(*words)
    assert refused.code == 2
    assert "--max-length 48" in refused.err
    assert call(*words, "--max-length", "48", "-o", "s.json").code == 0
    made = record.load(tmp_path / "s.json")
    assert [(row.batch, row.length, row.inputs) for row in made.speed] == [(2, 8, "real"), (2, 48, "real")]
    assert [row.name for row in made.speed[0].variants] == ["con verted"]


def test_records_become_one_report(base, converted, data, tmp_path):
    assert call("evaluate", converted, "--task", "glue/sst2", "--data", data, "-o", "q.json").code == 0
    assert call("bench", converted, "--lengths", "8", *QUICK, "-o", "s.json").code == 0
    answer = call("report", "q.json", "s.json", "-o", "the report", "--json")
    assert answer.code == 0, answer.err
    assert "the report/index.html" in answer.json["files"]
    page = (tmp_path / "the report" / "index.html").read_text("utf-8")
    assert "Speed of con verted" in page
    assert "con verted on glue/sst2" in page
    assert page.count("<article") == 1
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{", encoding="utf-8")
    assert call("report", "q.json", damaged, "-o", "another").code == 5
    assert not (tmp_path / "another").exists()


def test_two_records_are_compared_and_a_folder_stands_for_its_record(base, converted, data, tmp_path):
    (tmp_path / "run").mkdir()
    assert call("evaluate", converted, "--task", "glue/sst2", "--data", data, "-o", "run/record.json").code == 0
    assert call("evaluate", converted, "--task", "glue/sst2", "--data", data, "--seed", "3", "-o", "b.json").code == 0
    shown = call("compare", "run", "b.json")
    assert shown.code == 0, shown.err
    assert ["seed", "0", "3"] in [line.split() for line in shown.out.splitlines()]
    assert "glue/sst2, dev: accuracy" in shown.out
    data = call("compare", "run", "b.json", "--json").json
    assert (data["differences"], data["quality"][0]["verdict"]) == ([["seed", "0", "3"]], "no clear difference")
    nothing = call("compare", "run", tmp_path)
    assert nothing.code == 5
    assert "no record.json" in nothing.err


@pytest.mark.parametrize("written", [True, False])
def test_ctrl_c_keeps_the_lengths_that_were_timed(base, tmp_path, monkeypatch, written):
    whole = api.measure_speed

    def interrupted(*arguments, **how):
        yield next(whole(*arguments, **how))
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "measure_speed", interrupted)
    output = ("-o", "b.json") if written else ()
    answer = call("bench", base, "--lengths", "8,16", *QUICK, *output)
    assert answer.code == 130
    if written:
        assert [row.length for row in record.load(tmp_path / "b.json").speed] == [8]
        assert "the record in b.json holds the lengths 8" in answer.err
    else:
        assert "after the lengths 8; with -o FILE" in answer.err
