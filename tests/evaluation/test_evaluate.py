"""Base and converted models get the same tokens in the same batches, and invalid inputs are errors."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers

from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, evaluate, predict, prepare
from approx.evaluation.inputs import _check_tokens
from approx.evaluation.options import EvaluateOptions
from approx.evaluation.quality import compare
from approx.tasks import Example, Split, open_task
from approx.tasks.metrics import METRICS
from tiny_classifier import WORDS, tiny_model, tiny_tokenizer
from typed import known

SST2 = open_task("glue/sst2")


@pytest.fixture
def data(tmp_path) -> Path:
    """Sixty short reviews of 1 to 20 words, in no order of length."""
    generator = np.random.default_rng(0)
    rows = [f"{' '.join(generator.choice(WORDS[4:], size=generator.integers(1, 21)))}\t{row % 2}" for row in range(60)]
    (tmp_path / "dev.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return tmp_path


def labelled(labels: list, groups: list[str] | None = None) -> list[Example]:
    """Examples with labels and groups but no inputs."""
    return [Example(str(row), {}, label, groups[row] if groups else None) for row, label in enumerate(labels)]


def subjects(*models: torch.nn.Module) -> dict[str, Subject]:
    names = ["exact", "noisy", "noisier"]
    return {name: Subject(name, model, tiny_tokenizer()) for name, model in zip(names, models, strict=False)}


def noisy(model: torch.nn.Module, amount: float) -> torch.nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(amount * torch.randn_like(parameter))
    return other


def refused(message: str, exit_code: Exit, call: Callable[[], object]) -> None:
    with pytest.raises(ApproxError, match=message) as caught:
        call()
    assert caught.value.exit_code == exit_code


def test_entry_fills_every_field_of_the_record(data, tmp_path, monkeypatch):
    # Of random weights no loss could show.
    monkeypatch.setattr(METRICS["accuracy"], "chance", lambda labels: None)
    base, seen = tiny_model(2), []
    models = subjects(base, noisy(base, 0.1), copy.deepcopy(base))
    path = tmp_path / "outputs.parquet"
    options = EvaluateOptions(batch_size=8, margin=1.0)
    entry = evaluate(models, SST2, options, data=data, progress=lambda *counts: seen.append(counts), outputs=path)
    assert (entry.task, entry.split, entry.metric, entry.examples) == ("glue/sst2", "dev", "accuracy", 60)
    assert (entry.subset, entry.truncated, entry.outputs) == (True, 0, "outputs.parquet")
    assert seen[0] == (8, 180)
    assert seen[-1] == (180, 180)
    assert seen == sorted(seen)

    outputs = pyarrow.parquet.read_table(path).to_pydict()
    assert outputs["id"] == [f"dev-{row}" for row in range(60)]
    right = {name: np.equal(outputs[f"prediction/{name}"], outputs["label"]) for name in ("exact", "noisy", "noisier")}
    assert entry.base.scores == {"accuracy": pytest.approx(right["exact"].mean())}
    changed, same = entry.variants
    assert changed.difference == pytest.approx(right["noisy"].mean() - right["exact"].mean())
    assert changed.test == "exact McNemar"
    assert (same.name, same.difference, same.p_value, same.verdict) == ("noisier", 0.0, 1.0, "inconclusive")
    assert known(same.needed_examples) > 60
    assert [(part.from_, part.to) for part in changed.slices] == [(0, 16), (16, 32)]
    assert sum(part.examples for part in changed.slices) == 60
    whole = sum(part.examples * known(part.converted) for part in changed.slices) / 60
    assert whole == pytest.approx(changed.scores["accuracy"])


def test_batches_change_neither_predictions_nor_their_order(data):
    model, tokenizer = tiny_model(1), tiny_tokenizer()
    task = open_task("glue/stsb")
    texts = (data / "dev.tsv").read_text().splitlines()[1:]
    split = Split("dev", [Example(str(row), {"text": text}, 0.0) for row, text in enumerate(texts)], False)
    subject = Subject("exact", model, tokenizer)
    one, eight = (predict(subject, task, prepare([subject], task, split, batch_size=size)) for size in (1, 8))
    with torch.inference_mode():
        directly = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    assert one == pytest.approx(directly, abs=1e-5)
    assert eight == pytest.approx(directly, abs=1e-5)


def test_inputs_of_like_length_share_a_batch_and_the_longest_come_first(data):
    split = SST2.load(data)
    prepared = prepare(list(subjects(tiny_model(2)).values()), SST2, split, batch_size=7)
    lengths = [prepared.lengths[row] for batch in prepared.batches for row in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(row for batch in prepared.batches for row in batch) == list(range(60))
    assert [len(batch) for batch in prepared.batches] == [7] * 8 + [4]


def test_the_same_seed_gives_the_same_entry_and_models_keep_their_mode(data):
    base = tiny_model(2).train()
    models = subjects(base, noisy(base, 0.2))
    entries = [evaluate(models, SST2, data=data, seed=1) for _ in range(2)]
    assert entries[0] == entries[1]
    assert base.training


def test_metrics_that_are_no_mean_are_compared_by_bootstrap():
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=400).tolist()
    base = [int(label) if generator.random() < 0.9 else 1 - label for label in labels]
    lost = [prediction if generator.random() < 0.7 else 1 - prediction for prediction in base]
    entry = compare(
        open_task("glue/mrpc"),
        labelled(labels),
        [20] * 400,
        {"exact": base, "same": base, "lost": lost},
        margin=0.02,
        seed=0,
    )
    assert entry.metric == "f1"
    assert set(entry.base.scores) == {"f1", "accuracy"}
    low, high = known(entry.base.interval)
    assert low < entry.base.scores["f1"] < high
    same, worse = entry.variants
    assert (same.test, same.difference, same.verdict) == ("paired bootstrap", 0.0, "no loss")
    assert worse.verdict == "loss beyond margin"
    assert known(worse.p_value) < 0.01


def test_regression_is_compared_by_correlation():
    labels = np.linspace(0, 5, 300)
    base = (labels + np.random.default_rng(0).normal(0, 0.5, 300)).tolist()
    constant = [2.5] * 300
    entry = compare(
        open_task("glue/stsb"),
        labelled(labels.tolist()),
        [20] * 300,
        {"exact": base, "constant": constant},
        margin=0.01,
        seed=0,
    )
    assert entry.variants[0].scores == {"pearson": 0.0, "spearman": 0.0}
    assert entry.variants[0].verdict == "loss beyond margin"


def test_examples_of_a_group_are_drawn_together():
    # Twenty copies of ten answers are worth ten examples, not two hundred.
    labels, base = [1, 0] * 5, [1, 0, 1, 1, 1, 0, 1, 0, 0, 0]
    lost = [1, 0, 1, 1, 1, 0, 0, 0, 0, 1]
    repeated = [[value for value in values for _ in range(20)] for values in (labels, base, lost)]
    speakers = [str(row // 20) for row in range(200)]
    predictions = {"exact": repeated[1], "lost": repeated[2]}
    task = open_task("glue/mrpc")
    loose, grouped = (
        compare(task, labelled(repeated[0], groups), [20] * 200, predictions, margin=0.01, seed=0)
        for groups in (None, speakers)
    )
    single = compare(task, labelled(labels), [20] * 10, {"exact": base, "lost": lost}, margin=0.01, seed=0)
    intervals = [known(entry.variants[0].interval) for entry in (loose, grouped, single)]
    widths = [high - low for low, high in intervals]
    assert widths[0] < widths[1] / 2
    assert widths[1] == pytest.approx(widths[2], rel=0.15)
    assert grouped.variants[0].test == "paired bootstrap over 10 groups"


def test_inputs_longer_than_the_positions_are_refused_or_cut_and_counted(data):
    models = subjects(tiny_model(2, positions=32), tiny_model(2, positions=16))
    refused(
        r"of 60 examples of glue/sst2 are too long: dev-\d+ has 22 tokens, the limit is 16 \(the positions of noisy\)"
        r".*--max-length 22.*--truncate",
        Exit.USAGE,
        lambda: evaluate(models, SST2, data=data),
    )
    entry = evaluate(models, SST2, EvaluateOptions(truncate=True), data=data)
    assert known(entry.tokens).longest == 16
    assert 0 < entry.truncated < 60
    refused(
        r"the limit is 8 \(--max-length\)",
        Exit.USAGE,
        lambda: evaluate(models, SST2, EvaluateOptions(max_length=8), data=data),
    )
    shorter = evaluate(models, SST2, EvaluateOptions(max_length=8, truncate=True), data=data)
    assert (known(shorter.tokens).longest, shorter.notes[0]) == (8, "read to 8 tokens")
    assert shorter.truncated > entry.truncated


def test_min_length_scores_long_examples_alone_and_says_so(data):
    models = subjects(tiny_model(2))
    every, longer = (evaluate(models, SST2, EvaluateOptions(min_length=least), data=data) for least in (None, 20))
    assert 0 < longer.examples < every.examples
    assert (longer.subset, longer.notes[0]) == (True, "only inputs of at least 20 tokens")
    assert known(longer.tokens).median >= 20
    refused(
        r"none of 60 examples has the 23 tokens of --min-length; the longest has 22",
        Exit.UNAVAILABLE,
        lambda: evaluate(models, SST2, EvaluateOptions(min_length=23), data=data),
    )


def test_robertas_positions_start_behind_the_padding_token():
    config = transformers.RobertaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=18,
        pad_token_id=0,
        type_vocab_size=2,
    )
    model = transformers.RobertaForSequenceClassification(config).eval()
    subject = Subject("exact", model, tiny_tokenizer())

    def run(words: int) -> list[int]:
        split = Split("dev", [Example("a", {"text": " ".join(["film"] * words)}, 0)], False)
        return predict(subject, SST2, prepare([subject], SST2, split, batch_size=1))

    assert len(run(15)) == 1
    refused("has 18 tokens, the limit is 17", Exit.USAGE, lambda: run(16))


def test_a_model_without_positions_reads_inputs_of_any_length(data):
    model = tiny_model(2)
    vars(model.config)["max_position_embeddings"] = None
    entry = evaluate(subjects(model), SST2, data=data)
    assert (known(entry.tokens).longest, entry.truncated) == (22, 0)
    assert not any("read to" in note for note in entry.notes)
    # An input may be as long as the limit.
    assert evaluate(subjects(model), SST2, EvaluateOptions(max_length=22), data=data).truncated == 0


def test_a_task_that_reads_in_windows_makes_them_no_longer_than_the_models_positions(tmp_path):
    (tmp_path / "text.txt").write_text("good film " * 30)
    task = open_task("lm", stretch=300)
    model = list(subjects(tiny_model(2, positions=16)).values())
    prepared = prepare(model, task, task.load(tmp_path / "text.txt"), batch_size=4)
    assert max(map(task.tokens, prepared.encodings)) <= 16
    assert len(prepared.encodings) > len(prepared.lengths) == 1
    assert prepared.truncated == 0


def test_default_batch_size_follows_the_number_of_tokens(data):
    split = SST2.load(data)
    models = list(subjects(tiny_model(2)).values())
    assert [len(batch) for batch in prepare(models, SST2, split, batch_size=None).batches] == [60]


def test_tokens_that_a_model_does_not_know_are_refused(data):
    models = subjects(tiny_model(2, vocabulary=10))
    refused(
        r"has token 13, but the vocabulary of exact is 0-9: its tokenizer",
        Exit.UNAVAILABLE,
        lambda: evaluate(models, SST2, data=data),
    )


def test_tokens_are_those_of_the_text_model_where_a_config_has_several():
    config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(vocab_size=10))
    subject = Subject("exact", SimpleNamespace(config=config), None)
    with pytest.raises(ApproxError, match="has token 13, but the vocabulary of exact is 0-9"):
        _check_tokens([subject], [Example("one", {}, 0)], [{"input_ids": [1, 13]}], [0])


def test_two_tokenizers_are_not_compared(data):
    other = tiny_tokenizer()
    other.add_tokens(["film is", "very good"])
    models = {**subjects(tiny_model(2)), "converted": Subject("converted", tiny_model(2, vocabulary=20), other)}
    refused("The tokenizers of converted and exact differ", Exit.USAGE, lambda: evaluate(models, SST2, data=data))


def test_what_does_not_fit_the_task_is_refused_by_name(data):
    refused(
        "^exact: glue/mnli has 3 outputs",
        Exit.UNSUPPORTED,
        lambda: evaluate(subjects(tiny_model(2)), open_task("glue/mnli"), data=data),
    )
    without = {"exact": Subject("exact", tiny_model(2), None)}
    refused("exact has no tokenizer", Exit.UNAVAILABLE, lambda: evaluate(without, SST2, data=data))


def test_nothing_to_evaluate_is_an_error(data):
    models = list(subjects(tiny_model(2)).values())
    refused("0 rows", Exit.UNAVAILABLE, lambda: prepare(models, SST2, Split("dev", [], False), batch_size=1))
    empty = Split("dev", [Example("dev-0", {"text": ""}, 0)], False)
    models[0].processor._tokenizer.post_processor = None
    refused("dev-0 has no tokens", Exit.UNAVAILABLE, lambda: prepare(models, SST2, empty, batch_size=1))


def test_a_model_that_gives_nan_has_no_score(data):
    broken = tiny_model(2)
    with torch.no_grad():
        broken.classifier.bias.fill_(float("nan"))
    models = subjects(tiny_model(2), broken)
    refused("^noisy: its logits are not finite", Exit.VERIFICATION, lambda: evaluate(models, SST2, data=data))


def test_memory_that_ends_names_the_remedy(data, monkeypatch):
    model = tiny_model(2)

    def exhausted(**_batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "forward", exhausted)
    refused(
        "exact: cpu ran out of memory.*--batch-size", Exit.MISSING, lambda: evaluate(subjects(model), SST2, data=data)
    )


@pytest.mark.gpu
def test_a_gpu_predicts_what_the_cpu_predicts(data):
    models = subjects(tiny_model(2))
    on_cpu = evaluate(models, SST2, data=data)
    assert evaluate(models, SST2, data=data, device="cuda").base == on_cpu.base


@pytest.mark.slow
def test_the_real_checkpoint_scores_what_its_readme_says(shared_data, shared_checkpoints):
    folder = shared_checkpoints / "minilm-sst2"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    subject = Subject("exact", model, transformers.AutoTokenizer.from_pretrained(folder))
    entry = evaluate({"exact": subject}, SST2, data=shared_data / "glue")
    assert (entry.examples, entry.subset) == (872, False)
    assert entry.base.scores["accuracy"] == 781 / 872
