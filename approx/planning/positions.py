"""Position tables: the longest input, and extending a learned table without changing the outputs of short inputs."""

from typing import Any

import torch
from torch import nn

from approx.errors import ApproxError, Exit

# Only learned tables: Wav2Vec2 and HuBERT have convolutional positions, Llama rotary ones, ViT and Whisper a fixed grid.
# Attention over more keys than this is out of reach for years.
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
    "roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "data2vec-text", "xmod", "layoutlmv3", "markuplm",
)  # fmt: skip
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
            f"{architecture} has no position table and accepts any length. Leave out --max-length.",
            Exit.UNSUPPORTED,
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
