"""Example inputs for any model, by its main input: tokens, audio samples, spectrograms or pixels."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from approx.errors import ApproxError, Exit
from approx.planning import positions

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
    elif kind == "input_values":
        positions_per_step = config.inputs_to_logits_ratio
        inputs = {"input_values": real(batch, samples(config, length))}
    elif kind == "input_features":
        frames = 2 * config.max_source_positions
        # The length may be that of the encoder, whose positions are more than the decoder's.
        most = positions.limit(config) or length
        inputs = {"input_features": real(batch, config.num_mel_bins, frames)}
        inputs["decoder_input_ids"] = tokens(min(length, most))
        positions_per_step = 0
    elif kind == "pixel_values":
        inputs = {"pixel_values": real(batch, config.num_channels, config.image_size, config.image_size)}
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
    return config.inputs_to_logits_ratio / _RATE if input_name == "input_values" else None
