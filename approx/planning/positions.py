"""What a model takes: example inputs, its longest input, and extending a learned position table without changing the outputs of short inputs."""

from bisect import bisect_left
from collections.abc import Mapping
from inspect import Parameter, signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from approx.errors import ApproxError, Exit
from approx.seam.internals import subsampled_length

_RATE = 16_000


def example_inputs(
    model: Any, length: int, *, batch: int = 1, padded: int = 0, seed: int = 0, device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Random inputs that give about `length` positions in the model's attention.

    Args:
        model: A transformers model. Its config, its dtype, the signature of its forward and, for spectrograms, its first layer
            tell what it takes.
        length: Positions of each row: tokens, or frames of speech. The config sets the size of images and of Whisper's spectrograms.
        batch: Number of rows.
        padded: Padded positions at the right end of the last row, filled as a tokenizer would; the result then has an
            `attention_mask`.
        seed: Seed of the random content.
        device: Device of the tensors; "meta" for shapes only.

    Returns:
        Keyword arguments of the model's forward, without labels.

    Raises:
        ApproxError: if the model takes an unknown kind of input, or requires another one besides.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    config, accepted = model.config, signature(model.forward).parameters
    kind = main_input(model)
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

    # Input steps of a position where the length is free.
    steps = 0
    if kind == "input_ids":
        inputs, steps = {kind: tokens(length)}, 1
    elif kind == "input_values" and hasattr(config, "num_mel_bins"):
        # A spectrogram of one size, as an image.
        inputs = {kind: real(batch, config.max_length, config.num_mel_bins)}
    elif kind == "input_values" and "padding_mask" in accepted:
        # Sound with a dimension of its channels, as for codecs.
        ratios = getattr(config, "upsampling_ratios", None)
        size = length * prod(ratios) if ratios else samples(model, length)
        inputs = {kind: real(batch, getattr(config, "audio_channels", 1), size)}
    elif kind == "input_values":
        inputs, steps = {kind: real(batch, samples(model, length))}, samples(model, 2) - samples(model, 1)
    elif kind == "input_features":
        bands, first = _spectrogram(model)
        if first and hasattr(config, "max_source_positions"):
            frames = 2 * config.max_source_positions
        else:
            # The two convolutions of Whisper's encoder halve the frames.
            frames = 2 * length if first else _size_for(model, length)
            steps = 0 if first else _size_for(model, 2) - _size_for(model, 1)
        inputs = {kind: real(batch, bands, frames) if first else real(batch, frames, bands)}
        if (mask := "input_features_mask") in accepted:
            inputs[mask] = torch.ones(batch, frames, dtype=torch.long)
    elif kind == "pixel_values":
        size = getattr(config, "image_size", None) or _USUAL_SIDE
        sides = (size, size) if isinstance(size, int) else tuple(size)
        frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
        inputs = {kind: real(batch, *frames, getattr(config, "num_channels", 3), *sides)}
    else:
        raise ApproxError(
            f"{type(model).__name__} takes '{kind}'; supported inputs are {', '.join(_KINDS[:-1])} and {_KINDS[-1]}.",
            Exit.UNSUPPORTED,
        )
    # Some families derive missing decoder tokens from the encoder's, others require them.
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        # The length may be that of the encoder, whose positions are more than the decoder's.
        most = length if kind == "input_ids" else limit(config) or length
        inputs["decoder_input_ids"] = tokens(min(length, most))
    _refuse_other_inputs(model, accepted, inputs)
    if padded and steps and "input_features_mask" not in inputs:
        shape = inputs[kind].shape[:2]
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.long)
        inputs["attention_mask"][-1, shape[1] - padded * steps :] = 0
        blank = (getattr(config, "pad_token_id", None) or 0) if kind == "input_ids" else 0
        inputs[kind][-1, shape[1] - padded * steps :] = blank
    return {name: tensor.to(device) for name, tensor in inputs.items()}


_KINDS = ("input_ids", "input_values", "input_features", "pixel_values")
# Pixels of a side where the config does not name them, since every size is allowed.
_USUAL_SIDE = 224


def main_input(model: Any) -> str:
    """The name of the main input of a model, or of a model class; some classes do not name theirs correctly."""
    name, accepted = model.main_input_name, signature(model.forward).parameters
    return name if name in accepted else next((kind for kind in _KINDS if kind in accepted), name)


def _refuse_other_inputs(model: Any, accepted: Mapping[str, Parameter], inputs: dict[str, Tensor]) -> None:
    """Refuse a model whose forward requires more than these inputs."""
    named = (one for one in accepted.values() if one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD))
    missing = [one.name for one in named if one.default is Parameter.empty and one.name not in inputs]
    asked = missing if "pixel_values" not in inputs else accepted
    if packed := [name for name in asked if name.endswith(("grid_thw", "target_sizes", "spatial_shapes"))]:
        raise ApproxError(
            f"{type(model).__name__} takes the patches of several images packed into one row ({packed[0]}), which no mechanism "
            "supports. It cannot be converted.",
            Exit.UNSUPPORTED,
        )
    if missing:
        raise ApproxError(
            f"{type(model).__name__} requires {' and '.join(missing)}; of a model's inputs, approx makes tokens, sound and images "
            "alone. It cannot be converted.",
            Exit.UNSUPPORTED,
        )


def _spectrogram(model: Any) -> tuple[int, bool]:
    """Bands of the spectrograms that a model takes, and whether they are [B, bands, frames], as for Whisper, or [B, frames, bands].

    Its first layer tells: a convolution over the frames, a projection of the bands, or else an image of both.
    """
    config = model.config
    layer = next((one for one in model.modules() if isinstance(one, nn.Linear | nn.Conv1d | nn.Conv2d)), None)
    if isinstance(layer, nn.Conv1d):
        # Speech2Text transposes its input for it.
        return layer.in_channels, not hasattr(config, "input_feat_per_channel")
    if isinstance(layer, nn.Linear):
        # It may join the bands of several frames.
        return layer.in_features // getattr(config, "subsampling_factor", 1), False
    if not hasattr(config, "num_mel_bins"):
        raise ApproxError(
            f"The config of {type(model).__name__} does not name the bands of its spectrograms (num_mel_bins), so no input can be "
            "made for it. It cannot be converted.",
            Exit.UNSUPPORTED,
        )
    return config.num_mel_bins, False


def samples(model: Any, length: int) -> int:
    """Audio samples that give exactly `length` positions in the attention of a model that takes `input_values`."""
    config = model.config
    if not hasattr(config, "conv_stride"):
        return _size_for(model, length)
    # The first frame's receptive field is longer than the stride between frames.
    receptive = 1
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        receptive = (receptive - 1) * stride + kernel
    return (length - 1) * prod(config.conv_stride) + receptive


def _size_for(model: Any, length: int) -> int:
    """The smallest size of an input that gives `length` positions, of samples or frames; `length` if the family tells no other."""
    positions = subsampled_length(model)
    if positions is None:
        return length
    most = length
    while positions(most) < length:
        most *= 2
    return bisect_left(range(most), length, key=positions)


def seconds_per_position(config: Any, input_name: str) -> float | None:
    """Seconds of sound in one position of the attention, for models that read sound of any length; else None."""
    # Configs do not tell the rate; every model of these families was trained at this one.
    strides = getattr(config, "conv_stride", None)
    return prod(strides) / _RATE if input_name == "input_values" and strides else None


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
