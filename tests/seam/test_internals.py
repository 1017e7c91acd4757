"""The private names of transformers, and the fallbacks for versions that lack them."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from transformers.models.auto import modeling_auto
from transformers.utils import output_capturing

import approx
from approx.checkpoints.families import FAMILIES
from approx.seam import internals
from zoo import tiny

PRIVATE = {
    "_active_collector",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_can_set_attn_implementation",
    "_compiled_call_impl",
    "_global_mapping",
    "_keep_in_fp32_modules_strict",
    "_model_mapping",
    "_weight_conversions",
}


def test_no_other_file_uses_a_private_name_of_transformers():
    places = []
    for file in Path(approx.__file__).parent.rglob("*.py"):
        if file.name == "internals.py":
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                places += [f"{file.name}:{node.lineno}" for alias in node.names if alias.name in PRIVATE]
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
                places.append(f"{file.name}:{node.lineno}")
    assert places == []


def test_importing_the_file_imports_no_private_names():
    tree = ast.parse(Path(internals.__file__).read_text("utf-8"))
    imported = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert not [name for name in imported if name.startswith("_")]


def test_a_collector_of_outputs_is_noticed_where_this_version_has_one(monkeypatch):
    assert internals.collects_attentions() is False
    token = output_capturing._active_collector.set({"attentions": []})
    try:
        assert internals.collects_attentions() is True
        # As in a version that has no such file.
        monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", None)
        assert internals.collects_attentions() is False
    finally:
        output_capturing._active_collector.reset(token)


@pytest.mark.parametrize("private", [True, False], ids=["private", "public"])
def test_a_config_dispatches_to_another_implementation_for_a_while(private):
    config = tiny("BertModel").config if private else SimpleNamespace(_attn_implementation="sdpa")
    before = internals.implementation_of(config)
    with internals.under_implementation(config, "another"):
        assert internals.implementation_of(config) == "another"
    assert internals.implementation_of(config) == before


def test_a_temporary_attention_has_a_name_until_it_ends_where_this_version_lets_names_go(monkeypatch):
    registries = transformers.AttentionInterface, transformers.AttentionMaskInterface
    one, two = print, repr
    with internals.temporary_attention(one, two) as name:
        assert [registry()[name] for registry in registries] == [one, two]
        assert internals.attends_temporarily(SimpleNamespace(_attn_implementation=name))
        with internals.temporary_attention(one, two) as other:
            assert other != name
    assert not any(made in registry() for made in (name, other) for registry in registries)
    assert not internals.attends_temporarily(SimpleNamespace(_attn_implementation="sdpa"))
    assert not internals.attends_temporarily(SimpleNamespace(_attn_implementation=None))
    with internals.temporary_attention(one, two) as name:
        for registry in registries:
            monkeypatch.delattr(registry, "_global_mapping")
    monkeypatch.undo()
    assert [registry._global_mapping.pop(name) for registry in registries] == [one, two]


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_classes_are_found_by_their_names_without_the_private_mappings(family, monkeypatch):
    expected = internals.auto_classes(family)
    backbone = internals.backbone_of(transformers.CONFIG_MAPPING[family])
    assert backbone is not None
    for kind in vars(modeling_auto).values():
        if isinstance(kind, type) and "_model_mapping" in vars(kind):
            monkeypatch.setattr(kind, "_model_mapping", None)
    classes = internals.auto_classes(family)
    assert {auto: name for auto, name in classes.items() if auto in expected}.items() <= expected.items()
    assert classes["AutoModel"] == expected["AutoModel"]
    assert internals.backbone_of(transformers.CONFIG_MAPPING[family]) is backbone
