"""Every fault of a checkpoint gives a one-line error with file, cause and remedy, and no output."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from approx.checkpoints import checkpoint
from approx.conversion import convert
from approx.errors import ApproxError, Exit
from approx.planning.plan import Plan
from zoo import error_of, tiny

PLAN = Plan.of("sdpa")
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24\n"
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    tiny("BertForSequenceClassification").save_pretrained(folder)
    return folder


@pytest.fixture
def bad(good, tmp_path):
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "bad"))


def refused(folder, code, *words, **options):
    """Conversion fails with this code and these words, and leaves nothing behind."""
    out = folder.parent / "out"
    before = {path: path.stat().st_size for path in folder.parent.rglob("*")}
    with pytest.raises(ApproxError) as caught:
        convert.convert(folder, out, PLAN, **options)
    text = str(caught.value)
    assert caught.value.exit_code == code, text
    for word in words:
        assert word in text, text
    assert "\n" not in text
    assert {path: path.stat().st_size for path in folder.parent.rglob("*")} == before
    return text


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "remove"}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors) or tensors, path, metadata={"format": "pt"})


def test_a_good_checkpoint_is_opened(good):
    opened = checkpoint.load(good)
    assert opened.notes == []
    assert not opened.model.training
    assert len(opened.weights_sha256) == 64


def test_hashes_weights_of_all_shards(bad):
    model = checkpoint.load(bad).model
    (bad / "model.safetensors").unlink()
    hashes = []
    for changed in (None, model.bert.embeddings.word_embeddings.weight, model.classifier.bias):
        if changed is not None:
            changed.data += 1
        model.save_pretrained(bad, max_shard_size="16KB")
        assert len(list(bad.glob("*.safetensors"))) > 2
        hashes.append(checkpoint.load(bad).weights_sha256)
    assert len(set(hashes)) == 3
    assert checkpoint.load(bad).weights_sha256 == hashes[-1]


def shards(folder, model):
    """Write a model as an index and several files, next to the existing ones."""
    model.save_pretrained(folder / "apart", max_shard_size="16KB")
    for path in (folder / "apart").glob("*.safetensors*"):
        path.replace(folder / path.name)
    shutil.rmtree(folder / "apart")


def pickled_shards(folder, model):
    names = list(model.state_dict())
    parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, part in parts.items():
        torch.save({name: model.state_dict()[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def whole(folder, model, name="model.safetensors"):
    save_file(dict(model.state_dict()), folder / name, metadata={"format": "pt"})


def pickled(folder, model):
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def named(folder, model):
    whole(folder, model, "other.safetensors")
    edit_config(folder, transformers_weights="other.safetensors")


# What transformers prefers, and other weights in the folder.
LAYOUTS = {
    "a whole file over shards": (whole, shards),
    "a whole file over a pickle": (whole, pickled),
    "shards over a pickle": (shards, pickled),
    "a whole pickle over pickled shards": (pickled, pickled_shards),
    "what the config names over a whole file": (named, whole),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample(3)
def test_hashes_the_weights_that_transformers_loads(bad, layout):
    one, other, third = (tiny("BertForSequenceClassification", seed) for seed in (1, 2, 3))
    (bad / "model.safetensors").unlink()
    loaded, write_others = LAYOUTS[layout]
    write_others(bad, other)
    loaded(bad, one)
    opened = checkpoint.load(bad, allow_pickle=True)
    stock = transformers.BertForSequenceClassification.from_pretrained(bad)
    for name, tensor in one.state_dict().items():
        assert torch.equal(opened.model.state_dict()[name], tensor), name
        assert torch.equal(stock.state_dict()[name], tensor), name
    # The hash follows what is loaded, and nothing else.
    write_others(bad, third)
    assert checkpoint.load(bad, allow_pickle=True).weights_sha256 == opened.weights_sha256
    loaded(bad, third)
    assert checkpoint.load(bad, allow_pickle=True).weights_sha256 != opened.weights_sha256
    if loaded is not pickled:
        # The converted folder holds the dtypes and numbers of what was loaded, too.
        convert.convert(bad, bad.parent / "out", PLAN, allow_pickle=True)
        written = load_file(bad.parent / "out" / "model.safetensors")
        assert all(torch.equal(written[name], tensor) for name, tensor in third.state_dict().items())


def test_converts_a_single_file_next_to_a_stale_index(bad):
    shards(bad, tiny("BertForSequenceClassification", 5))
    for path in bad.glob("model-*.safetensors"):
        path.unlink()
    made = convert.convert(bad, bad.parent / "out", PLAN)
    assert any("model.safetensors.index.json not read" in note for note in made.notes)


@pytest.mark.parametrize("name", ["model.gguf", "model.fp16.safetensors", "tf_model.h5"])
def test_names_weights_that_transformers_does_not_load(bad, name):
    (bad / "model.safetensors").rename(bad / name)
    refused(bad, Exit.UNAVAILABLE, str(bad), name)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("../out.safetensors", Exit.REFUSED),
        ("absent.safetensors", Exit.UNAVAILABLE),
        ("config.json", Exit.UNAVAILABLE),
        (3, Exit.UNAVAILABLE),
    ],
)
def test_rejects_weights_that_the_config_names_wrongly(bad, value, code):
    edit_config(bad, transformers_weights=value)
    refused(bad, code, str(bad / "config.json"), str(value))


def test_rejects_missing_weights(bad):
    (bad / "model.safetensors").unlink()
    refused(bad, Exit.UNAVAILABLE, str(bad), "no weights", "model.safetensors")


def test_rejects_missing_config(bad):
    (bad / "config.json").unlink()
    refused(bad, Exit.UNAVAILABLE, f"config.json is missing in {bad}")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"bert"', "\x00", "[" * 20000])
def test_rejects_corrupt_config(bad, text):
    (bad / "config.json").write_text(text)
    refused(bad, Exit.UNAVAILABLE, str(bad / "config.json"), "Download it again")


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**6}, {"num_hidden_layers": 10**30}, {"num_labels": 10**9}])
def test_rejects_config_with_absurd_sizes(bad, change):
    edit_config(bad, **change)
    refused(bad, Exit.UNAVAILABLE, str(bad / "config.json"), *change, "is implausible")


@pytest.mark.parametrize("value", ["remove", None, 3, ["bert"]])
def test_rejects_config_without_model_type(bad, value):
    edit_config(bad, model_type=value)
    refused(bad, Exit.UNAVAILABLE, str(bad / "config.json"), "model_type")


@pytest.mark.parametrize("value", ["berd", "approx_berd", "approx_"])
def test_rejects_unknown_family(bad, value):
    edit_config(bad, model_type=value)
    refused(bad, Exit.UNSUPPORTED, value, "Supported families: bert, roberta")


@pytest.mark.parametrize("architecture", ["WavLMModel", "MPNetModel", "DebertaV2Model"])
def test_rejects_family_without_dispatch(tmp_path, architecture):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = getattr(transformers, architecture.replace("Model", "Config"))(**small)
    (tmp_path / "model").mkdir()
    config.save_pretrained(tmp_path / "model")
    refused(tmp_path / "model", Exit.UNSUPPORTED, architecture, "dispatch", "BERT")


def test_rejects_truncated_weights(bad):
    path = bad / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(bad, Exit.UNAVAILABLE, str(path), f"{path.stat().st_size:,} bytes", "Download it again")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00", b"\xff" * 8, struct.pack("<Q", 10**9) + b"{}", struct.pack("<Q", 2) + b"{}", b"garbage " * 99],
)
def test_rejects_weights_with_wrong_header(bad, content):
    (bad / "model.safetensors").write_bytes(content)
    refused(bad, Exit.UNAVAILABLE, str(bad / "model.safetensors"), "Download it again")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_rejects_git_lfs_pointer(bad, name):
    if name.endswith(".index.json"):
        # Beside a whole file the index is not read.
        (bad / "model.safetensors").unlink()
    (bad / name).write_bytes(POINTER)
    refused(bad, Exit.UNAVAILABLE, str(bad / name), "git-LFS pointer", "git lfs pull")


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": [1]}', "{"]
)
def test_rejects_corrupt_index(bad, text):
    (bad / "model.safetensors").unlink()
    (bad / "model.safetensors.index.json").write_text(text)
    refused(bad, Exit.UNAVAILABLE, "model.safetensors.index.json", "Download it again")


def test_rejects_missing_shard(bad):
    (bad / "model.safetensors").unlink()
    (bad / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    refused(bad, Exit.UNAVAILABLE, "model-00002-of-00002.safetensors is missing")


def test_rejects_missing_layers(bad):
    edit_weights(bad, lambda tensors: {name: t for name, t in tensors.items() if ".layer.2." not in name})
    refused(bad, Exit.UNAVAILABLE, str(bad), "bert.encoder.layer.2", "at random")


def test_notes_weights_beyond_the_layers_of_the_config(bad):
    edit_config(bad, num_hidden_layers=2)
    (note,) = checkpoint.load(bad).notes
    assert "bert.encoder.layer.2" in note


def test_notes_missing_head(bad):
    edit_weights(bad, lambda tensors: {name: t for name, t in tensors.items() if "classifier" not in name})
    (note,) = checkpoint.load(bad).notes
    assert "classifier.weight" in note
    assert "newly initialised" in note


def test_rejects_weights_of_another_family(bad):
    tiny("RobertaForSequenceClassification").save_pretrained(bad.parent / "roberta")
    shutil.copy(bad.parent / "roberta" / "model.safetensors", bad)
    refused(bad, Exit.UNAVAILABLE, "BertForSequenceClassification", "another family")


def test_rejects_contradictory_config(bad):
    edit_config(bad, architectures=["RobertaForSequenceClassification"])
    refused(bad, Exit.UNAVAILABLE, "'bert'", "RobertaForSequenceClassification", "different families")


@pytest.mark.parametrize("name", ["MyBertModel", "BertConfig", "AutoModel", "__name__"])
def test_rejects_unknown_architecture(bad, name):
    edit_config(bad, architectures=[name])
    refused(bad, Exit.UNSUPPORTED, name)


@pytest.mark.parametrize("value", ["remove", [], None])
def test_opens_backbone_without_architecture(bad, value):
    edit_config(bad, architectures=value)
    assert type(checkpoint.load(bad).model) is transformers.BertModel


@pytest.mark.parametrize("value", ["BertModel", {"0": "BertModel"}, 3])
def test_rejects_architectures_that_are_not_a_list(bad, value):
    # Some versions of transformers ignore them, others reject the config.
    edit_config(bad, architectures=value)
    error = error_of(lambda: checkpoint.load(bad))
    assert error is None or error.exit_code == Exit.UNAVAILABLE


def test_rejects_wrong_shape(bad):
    edit_config(bad, intermediate_size=64)
    refused(
        bad, Exit.UNAVAILABLE, str(bad), "bert.encoder.layer.0.intermediate.dense.bias is (48,), not (64,)", "6 more"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rejects_non_finite_numbers(bad, value):
    def poison(tensors):
        tensors["bert.embeddings.word_embeddings.weight"][7, 3] = value

    edit_weights(bad, poison)
    assert "more" not in refused(bad, Exit.UNAVAILABLE, "NaN or infinite", "bert.embeddings.word_embeddings.weight.")


@pytest.mark.parametrize(("broken", "suffix"), [(3, ""), (4, " and 1 more")])
def test_names_some_of_many_broken_tensors_and_their_number(bad, broken, suffix):
    names = sorted(name for name in load_file(bad / "model.safetensors") if ".layer." in name)[:broken]

    def poison(tensors):
        for name in names:
            tensors[name].fill_(float("nan"))

    for change, after in (
        (poison, "The checkpoint is damaged"),
        (lambda tensors: {name: t for name, t in tensors.items() if name not in names}, "Its weights are"),
    ):
        edit_weights(bad, change)
        text = refused(bad, Exit.UNAVAILABLE, f"{suffix}. {after}")
        assert sum(name in text for name in names) == 3
        assert ("more" in text) is bool(suffix)


@pytest.mark.parametrize("value", ["relative_key", "relative_key_query"])
def test_rejects_relative_positions(bad, value):
    edit_config(bad, position_embedding_type=value)
    refused(bad, Exit.UNSUPPORTED, str(bad / "config.json"), value)


def to_pickle(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_refuses_pickles_by_default_and_writes_safetensors(bad):
    to_pickle(bad)
    refused(bad, Exit.REFUSED, "pytorch_model.bin", "--allow-pickle")
    convert.convert(bad, bad.parent / "out", PLAN, allow_pickle=True)
    names = {path.name for path in (bad.parent / "out").iterdir()}
    assert "model.safetensors" in names
    assert not any(name.endswith(".bin") for name in names)


def test_allowing_pickles_does_not_make_safetensors_worse(bad):
    assert checkpoint.load(bad, allow_pickle=True).notes == []


class Payload:
    """Creates a file as it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


