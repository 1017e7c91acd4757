"""What a model takes: example inputs, its longest input, and extending a learned position table without changing the outputs of short inputs."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from approx.errors import ApproxError, Exit

_RATE = 16_000


def example_inputs(
    model: Any, length: int, *, batch: int = 1, padded: int = 0, seed: int = 0, device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Random inputs that give about `length` positions in the model's attention.

    Args:
        model: A transformers model; only its config, its dtype and the signature of its forward are read.
        length: Positions of each row: tokens, or frames of speech. The config sets the size of images and spectrograms.
        batch: Number of rows.
        padded: Padded positions at the right end of the last row, filled as a tokenizer would; the result then has an
            `attention_mask`.
        seed: Seed of the random content.
        device: Device of the tensors; "meta" for shapes only.

    Returns:
        Keyword arguments of the model's forward, without labels.

    Raises:
        ApproxError: if the model takes an unknown kind of input.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    config, kind = model.config, model.main_input_name
    shapes_alone = torch.device(device).type == "meta"

    def tokens(size: int) -> Tensor:
        if shapes_alone:
            return torch.empty(batch, size, dtype=torch.long, device=device)
        # Low ids are special tokens in most vocabularies; RoBERTa derives positions from the padding id.
        # A model of several parts has the vocabulary of its text model.
        vocabulary = config.get_text_config().vocab_size
        return torch.randint(min(5, vocabulary - 1), vocabulary, (batch, size), generator=generator)

    def real(*shape: int) -> Tensor:
        # The sizes come from an unchecked config, so avoid allocating memory when shapes suffice.
        if shapes_alone:
            return torch.empty(shape, device=device, dtype=model.dtype)
        return torch.randn(*shape, generator=generator).to(model.dtype)

    if kind == "input_ids":
        inputs, positions_per_step = {"input_ids": tokens(length)}, 1
        # Some families derive missing decoder tokens from the encoder's, others require them.
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in signature(model.forward).parameters:
            inputs["decoder_input_ids"] = tokens(length)
    elif kind == "input_values" and not hasattr(config, "inputs_to_logits_ratio") and hasattr(config, "num_mel_bins"):
        # A spectrogram of one size, as an image.
        inputs, positions_per_step = {kind: real(batch, config.max_length, config.num_mel_bins)}, 0
    elif kind == "input_values":
        positions_per_step = config.inputs_to_logits_ratio
        inputs = {"input_values": real(batch, samples(config, length))}
    elif kind == "input_features":
        frames = 2 * config.max_source_positions
        # The length may be that of the encoder, whose positions are more than the decoder's.
        most = limit(config) or length
        inputs = {"input_features": real(batch, config.num_mel_bins, frames)}
        inputs["decoder_input_ids"] = tokens(min(length, most))
        positions_per_step = 0
    elif kind == "pixel_values":
        size = config.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
        inputs = {"pixel_values": real(batch, *frames, config.num_channels, *sides)}
        positions_per_step = 0
    else:
        raise ApproxError(
            f"{type(model).__name__} takes '{kind}'; supported inputs are input_ids, input_values, input_features and "
            "pixel_values.",
            Exit.UNSUPPORTED,
        )
    if padded and positions_per_step:
        start = inputs[kind].shape[1] - padded * positions_per_step
        inputs["attention_mask"] = torch.ones(inputs[kind].shape, dtype=torch.long)
        inputs["attention_mask"][-1, start:] = 0
        inputs[kind][-1, start:] = (getattr(config, "pad_token_id", None) or 0) if kind == "input_ids" else 0
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def samples(config: Any, length: int) -> int:
    """Audio samples that give exactly `length` positions in the attention of Wav2Vec2 and similar models."""
    # The first frame's receptive field is longer than the stride between frames.
    receptive = 1
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        receptive = (receptive - 1) * stride + kernel
    return (length - 1) * config.inputs_to_logits_ratio + receptive


def seconds_per_position(config: Any, input_name: str) -> float | None:
    """Seconds of sound in one position of the attention, for models that read sound of any length; else None."""
    # Configs do not tell the rate; every model of these families was trained at this one.
    ratio = getattr(config, "inputs_to_logits_ratio", None)
    return ratio / _RATE if input_name == "input_values" and ratio else None


# Only learned tables: Wav2Vec2 and HuBERT have convolutional positions, Llama rotary ones, ViT and Whisper a fixed
# grid. Attention over more keys than this is out of reach for years.
_MOST = 10_000_000
_TABLES = {
    "bert": "embeddings.position_embeddings",
    "roberta": "embeddings.position_embeddings",
    "xlm-roberta": "embeddings.position_embeddings",
    "electra": "embeddings.position_embeddings",
    "distilbert": "embeddings.position_embeddings",
    "gpt2": "wpe",
}
_OFFSET_FAMILIES = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "data2vec-text",
    "xmod",
    "layoutlmv3",
    "markuplm",
)
_UNLIMITED_FAMILIES = ("wav2vec2", "hubert", "vit")


def _family(config: Any) -> str:
    return config.model_type.removeprefix("approx_")


def _offset(config: Any) -> int:
    """Rows in front of the first usable position: RoBERTa counts positions from padding_idx + 1."""
    return config.pad_token_id + 1 if _family(config) in _OFFSET_FAMILIES else 0


def limit(config: Any) -> int | None:
    """Longest input in tokens that the position table of this config allows; None without a table."""
    family = _family(config)
    if family in _UNLIMITED_FAMILIES:
        return None
    rows = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    return None if rows is None else rows - _offset(config)


def has_table(family: str) -> bool:
    """Whether models of a family have a learned position table, which can be extended."""
    return family in _TABLES


def extendable(config: Any, architecture: str, length: int) -> int:
    """Check that the positions of a model can be extended, from its config alone.

    Args:
        config: Config of the model.
        architecture: Name of its class, for errors.
        length: Usable positions afterwards, in tokens.

    Returns:
        Usable positions before.

    Raises:
        ApproxError: if it has no learned position table or one that is already this long, or the length is absurd.
    """
    before = limit(config)
    if before is None:
        raise ApproxError(
            f"{architecture} has no position table and accepts any length. Leave out --max-length.", Exit.UNSUPPORTED
        )
    _table(config)
    if length <= before:
        raise ApproxError(
            f"--max-length is {length}, but {architecture} already takes {before} positions. "
            "Give a larger number, or leave it out."
        )
    if length > _MOST:
        raise ApproxError(
            f"--max-length is {length:,}, but a table of more than {_MOST:,} positions is refused. Give less."
        )
    return before


def _table(config: Any) -> str:
    """Path of the learned position table inside the base model."""
    family = _family(config)
    if family not in _TABLES:
        raise ApproxError(
            f"Positions of the family '{family}' cannot be extended: it has no learned position table. Families that have one: "
            f"{', '.join(_TABLES)}. Leave out --max-length.",
            Exit.UNSUPPORTED,
        )
    return _TABLES[family]


def resize(model: Any, length: int) -> None:
    """Set the learned position table of `model` to `length` usable positions, in place.

    A longer table repeats the old rows, so inputs that fit the old one give bit-identical outputs; a shorter one keeps
    the first rows.

    Args:
        model: A transformers model of the BERT, RoBERTa, XLM-R, ELECTRA, DistilBERT or GPT-2 family.
        length: Usable positions afterwards, in tokens.

    Raises:
        ApproxError: if the family has no learned position table.
    """
    config = model.config
    path, offset = _table(config), _offset(config)
    base = model.base_model
    old = base.get_submodule(path)
    rows = old.weight.data
    usable = rows[offset:]
    repeats = -(-length // usable.shape[0])
    table = torch.cat([rows[:offset], usable.repeat(repeats, 1)[:length]])
    new = nn.Embedding(table.shape[0], table.shape[1], padding_idx=old.padding_idx, _weight=table)
    new.weight.requires_grad_(old.weight.requires_grad)
    parent, _, name = path.rpartition(".")
    holder = base.get_submodule(parent)
    setattr(holder, name, new)
    _resize_buffers(holder, table.shape[0])
    # GPT-2 calls it n_positions; its config maps this name onto it.
    config.max_position_embeddings = table.shape[0]


def _resize_buffers(embeddings: nn.Module, rows: int) -> None:
    """Resize the buffers that are indexed by position, which must be as long as the table."""
    device = next(embeddings.parameters()).device
    if getattr(embeddings, "position_ids", None) is not None:
        embeddings.register_buffer("position_ids", torch.arange(rows, device=device)[None], persistent=False)
    if getattr(embeddings, "token_type_ids", None) is not None:
        zeros = torch.zeros(1, rows, dtype=torch.long, device=device)
        embeddings.register_buffer("token_type_ids", zeros, persistent=False)
