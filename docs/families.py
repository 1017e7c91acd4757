"""Write docs/families.md: which model types of the installed transformers convert, and why the others do not.

`python docs/families.py [TYPE ...]` tries every model type, or these alone, and writes their lines. Each gets a config with small sizes and
random weights; it "converts" only if, with a mechanism at its exact limit, it gives the outputs of the original.
"""

import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In a checkout that is not installed, both packages lie in the folder above.
sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in (".", "kernels"))

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from approx.conversion import surgery, verify
from approx.errors import ApproxError
from approx.mechanisms import MECHANISMS
from approx.planning.anatomy import Anatomy, anatomy
from approx.planning.plan import Plan, Rule
from approx.seam.internals import auto_classes

PAGE = Path(__file__).resolve().with_suffix(".md")
# Of the classes of a type, that of the first of these auto classes is tried, or else any.
_HEADS = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForCTC",
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
    "AutoModel",
)
# Sizes by the name of a setting; the first pattern that fits counts.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"(^|_)vocab_size$|^vocab_size_", 101),
    (r"(key_value|kv)_heads$|^num_kv_heads|^multi_query_group_num$", 2),
    (r"(experts_per_tok|top_k|topk|num_selects|moe_k)", 2),
    (r"(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_experts)$", 4),
    (r"^(n_group|topk_group|num_expert_groups?)$", 1),
    (r"(^n_head|n_heads|num_heads|attention_heads)$", 4),
    (r"^(rotary_dim|sliding_window|attention_chunk_size|local_attention)$", 8),
    (r"(head_dim|head_size|d_kv|kv_channels|attention_head_dim)$", 8),
    (r"^(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|emb_dim|hidden_dim|encoder_hidden_size|decoder_hidden_size|"
     r"word_embed_proj_dim|projection_dim|vision_hidden_size|text_hidden_size|d_embed|embedding_dim|encoder_embed_dim|model_dim)$", 32),
    (r"(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|d_inner|mlp_dim|ffn_embed_dim)$", 48),
    (r"^(image_size|img_size|input_size)$", 24),
    (r"patch_size$", 8),
    (r"^(max_source_positions)$", 24),
    (r"^(max_target_positions)$", 48),
    (r"^(num_mel_bins|feature_size)$", 16),
)  # fmt: skip
_LAYERS = re.compile(
    r"^(num_(hidden_)?layers|n_layers?|n_layer|num_(encoder|decoder)_layers|(encoder|decoder)_layers|depth|num_blocks)$"
)
# What the sizes alone do not make consistent.
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": None, "sliding_attention": {**_ROPE, "mrope_section": [2, 1, 1]}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    "glm4v_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "glm_image_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "granite_docling_vision": {"image_size": 64, "deepstack_visual_indexes": [0, 1, 1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "xmod": {"default_language": "en_XX"},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 6,
    },
}
# Types whose config has no default: those of their parts.
_PARTS_OF = {
    "encoder-decoder": ("bert", "bert"),
    "vision-encoder-decoder": ("vit", "gpt2"),
    "speech-encoder-decoder": ("wav2vec2", "bert"),
    "vision-text-dual-encoder": ("vit", "bert"),
}
# What some types leave open.
_OPEN: dict[str, Any] = {
    "vocab_size": 101,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "prediction_length": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Row:
    """The answer for one model type.

    Attributes:
        family: The model type.
        architecture: The class that was tried; empty if no auto class builds a model of this type.
        answer: `converts`, `refused`, `found` (its layers were found, but no small model could be checked), `unknown` (no config made
            here runs), `differs` (the check fails, so `approx convert` ends with exit code 6), or `part` (of other models,
            without a class of its own).
        detail: The forms of the layers that convert, and what stays; or the reason.
    """

    family: str
    architecture: str
    answer: str
    detail: str

    def __str__(self) -> str:
        return f"| `{self.family}` | {self.architecture} | {self.answer} | {self.detail} |"


def row(family: str) -> Row:
    """Try one model type."""
    classes = auto_classes(family)
    order = [*(head for head in _HEADS if head in classes), *sorted(classes)]
    kind = next((made for auto in order if (made := getattr(transformers, classes[auto], None)) is not None), None)
    if kind is None:
        return Row(family, "", "part", "")

    def answer(verdict: str, detail: str) -> Row:
        return Row(family, kind.__name__, verdict, detail.replace("|", "/"))

    try:
        config = tiny_config(family)
        facts = anatomy(config, kind)
    except Exception as error:
        if isinstance(error, ApproxError) and "could not be run" not in str(error):
            return answer("refused", _reason(error, kind))
        return answer(*_without_check(family, kind))
    text = _layers(facts)
    try:
        torch.manual_seed(0)
        model = kind(config).eval()
        check = verify.exact_limit(model, _PLAN)
        wrong = None if check.passed else check.detail
        if wrong is None and facts.sites[0].causal and model.can_generate() and model.main_input_name == "input_ids":
            wrong = _differing_tokens(model)
    except ApproxError as error:
        return answer("refused", _reason(error, kind))
    except Exception as error:
        return answer("found", f"{text}; not checked: {_shortened(error)}")
    return answer("differs", f"{text}; {wrong}") if wrong else answer("converts", text)


_PLAN = Plan((Rule("local", settings=MECHANISMS["local"].exact_settings(verify.LONGEST) or {}),))


def _differing_tokens(model: Any) -> str | None:
    """What is wrong with the tokens that the converted model generates; None if they are those of the original."""
    ids = torch.randint(5, 90, (2, 10), generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **how)
    surgery.exchange(model, _PLAN)
    return None if torch.equal(model.generate(ids, **how), expected) else "generates other tokens"


def _without_check(family: str, kind: type) -> tuple[str, str]:
    """The answer for the default sizes, without weights, where small ones do not fit together."""
    try:
        facts = anatomy(tiny_config(family, sizes=False), kind)
    except ApproxError as error:
        return "unknown" if "could not be run" in str(error) else "refused", _reason(error, kind)
    except Exception as error:
        return "unknown", f"its default config cannot be made: {_shortened(error)}"
    return "found", f"{_layers(facts)}; not checked: no small model was made"


def tiny_config(family: str, *, sizes: bool = True) -> Any:
    """A config of a model type with small sizes, or only with few layers."""
    kind = CONFIG_MAPPING[family]
    if family in _PARTS_OF:
        names = ("vision_config", "text_config") if family.startswith("vision-text") else ("encoder", "decoder")
        parts = (tiny_config(part).to_dict() for part in _PARTS_OF[family])
        return kind(**dict(zip(names, parts, strict=True)))
    return kind(**{**_smaller(kind(), sizes), **_CHANGES.get(family, {})})


def _smaller(config: Any, sizes: bool) -> dict[str, Any]:
    """The settings of a config that are to change, those of its parts included."""
    changes: dict[str, Any] = {}
    values = vars(config)
    kinds = list(getattr(config, "layer_types", None) or ())
    layers = max([2, *(kinds.index(one) + 1 for one in set(kinds))])
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = {**_smaller(value, sizes), "model_type": value.model_type}
        elif value is None and name in _OPEN:
            changes[name] = _OPEN[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            if _LAYERS.search(name):
                changes[name] = layers
            elif not sizes:
                continue
            elif name.endswith(("_token_id", "_token_index")):
                changes[name] = min(value, 90)
            elif value > 0 and (fitting := [size for pattern, size in _SIZES if re.search(pattern, name)]):
                changes[name] = min(fitting[0], value)
    for name in changes.keys() & values if sizes else ():
        heads = name.replace("key_value", "attention")
        if name.endswith("num_key_value_heads") and values[name] == values.get(heads, 0):
            changes[name] = changes[heads]
    if sizes and "qk_head_dim" in changes:
        changes["qk_head_dim"] = changes["qk_nope_head_dim"] + changes["qk_rope_head_dim"]
    if sizes and "mrope_section" in (rope := values.get("rope_parameters") or {}):
        changes["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    for name in {"layer_types", "layers_block_type"} & values.keys() if kinds else ():
        changes[name] = kinds[:layers]
    return changes


def _layers(facts: Anatomy) -> str:
    """The forms of the layers that convert, and what stays."""
    text = ", ".join(dict.fromkeys("causal" if site.causal else "bidirectional" for site in facts.convertible))
    stays = sorted({re.sub(r" of [0-9,]+ tokens.*", "", site.kept) for site in facts.sites if site.kept})
    text += f"; layers with {' or '.join(stays)} stay" if stays else ""
    return text + ("; cross-attention stays" if facts.cross_attention else "")


def _reason(error: Exception, kind: type) -> str:
    """The first sentence of a refusal, without the name of the model."""
    text = re.sub(rf"^{kind.__name__}( \(family '[^']*'\))? ", "", str(error))
    text = re.split(r"(?<=[a-z)'\]])\. ", text)[0].replace(
        "could not be run on example inputs to locate its attention", "does not run"
    )
    return text if len(text) < 240 else f"{text[:236]} …"


def _shortened(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def read_page() -> dict[str, Row]:
    """The lines of the page as it is; empty without one."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    lines = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    found = {line[0]: Row(*line) for line in lines}
    parts = text.partition(_PARTS)[2].partition(_UNTRIED)[0]
    return found | {name: Row(name, "", "part", "") for name in re.findall(r"`([^`]+)`", parts)}


_UNTRIED = "Not tried yet:"
_PARTS = "Parts of other models, without a class of their own:"


def page(rows: dict[str, Row]) -> str:
    """The text of the page."""
    own = [one for _, one in sorted(rows.items()) if one.answer != "part"]
    counts = {
        answer: sum(one.answer == answer for one in own)
        for answer in ("converts", "refused", "found", "unknown", "differs")
    }
    lines = "\n".join(map(str, own))
    parts = ", ".join(f"`{name}`" for name, one in sorted(rows.items()) if one.answer == "part")
    untried = ", ".join(f"`{name}`" for name in sorted(set(stock_types()) - rows.keys()))
    return f"""# Families

What `approx inspect` and `approx convert` answer for the model types of transformers {transformers.__version__}, with the default settings
of each and small sizes. `python docs/families.py` makes this page; settings of a checkpoint, such as windows or soft-capping, may change
its answer.

- **converts** ({counts["converts"]}): with a mechanism at its exact limit a model with random weights gives the outputs of the original and,
  where it is a decoder of text, the same tokens with a cache.
- **refused** ({counts["refused"]}): with this reason, by `inspect` and `convert` alike.
- **found** ({counts["found"]}): its layers are found, but no small model could be made here to check it. `approx convert` checks yours.
- **unknown** ({counts["unknown"]}): no config made here runs on example inputs, or its inputs are of a kind that approx does not make.
  `inspect` answers for a checkpoint.
- **differs** ({counts["differs"]}): `approx convert` refuses it after this check (exit code 6).

| model type | class | answer | layers, or the reason |
|---|---|---|---|
{lines}

{_PARTS} {parts}.
""" + (f"\n{_UNTRIED} {untried}.\n" if untried else "")


def stock_types() -> list[str]:
    """The model types of transformers, without those of converted checkpoints, which `import approx` adds."""
    return [family for family in CONFIG_MAPPING if not family.startswith("approx_")]


def main(families: list[str]) -> None:
    """Try model types and write their lines."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    rows = {name: one for name, one in read_page().items() if name in stock_types()}
    for family in families:
        rows[family] = row(family)
        print(rows[family], flush=True)
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or stock_types())
