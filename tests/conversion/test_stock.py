"""Stock checkpoints: transformers alone computes what the converted model does, beyond its windows too; the rest is refused."""

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from approx.checkpoints import checkpoint
from approx.conversion import export, stock, surgery
from approx.errors import ApproxError, Exit
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.planning.rule import Rule
from approx.seam.model import seal_model
from converted import run
from tiny_decoder import words
from zoo import error_of, tiny

SLIDING, FULL = "sliding_attention", "full_attention"
SAME_ROTARY = {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in (SLIDING, FULL)}


def local(layers="all", left=7, right=0):
    return Rule("local", layers, {"left": left, "right": right})


def both(layers="all", reach=4):
    return local(layers, reach, reach)


def longformer(layers="all", **settings):
    return Rule("longformer", layers, {"window": 8, **settings})


def bigbird(below=29, **settings):
    return Rule("bigbird", "all", {"block": 4, "random": 1, "compatible": True, **settings}, exact_below=below)


@pytest.fixture
def converted(tmp_path):
    """Converts a tiny model into a folder."""

    def converted(architecture, *rules, halve=False, **config):
        model = tiny(architecture, **config)
        surgery.convert(model.to(torch.bfloat16) if halve else model, Plan(rules))
        model.save_pretrained(tmp_path / "converted")
        words().save_pretrained(tmp_path / "converted")
        return tmp_path / "converted"

    return converted


def exported(folder, out):
    """Export a folder by the function for all formats."""
    made = export.export(folder, out, format="stock")
    assert isinstance(made, stock.StockExported)
    return made


def refused(architecture, *rules, **config):
    """The error of exporting a model, from its config alone."""
    model = tiny(architecture, **config)
    error = error_of(lambda: stock.of_plan(model.config, type(model), Plan(rules)))
    assert error is not None
    assert error.exit_code == Exit.UNSUPPORTED
    assert "\n" not in str(error)
    return str(error)


