"""Checkpoints that are damaged, dangerous or contradictory: edits of a good one, and what a conversion says of each."""

import json
import os
import pickle
import struct

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


class Evil:
    """A pickle that would leave a file."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def config(**changes):
    def edit(folder):
        read = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(read | changes))

    return edit


def tensors(change):
    def edit(folder):
        read = load_file(folder / WEIGHTS)
        change(read)
        save_file(read, folder / WEIGHTS, {"format": "pt"})

    return edit


def file(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def changed(change):
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def index(table):
    """An index in place of the whole file, beside which it would not be read."""

    def change(folder):
        (folder / WEIGHTS).unlink()
        file("model.safetensors.index.json", json.dumps(table))(folder)

    return change


def set_first(value):
    def change(read):
        read["classifier.bias"][0] = value

    return tensors(change)


def dropped(read):
    for name in [name for name in read if "layer.1" in name]:
        del read[name]


def renamed(read):
    for name in list(read):
        read[name.replace("bert.", "roberta.")] = read.pop(name)


def narrowed(read):
    read["classifier.weight"] = read["classifier.weight"][:, :3].contiguous()


def pickled(content):
    def edit(folder):
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return edit


# An edit of a good checkpoint, then what its conversion says.
CHECKPOINTS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), 5, "config.json is missing"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), 5, "holds no weights"),
    "config cut off": (file("config.json", "{"), 5, "not a valid config"),
    "config is a list": (file("config.json", "[1]"), 5, "it is not an object"),
    "config is binary": (file("config.json", b"\xff\xfe\0"), 5, "not a valid config"),
    "config is empty": (file("config.json", ""), 5, "not a valid config"),
    "config is deep": (file("config.json", "[" * 100_000), 5, "not a valid config"),
    "config is an LFS pointer": (
        file("config.json", "version https://git-lfs.github.com/spec/v1\n"),
        5,
        "git lfs pull",
    ),
    "no model type": (file("config.json", "{}"), 5, "has no 'model_type'"),
    "numeric model type": (config(model_type=3), 5, "has no 'model_type'"),
    "unknown model type": (config(model_type="nonesuch"), 3, "does not know the model type 'nonesuch'"),
    "another family": (config(architectures=["GPT2LMHeadModel"]), 5, "contradicts itself"),
    "unknown architecture": (config(architectures=["FooModel"]), 3, "'FooModel'"),
    "relative positions": (config(position_embedding_type="relative_key"), 3, "relative_key"),
    "a billion layers": (config(num_hidden_layers=10**9), 5, "implausible"),
    "no layers": (config(num_hidden_layers=0), 3, "no self-attention"),
    "no heads": (config(num_attention_heads=0), 3, "could not be run"),
    "heads in words": (config(num_attention_heads="four"), 5, "expected int, got str"),
    "heads that do not divide": (config(num_attention_heads=3), 3, "multiple of the number of attention heads"),
    "vocabulary is null": (config(vocab_size=None), 5, "expected int, got NoneType"),
    "weights cut off": (changed(lambda read: read[: len(read) // 2]), 5, "damaged or truncated"),
    "weights are empty": (changed(lambda read: b""), 5, "(0 bytes) is damaged"),
    "weights are text": (changed(lambda read: b"hello world, this is text"), 5, "damaged or truncated"),
    "weights are an LFS pointer": (
        changed(lambda read: b"version https://git-lfs.github.com/spec/v1\n"),
        5,
        "git lfs pull",
    ),
    "header of exabytes": (changed(lambda read: struct.pack("<Q", 2**60) + read[8:]), 5, "header too large"),
    "header of junk": (changed(lambda read: read[:8] + b"x" * 20 + read[28:]), 5, "invalid JSON in header"),
    "no tensors": (tensors(lambda read: read.clear()), 5, "holds no tensors"),
    "NaN": (set_first(torch.nan), 5, "NaN or infinite numbers in classifier.bias"),
    "infinity": (set_first(-torch.inf), 5, "NaN or infinite numbers in classifier.bias"),
    "half the layers": (tensors(dropped), 5, "lacks tensors"),
    "weights of another family": (tensors(renamed), 5, "of another family"),
    "wrong shape": (tensors(narrowed), 5, "classifier.weight is (2, 3), not (2, 32)"),
    "pickle only": (pickled(b""), 8, "--allow-pickle"),
    "malicious pickle": (pickled(pickle.dumps({"x": Evil()})), 8, "--allow-pickle"),
    "index without a map": (index({}), 5, "not a valid index"),
    "index of files that are missing": (index({"weight_map": {"x": "model-1.safetensors"}}), 5, "is missing"),
    "index that leads out": (index({"weight_map": {"x": "../base/model.safetensors"}}), 8, "only relative names"),
}
