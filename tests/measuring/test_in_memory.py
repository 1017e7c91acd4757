"""A loaded model as a checkpoint: what it is, and a hash of everything that decides its outputs."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from approx.conversion import surgery
from approx.errors import ApproxError
from approx.measuring.measure import identity, in_memory
from approx.planning.plan import Plan
from tiny_classifier import tiny_model, tiny_tokenizer


def test_describes_a_model_without_copying_it():
    model, tokenizer = tiny_model(2), tiny_tokenizer()
    one = in_memory(model, tokenizer)
    assert one.model is model
    assert (one.source.name, one.source.stock_class, one.source.converted) == (
        "BertForSequenceClassification",
        type(model),
        False,
    )
    assert one.source.reader is tokenizer
    assert (one.source.folder, one.source.revision) == (Path(os.devnull), None)
    assert one.source.raw["hidden_size"] == 32
    surgery.convert(model, Plan.of("local"))
    again = in_memory(model, tokenizer)
    assert again.source.converted
    assert again.source.stock_class.__name__ == "BertForSequenceClassification"
    assert again.source.raw["approx"]["sites"]


def test_a_processor_is_an_object_or_a_folder_and_needed_by_what_reads(tmp_path):
    model, tokenizer = tiny_model(2), tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for named in (str(tmp_path), tmp_path):
        read = in_memory(model, named, offline=True).source.reader
        assert read("the film is")["input_ids"] == tokenizer("the film is")["input_ids"]
    assert in_memory(model, None, reads=False).source.reader is None
    for reader, words in ((None, "needs its tokenizer or processor"), (3, "'processor' is of type int")):
        with pytest.raises(ApproxError, match=words):
            in_memory(model, reader)
    with pytest.raises(ApproxError, match="A Sequential cannot be measured"):
        in_memory(torch.nn.Sequential(model), tokenizer)


def test_weights_and_adapters_with_their_strength_decide_the_hash(monkeypatch):
    peft = pytest.importorskip("peft")
    # Adapters of an older version than transformers asks for do here too.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **least: None)

    def lora(alpha: int) -> Any:
        return peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["query"], init_lora_weights=False)

    torch.manual_seed(0)
    model: Any = tiny_model(2)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.classifier.bias.add_(1e-3)
    hashes = [in_memory(one, None, reads=False).weights_sha256 for one in (model, copy.deepcopy(model), other)]
    assert hashes[0] == hashes[1] != hashes[2]
    identities = [identity(in_memory(one, None, reads=False)) for one in (model, other)]
    one = model
    for alpha in (8, 8, 16):
        one = copy.deepcopy(model)
        torch.manual_seed(1)
        one.add_adapter(lora(alpha), adapter_name="first")
        hashes.append(in_memory(one, None, reads=False).weights_sha256)
        identities.append(identity(in_memory(one, None, reads=False)))
    assert hashes[3] == hashes[4]
    assert len(set(hashes)) == 4
    assert len(set(identities)) == 4
    one.add_adapter(lora(16), adapter_name="second")
    acting = []
    for name in ("first", "second"):
        one.set_adapter(name)
        acting.append(in_memory(one, None, reads=False).weights_sha256)
    assert acting[0] != acting[1]