# Architecture, its config and plan -> the stock architecture, its window as the config counts it, and its layers.
DECODERS = [
    ("LlamaForCausalLM", {}, [local("0-1")], "MinistralForCausalLM", 8, "0-1"),
    ("LlamaForSequenceClassification", {}, [local()], "MinistralForSequenceClassification", 8, "0-2"),
    (
        "MistralForCausalLM",
        {"sliding_window": None},
        [local("2"), Rule("flash", "0", {})],
        "MinistralForCausalLM",
        8,
        "2",
    ),
    ("Qwen2ForCausalLM", {}, [local("0-1")], "Qwen2ForCausalLM", 8, "0-1"),
    ("Qwen3ForCausalLM", {}, [local("1")], "Qwen3ForCausalLM", 8, "1"),
    (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "layer_types": [SLIDING, FULL, FULL]},
        [local("1")],
        "Qwen3ForCausalLM",
        8,
        "0-1",
    ),
    ("Gemma2ForCausalLM", {"attn_logit_softcapping": None}, [local()], "Gemma2ForCausalLM", 8, "0-2"),
    # Its sliding layers have other rotary positions, so none may be left of its own.
    ("Gemma3ForCausalLM", {"layer_types": [FULL] * 3}, [local("1", 4)], "Gemma3ForCausalLM", 5, "1"),
    ("ModernBertDecoderForCausalLM", {"rope_parameters": SAME_ROTARY}, [local("0", 3)], None, 4, "0-1"),
]
ENCODERS = [
    ("ModernBertForMaskedLM", {"rope_parameters": SAME_ROTARY}, [both("0")], None, 4, "0-1"),
    ("ModernBertForSequenceClassification", {"layer_types": [FULL] * 3}, [both(reach=3)], None, 3, "0-2"),
    ("BertModel", {}, [longformer()], "LongformerModel", 8, "0-2"),
    ("BertForSequenceClassification", {}, [longformer()], "LongformerForSequenceClassification", 8, "0-2"),
    ("BertForMaskedLM", {}, [both()], "LongformerForMaskedLM", 8, "0-2"),
    ("BertForTokenClassification", {}, [longformer(global_tokens=[0, 3])], None, 8, "0-2"),
    ("BertForQuestionAnswering", {}, [longformer(global_tokens="question", separator=7)], None, 8, "0-2"),
    ("BertForMaskedLM", {}, [longformer("0-1"), longformer("2", window=4)], None, [8, 8, 4], "0-2"),
    ("RobertaForMaskedLM", {}, [longformer(global_tokens="separator", separator=7)], None, 8, "0-2"),
    ("RobertaForSequenceClassification", {}, [longformer()], "LongformerForSequenceClassification", 8, "0-2"),
    ("XLMRobertaForTokenClassification", {}, [longformer()], "LongformerForTokenClassification", 8, "0-2"),
    ("BertModel", {}, [bigbird()], "BigBirdModel", 4, "0-2"),
    ("BertForMaskedLM", {}, [bigbird()], "BigBirdForMaskedLM", 4, "0-2"),
    ("BertForTokenClassification", {}, [bigbird()], "BigBirdForTokenClassification", 4, "0-2"),
]  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize(("architecture", "config", "rules", "becomes", "window", "layers"), DECODERS + ENCODERS)
def test_transformers_alone_computes_the_same(
    architecture, config, rules, becomes, window, layers, converted, tmp_path
):
    made = exported(converted(architecture, *rules, **config), tmp_path / "stock")
    assert becomes in (None, made.architecture)
    assert (made.window, made.layers) == (window, layers)
    assert max(made.largest_relative_difference.values()) < stock.TOLERANCE
    # The longest input is beyond every window.
    lengths = [int(size.split()[-1]) for size in made.largest_relative_difference]
    assert len(lengths) == 3
    assert lengths[-1] == 64
    raw = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert raw["architectures"] == [made.architecture]
    assert not {"auto_map", "approx"} & {*raw}
    assert not [*(tmp_path / "stock").glob("*.py")]
    report = json.loads((tmp_path / "stock" / checkpoint.EXPORTED).read_text())
    assert report["largest_relative_difference"] == made.largest_relative_difference
    assert {*report["versions"]} == {"approx", "torch", "transformers"}


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [(7, 0, 8), (7, 0, 9), (0, 0, 5)],
    ids=["as long as the window", "one token longer", "alone"],
)
def test_the_window_counts_the_token_itself(left, right, length, converted, tmp_path):
    model = checkpoint.load(converted("LlamaForCausalLM", local(left=left, right=right))).model
    export.export(tmp_path / "converted", tmp_path / "stock", format="stock")
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert other.config.sliding_window == left + 1
    inputs = example_inputs(model, length)
    with torch.no_grad():
        expected, actual = model(**inputs).logits, other(**inputs).logits
        other.config.sliding_window += 1
        wider = other(**inputs).logits
    assert torch.allclose(actual, expected, atol=1e-6)
    assert torch.allclose(wider, expected, atol=1e-6) == (length <= left + 1)


def test_generates_the_same_with_and_without_a_cache(converted, tmp_path):
    model = checkpoint.load(converted("LlamaForCausalLM", local("0-1", 5), eos_token_id=None)).model
    export.export(tmp_path / "converted", tmp_path / "stock", format="stock")
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    inputs = {**example_inputs(model, 20), "do_sample": False, "max_new_tokens": 20}
    expected = model.generate(**inputs)
    assert torch.equal(other.generate(**inputs), expected)
    assert torch.equal(other.generate(**inputs, use_cache=False), expected)