@pytest.mark.parametrize("form", ["zip", "bare"])
def test_never_runs_malicious_pickle(bad, form):
    trace, path = bad.parent / "trace", bad / "pytorch_model.bin"
    to_pickle(bad)
    if form == "zip":
        torch.save({"bert.pooler.dense.bias": Payload(trace)}, path)
    else:
        path.write_bytes(pickle.dumps({"bert.pooler.dense.bias": Payload(trace)}))
    refused(bad, Exit.REFUSED, "--allow-pickle")
    text = refused(bad, Exit.UNAVAILABLE, str(path), allow_pickle=True)
    assert "weights_only" not in text
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"garbage", POINTER])
def test_rejects_corrupt_pickle(bad, content):
    to_pickle(bad)
    (bad / "pytorch_model.bin").write_bytes(content)
    refused(bad, Exit.UNAVAILABLE, str(bad), allow_pickle=True)


@pytest.mark.parametrize(
    ("method", "more"),
    [("gptq", {"bits": 4, "group_size": 128}), ("awq", {"bits": 4}), ("bitsandbytes", {"load_in_4bit": True})],
)
def test_a_quantised_checkpoint_without_its_package_is_named_before_weights_are_read(bad, method, more):
    edit_config(bad, quantization_config={"quant_method": method, **more})
    (bad / "model.safetensors").write_bytes(b"never read")
    refused(bad, Exit.MISSING, method, "Install")


