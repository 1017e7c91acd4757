"""A variant of a record: which mechanisms a model runs, and what they learned."""

from typing import Any

from approx.checkpoints.checkpoint import Checkpoint
from approx.checkpoints.receipt import read_receipt
from approx.evaluation.record_model import Layer, Variant
from approx.planning import positions
from approx.planning.resolve import described

# Tokens of an input for models without a limit.
_NO_LIMIT = 1024


def variant_of(label: str, one: Checkpoint) -> Variant:
    """Describe a model compared with the base: its layers, what they learned, and the receipt of its conversion."""
    sites = (one.source.raw.get("approx") or {}).get("sites", {})
    receipt = read_receipt(one.source.folder)
    return Variant(
        name=label,
        layers=[
            Layer(
                **{
                    key: part[key]
                    for key in ("layer", *(["heads"] if "groups" in site else []), "mechanism", "settings")
                },
                **_spans(mechanism, one.model.config),
            )
            for path, site in sorted(sites.items(), key=lambda item: item[1]["layer"])
            for part, mechanism in zip(described(site), _members(one.model, path), strict=True)
        ],
        # Of what was not converted there is nothing to verify.
        verified=not one.source.converted or (receipt is not None and receipt.verified),
        receipt=None if receipt is None else receipt.model_dump(mode="json"),
        weights_sha256=one.weights_sha256,
    )


def _members(model: Any, path: str) -> list[Any]:
    """The mechanism of a layer, or those of the groups of its heads."""
    mechanism = model.base_model.get_submodule(path).mechanism
    return list(getattr(mechanism, "groups", [mechanism]))


def _spans(mechanism: Any, config: Any) -> dict[str, Any]:
    spans = getattr(mechanism, "spans", None)
    if spans is None:
        return {}
    length = positions.limit(config) or _NO_LIMIT
    exact = type(mechanism)(
        mechanism.heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale,
        **mechanism.exact_settings(length),
    )  # fmt: skip
    return {"spans": spans.tolist(), "operations": mechanism.flops(length) / exact.flops(length)}