def test_the_weights_keep_their_dtypes_and_numbers(converted, tmp_path):
    folder = converted("LlamaForCausalLM", local("0"), halve=True)
    tensors = load_file(folder / "model.safetensors")
    norm = "model.norm.weight"
    tensors[norm] = tensors[norm].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    seal_model(folder)
    export.export(folder, tmp_path / "stock", format="stock")
    written = load_file(tmp_path / "stock" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(x.dtype == tensors[name].dtype and torch.equal(x, tensors[name]) for name, x in written.items())
    assert json.loads((tmp_path / "stock" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_process_without_approx_loads_model_and_tokenizer(converted, tmp_path):
    folder = converted("BertForSequenceClassification", longformer())
    export.export(folder, tmp_path / "stock", format="stock")
    program = (
        "import sys; sys.modules['approx'] = sys.modules['approx_kernels'] = None\n"
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
        f"model = AutoModelForSequenceClassification.from_pretrained({str(tmp_path / 'stock')!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / 'stock')!r})\n"
        "text = tokenizer('a good film', return_tensors='pt')\n"
        "print(type(model).__name__, model(**text).logits.tolist(), text['input_ids'].tolist())"
    )
    done = run("-c", program)
    name, rest = done.stdout.split(" ", 1)
    assert name == "LongformerForSequenceClassification", done.stderr
    model = checkpoint.load(folder).model
    with torch.no_grad():
        text = words()("a good film", return_tensors="pt")
        expected = model(**text).logits
    logits, ids = rest.split("]] ", 1)
    assert json.loads(ids) == text["input_ids"].tolist()
    assert torch.allclose(torch.tensor(json.loads(logits + "]]")), expected, atol=1e-6)


def test_which_tokens_have_to_be_marked_is_said(converted, tmp_path):
    made = exported(converted("BertForMaskedLM", longformer()), tmp_path / "stock")
    assert made.global_attention_mask == "1 at the first token and 0 elsewhere"
    (note,) = [note for note in made.notes if "global_attention_mask" in note]
    assert "without it, LongformerForMaskedLM marks no token" in note
    inputs = example_inputs(model := checkpoint.load(tmp_path / "converted").model, 40)
    other: Any = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "stock")
    mask = torch.zeros_like(inputs["input_ids"])
    mask[:, 0] = 1
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.allclose(other(**inputs, global_attention_mask=mask).logits, expected, atol=1e-5)
        assert not torch.allclose(other(**inputs).logits, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("architecture", "config", "rules", "marked"),
    [
        # It marks the first token by itself.
        ("BertForSequenceClassification", {}, [longformer()], None),
        ("BertForSequenceClassification", {}, [both()], "0 everywhere"),
        ("RobertaForQuestionAnswering", {}, [both()], "0 everywhere"),
        ("BertForTokenClassification", {}, [both()], None),
    ],
)
def test_a_mask_is_asked_for_only_where_the_class_marks_other_tokens(architecture, config, rules, marked):
    model = tiny(architecture, **config)
    found = stock.of_plan(model.config, type(model), Plan(tuple(rules))).marks
    assert (found and found.said) == marked


def test_a_plan_of_exact_layers_is_its_base(converted, tmp_path):
    made = exported(converted("GPT2LMHeadModel", Rule("flash", "0-1", {})), tmp_path / "stock")
    assert (made.architecture, made.window, made.layers) == ("GPT2LMHeadModel", None, "")
    base, written = tiny("GPT2LMHeadModel").state_dict(), load_file(tmp_path / "stock" / "model.safetensors")
    assert all(torch.equal(x, base[name]) for name, x in written.items())


@pytest.mark.parametrize(
    ("architecture", "config", "rules", "said"),
    [
        ("LlamaForCausalLM", {}, [local("0", 7), local("1-2", 9)],
         ["8 tokens in layer 0; 10 tokens in layers 1-2", "Allowed for llama", "one window"]),
        ("LlamaForCausalLM", {}, [Rule("linear", "0", {}), local("1")], ["(layer 0: linear)", "Allowed for llama"]),
        ("LlamaForCausalLM", {}, [Rule("local", "0-1", {"left": 7}, heads="0-1")],
         ["layers 0-1: local (left 7) and sdpa in groups of heads", "for all heads of a layer"]),
        ("LlamaForCausalLM", {"attention_bias": True}, [local()], ["attention_bias=True", "ministral, whose layers have no biases"]),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": [SLIDING, FULL, FULL]}, [local("1", 4)],
         ["8 tokens in layer 0; 5 tokens in layer 1"]),
        ("Gemma3ForCausalLM", {"layer_types": [SLIDING, SLIDING, FULL]}, [local("2")],
         ["own sliding layers (0-1)", "rope_parameters", "(2)"]),
        ("GPT2LMHeadModel", {}, [local()], ["layers 0-2: local (left 7)", "Allowed for gpt2, for all heads of a layer: exact"]),
        ("BertModel", {}, [local(left=4, right=3)], ["local (left 4, right 3)", "local with left = right"]),
        ("BertModel", {}, [both("0-1")], ["layer 2: exact attention", "a Longformer has a window in every layer"]),
        ("BertModel", {}, [longformer("0-1"), longformer("2", window=6)], ["which the others have to divide"]),
        ("BertModel", {}, [longformer("0-1"), longformer("2", global_tokens=[3])], ["the same global tokens in every layer"]),
        ("BertModel", {}, [longformer(window=1)], ["window 1", "window 2 or more"]),
        ("BertModel", {}, [Rule("longformer", "all", {"window": 8}, exact_below=40)], ["exact below 40 tokens"]),
        ("BertModel", {}, [bigbird(0)], ["bigbird (block 4, random 1, compatible True)", "--exact-below (5 + 2 x random) x block + 1"]),
        ("BertModel", {}, [bigbird(compatible=False)], ["compatible False"]),
        ("BertForSequenceClassification", {}, [bigbird()], ["BigBirdForSequenceClassification: its head has"]),
        ("BertForPreTraining", {}, [longformer()], ["no LongformerForPreTraining"]),
        ("BertForMaskedLM", {"hidden_act": "relu"}, [longformer()], ["its head has gelu in place of relu"]),
        ("ElectraModel", {}, [longformer()], ["Allowed for electra"]),
    ],
)  # fmt: skip
def test_what_no_architecture_has_is_refused_by_layer_and_mechanism(architecture, config, rules, said):
    error = refused(architecture, *rules, **config)
    assert [words for words in said if words not in error] == []


def test_nothing_is_written_where_something_is_refused(converted, tmp_path, monkeypatch):
    folder = converted("LlamaForCausalLM", local("0"), local("1", 9))
    for wrong, name, code in (
        (folder, "stock", Exit.UNSUPPORTED),
        ("quickstart", "stock", Exit.REFUSED),
        (folder, "converted", Exit.REFUSED),
    ):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ApproxError) as error:
            export.export(wrong, tmp_path / name, format="stock")
        assert error.value.exit_code == code
        assert sorted(tmp_path.iterdir()) == before