@pytest.mark.parametrize("value", ["absent", 3, None])
def test_an_unknown_quantisation_is_refused(bad, value):
    edit_config(bad, quantization_config={"quant_method": value})
    refused(bad, Exit.UNSUPPORTED, "quantised")


@pytest.mark.parametrize(
    ("architecture", "changes", "name"),
    [
        ("Wav2Vec2ForCTC", {"mask_time_prob": 0.05}, "wav2vec2.masked_spec_embed"),
        ("HubertForCTC", {"mask_time_prob": 0.05}, "hubert.masked_spec_embed"),
    ],
)
def test_a_tensor_that_only_training_reads_may_be_missing(tmp_path, architecture, changes, name):
    tiny(architecture, **changes).save_pretrained(tmp_path / "base")
    edit_weights(tmp_path / "base", lambda tensors: {key: x for key, x in tensors.items() if key != name})
    made = convert.convert(tmp_path / "base", tmp_path / "out", PLAN)
    assert any(f"{name} not in the checkpoint: set to 0" in note for note in made.notes)
    assert not load_file(tmp_path / "out" / "model.safetensors")[name].any()


def test_the_token_of_masked_patches_may_be_missing(tmp_path):
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14, mlp_ratio=1
    )
    transformers.Dinov2Model(config).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: {key: x for key, x in tensors.items() if "mask_token" not in key})
    assert any("embeddings.mask_token" in note for note in checkpoint.load(tmp_path).notes)


@pytest.mark.parametrize("lost", ["feature_projection.projection.weight", "encoder.layers.1.attention.k_proj.bias"])
def test_a_tensor_that_inference_reads_may_not_be_missing(tmp_path, lost):
    tiny("Wav2Vec2ForCTC").save_pretrained(tmp_path / "base")
    edit_weights(tmp_path / "base", lambda tensors: {key: x for key, x in tensors.items() if key != f"wav2vec2.{lost}"})
    refused(tmp_path / "base", Exit.UNAVAILABLE, lost, "at random")
