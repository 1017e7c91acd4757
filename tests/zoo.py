"""One tiny model with random weights for each family and task head that must be convertible."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from approx.errors import ApproxError
from approx.mechanisms import MECHANISMS
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "num_labels": 2,
}
_SPEECH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "layerdrop": 0.0,
}
# Special tokens of the full vocabularies are outside the tiny one.
_GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 101,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 101,
}
_LLAMA: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WINDOWS: dict[str, Any] = {**_LLAMA, "head_dim": 8, "sliding_window": 8}
_CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": _TEXT,
    "Roberta": {**_TEXT, "max_position_embeddings": 66},
    "XLMRoberta": {**_TEXT, "max_position_embeddings": 66},
    "DistilBert": {
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 48,
        "vocab_size": 101,
        "max_position_embeddings": 64,
    },
    "Electra": {**_TEXT, "embedding_size": 16},
    "ModernBert": {
        **_TEXT,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "cls", "sep"))},
    },
    "GPT2": _GPT2,
    "Llama": _LLAMA,
    "Mixtral": {**_LLAMA, "num_local_experts": 4, "sliding_window": None},
    "ModernBertDecoder": {**_LLAMA, "global_attn_every_n_layers": 2, "local_attention": 8},
    "Mistral": _LLAMA,
    "Gemma2": _WINDOWS,
    "Gemma3": _WINDOWS,
    "Gemma3n": {
        **_WINDOWS,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 6,
        "vocab_size_per_layer_input": 101,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "Qwen2": _WINDOWS,
    "Qwen3": _WINDOWS,
    "GptOss": {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "MiMoV2Flash": {
        **_WINDOWS,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "v_head_dim": 6,
        "swa_head_dim": 8,
        "swa_v_head_dim": 6,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Bart": {
        **_ENCODER_DECODER,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "forced_eos_token_id": None,
    },
    "Wav2Vec2": _SPEECH,
    "Hubert": _SPEECH,
    "ViT": {**_TEXT, "image_size": 24, "patch_size": 4},
    "Whisper": {
        **_ENCODER_DECODER,
        "num_mel_bins": 8,
        "max_source_positions": 24,
        "max_target_positions": 48,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}

# One per family, with its most common head.
FAMILIES = (
    "BertForSequenceClassification",
    "RobertaForQuestionAnswering",
    "XLMRobertaForTokenClassification",
    "DistilBertForSequenceClassification",
    "ElectraForSequenceClassification",
    "ModernBertForSequenceClassification",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "Wav2Vec2ForCTC",
    "HubertForCTC",
    "ViTForImageClassification",
    "WhisperForConditionalGeneration",
)
OTHER_HEADS = (
    "BertModel",
    "BertForMaskedLM",
    "BertForQuestionAnswering",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "DistilBertForQuestionAnswering",
    "ElectraForTokenClassification",
    "GPT2ForSequenceClassification",
    "GPT2Model",
    "LlamaForSequenceClassification",
    "ModernBertForMaskedLM",
    "ModernBertForQuestionAnswering",
    "ModernBertForTokenClassification",
    "Wav2Vec2ForSequenceClassification",
    "Wav2Vec2Model",
)
# Families that the code does not name: an encoder-decoder, a mixture of experts.
UNNAMED = ("BartForConditionalGeneration", "MixtralForCausalLM")
CAUSAL = tuple(name for name, kind in MECHANISMS.items() if kind.supports_causal)


def tiny(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A model of this architecture in evaluation mode; the same seed gives the same weights."""
    family = max((name for name in _CONFIGS if architecture.startswith(name)), key=len)
    kind = getattr(transformers, architecture)
    config = kind.config_class(**{**_CONFIGS[family], **changes})
    torch.manual_seed(seed)
    return kind(config).eval()


def outputs(model: Any, inputs: dict[str, Tensor] | None = None, **more: Any) -> list[Tensor]:
    """Every floating-point tensor of the model's output, except caches."""
    inputs = example_inputs(model, 24, batch=2, padded=7) if inputs is None else inputs
    with torch.no_grad():
        outputs = model(**inputs, **more).to_tuple()
    return [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.is_floating_point()]


def difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Largest difference between two lists of outputs."""
    assert len(first) == len(second) > 0
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(first, second, strict=True))


def error_of(action: Callable[[], Any]) -> ApproxError | None:
    """The ApproxError of an action, or None; any other exception fails the test."""
    try:
        action()
    except ApproxError as error:
        return error
    return None


def exact_plan(model: Any, mechanism: str, layers: str = "all") -> Plan | None:
    """The plan that gives a mechanism its exact settings; None if it has none or has no form for these layers."""
    limit = MECHANISMS[mechanism].exact_settings(64)
    sites = anatomy(model.config, type(model)).sites
    able = {True: MECHANISMS[mechanism].supports_causal, False: MECHANISMS[mechanism].supports_bidirectional}
    if limit is None or not all(able[site.causal] for site in sites):
        return None
    return Plan((Rule(mechanism, layers, limit),))