def test_a_checkpoint_that_computes_something_else_is_discarded(converted, tmp_path, monkeypatch):
    honest = stock._window
    monkeypatch.setattr(stock, "_window", lambda layer: honest(layer) + 1)
    with pytest.raises(
        ApproxError, match=r"As a MinistralForCausalLM, .* computes something else, at .*3 x 40"
    ) as error:
        export.export(converted("LlamaForCausalLM", local()), tmp_path / "stock", format="stock")
    assert error.value.exit_code == Exit.VERIFICATION
    assert not (tmp_path / "stock").exists()


def test_every_engine_says_where_its_support_was_read():
    assert [engine.name for engine in stock.ENGINES] == ["vLLM", "SGLang", "llama.cpp", "MLX-LM"]
    for engine in stock.ENGINES:
        assert engine.source
        assert engine.read
        assert all(hasattr(transformers, architecture) for architecture in engine.runs)
    assert {*stock.engines("T5Model").values()} == {"not known"}


def test_mixes_are_what_one_architecture_expresses():
    llama, bert = tiny("LlamaForCausalLM"), tiny("BertModel")
    rules = [local(left=4), Rule("linear", settings={}), local(left=8), Rule("sdpa", settings={})]
    found = stock.mixes(llama.config, type(llama), rules)
    assert {mix.rules for mix in found} == {(0, 3), (2, 3)}
    assert all(mix.exact for mix in found)
    rules = [longformer(window=4), longformer(), longformer(window=6), both(), Rule("block", settings={"size": 4})]
    found = stock.mixes(bert.config, type(bert), rules)
    assert {mix.rules for mix in found} == {(0, 1), (2,), (3,)}
    assert not any(mix.exact for mix in found)
    with pytest.raises(ApproxError, match=r"expresses linear here\. Allowed for llama"):
        stock.mixes(llama.config, type(llama), [Rule("linear", settings={})])


def test_layers_are_numbered_as_the_anatomy_does():
    model = tiny("Qwen3ForCausalLM", use_sliding_window=True, layer_types=[FULL, SLIDING, FULL])
    found = stock.of_plan(model.config, type(model), Plan((local("2"),)))
    assert found.config.layer_types == [FULL, SLIDING, SLIDING]
    assert [site.window for site in anatomy(found.config, found.kind).sites] == [None, 8, 8]
