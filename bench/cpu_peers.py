"""Other implementations of attention that run on a CPU, for one layer without projections."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
import transformers
from torch import Tensor, nn

# Mechanisms that materialise or sort all pairs are measured for reference, up to this length.
LONGEST_REFERENCE = 2048


def transformers_peers(hidden: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Longformer and BigBird of transformers with copies in place of their projections, to measure only attention."""
    from transformers.models.big_bird import modeling_big_bird as big_bird
    from transformers.models.longformer import modeling_longformer as longformer

    length = hidden.shape[1]
    config = transformers.LongformerConfig(
        attention_window=[512], num_hidden_layers=1, attention_probs_dropout_prob=0.0
    )
    windowed = _without_projections(longformer.LongformerSelfAttention(config, 0))
    is_global = torch.zeros(1, length, dtype=torch.bool)
    is_global[:, 0] = True
    state = {
        "attention_mask": is_global.to(hidden.dtype),
        "is_index_masked": torch.zeros_like(is_global),
        "is_index_global_attn": is_global,
        "is_global_attn": True,
    }
    if length % 512 == 0:
        yield "transformers Longformer", lambda: windowed(hidden, **state)[0]
    # With too few blocks for its draws, BigBird is exact attention.
    if length % 64 == 0 and length >= 1024:
        config = transformers.BigBirdConfig(block_size=64, num_random_blocks=3, attention_probs_dropout_prob=0.0)
        blocked = _without_projections(big_bird.BigBirdBlockSparseAttention(config, seed=0))
        names = ("from_blocked_mask", "band_mask", "from_mask", "to_mask")
        made = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(torch.ones_like(hidden[..., 0]), 64)
        masks: dict[str, Tensor] = dict(zip(names, made, strict=True))
        masks["to_blocked_mask"] = masks["from_blocked_mask"]
        yield "transformers BigBird", lambda: blocked(hidden, **masks)[0]


def _without_projections(module: nn.Module) -> nn.Module:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, _Copy())
    return module


class _Copy(nn.Module):
    """Projections return new memory, which the peers then write to."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def fast_transformers_peers(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The mechanisms of idiap's fast-transformers, if installed; it supports only float32.

    Without `conditional-full`, which picks one of the others by length.
    """
    try:
        made = importlib.import_module("fast_transformers.attention")
        masking = importlib.import_module("fast_transformers.masking")
    except ImportError:
        return
    if q.dtype != torch.float32:
        return
    length, size = q.shape[2:]
    everything = masking.TriangularCausalMask(length) if causal else masking.FullMask(length)
    lengths = masking.LengthMask(torch.tensor([length]))
    clusters = 25 if length <= 512 else 100
    # As many keys per query, in as many rounds, as ours.
    peers = {"idiap reformer": made.ReformerAttention(chunk_size=32, bits=8, rounds=4)} if length % 32 == 0 else {}
    if length <= LONGEST_REFERENCE:
        peers |= {"idiap full": made.FullAttention(), "idiap exact-topk": made.ExactTopKAttention(topk=32)}
    if causal:
        peers |= {
            "idiap causal linear": made.CausalLinearAttention(size),
            "idiap causal improved-clustered": made.ImprovedClusteredCausalAttention(
                clusters, iterations=10, bits=63, topk=32
            ),
        }
    else:
        peers |= {
            "idiap linear": made.LinearAttention(size),
            "idiap clustered": made.ClusteredAttention(clusters, iterations=10, bits=63),
            "idiap improved-clustered": made.ImprovedClusteredAttention(clusters, iterations=10, bits=63, topk=32),
            "idiap local": made.LocalAttention(256),
        }
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    for name, peer in peers.items():
        yield name, lambda peer=peer: peer.eval()(queries, keys, values, everything, lengths, lengths)


# Our counterpart of each peer.
COUNTERPARTS: Mapping[str, str] = MappingProxyType(
    {
        "idiap full": "exact",
        "idiap exact-topk": "exact-topk",
        "idiap reformer": "lsh",
        "idiap causal improved-clustered": "improved-clustered",
        "transformers Longformer": "longformer",
        "transformers BigBird": "bigbird",
        "idiap linear": "linear",
        "idiap causal linear": "linear",
        "idiap clustered": "clustered iterations=10",
        "idiap improved-clustered": "improved-clustered iterations=10",
        "idiap local": "local left=128 right=128",
    }
)
