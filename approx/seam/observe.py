"""Observe the inputs and outputs of the attention calls of a model, converted or not; all are differentiable.

Calibration, layer errors, checks of single layers and training on attention outputs loop over these calls.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from approx.mechanisms.mechanism import HeadGroups, Mechanism
from approx.seam.dispatch import TOKENS, attends_exactly, in_use, is_causal, switch
from approx.seam.internals import implementation_of, temporary_attention, under_implementation
from approx.seam.windows import attention, key_mask
from approx_kernels.tokens import heads_of


@dataclass(eq=False)
class Call:
    """One call of an attention module.

    Attributes:
        path: Path of the module inside the base model.
        layer: Number of the self-attention layer; None if it has none, as in cross-attention.
        mechanism: The layer's mechanism; None if it was not converted.
        exact: Whether exact attention runs, in place of the mechanism or without one.
        q: Queries, [B, H, L, D].
        k: Keys, [B, G, S, D].
        v: Values, [B, G, S, E].
        mask: [B, S] bool, True at real keys; None when all are real. Exact calls may have a 4-D mask instead.
        tokens: Token ids, [B, S], if the mechanism reads them.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        output: [B, H, L, E]; set after the layer has attended.
    """

    path: str
    layer: int | None
    mechanism: Mechanism | None
    exact: bool
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    tokens: Tensor | None
    causal: bool
    scale: float
    output: Tensor = field(init=False)

    def members(self) -> list["Call"]:
        """One call per group of heads, with its mechanism and its part of the tensors; the call itself without groups."""
        if not isinstance(self.mechanism, HeadGroups):
            return [self]
        return [self._part(heads, mechanism) for heads, mechanism in self.mechanism.members()]

    def _part(self, heads: slice | list[int], mechanism: Mechanism) -> "Call":
        of_keys = heads_of(self.q, self.k, heads)
        part = replace(
            self,
            mechanism=mechanism,
            exact=self.exact or self.k.shape[2] < mechanism.exact_below,
            q=self.q[:, heads],
            k=self.k[:, of_keys],
            v=self.v[:, of_keys],
            tokens=self.tokens if mechanism.reads_tokens else None,
        )
        if hasattr(self, "output"):
            part.output = self.output[:, heads]
        return part


@contextmanager
def observe(
    model: Any,
    on_call: Callable[[Call], object] | None = None,
    *,
    before: Callable[[Call], object] | None = None,
    layers: Mapping[str, int] | None = None,
) -> Iterator[list[Call]]:
    """Observe every attention call that a model makes inside the context, in order.

    Layers without a mechanism, and stock models, run exact attention meanwhile. Nothing is detached, so gradients flow
    from a loss on observed tensors. If observations of a model are nested, the inner one sees the calls. Decoding keeps
    the keys of all layers, unless it continues from a bounded state, which has no earlier keys.

    Args:
        model: A transformers model; call it, or its base model, as usual.
        on_call: Receives each call after its layer has attended.
        before: Receives each call before its layer attends, without the output.
        layers: Path of an attention module inside the base model -> number of its layer. By default converted layers
            have the numbers in the config, and others have none.

    Yields:
        The calls, which keep their tensors alive; collected only if neither function is given.

    Raises:
        ApproxError: if the model does not dispatch its attention.
    """
    calls: list[Call] = []
    if on_call is None and before is None:
        on_call = calls.append
    paths = {module: path for path, module in model.base_model.named_modules()}
    if layers is None:
        sites = (getattr(model.config, "approx", None) or {}).get("sites", {})
        layers = {path: site["layer"] for path, site in sites.items()}

    def observed(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        mechanism: Any = getattr(module, "mechanism", None)
        causal, scaling = is_causal(module, kwargs), kwargs.get("scaling")
        k, v, mask = in_use(query, key, value, attention_mask, causal)
        call = Call(
            path=paths[module],
            layer=layers.get(paths[module]),
            mechanism=mechanism,
            exact=mechanism is None or attends_exactly(mechanism, k.shape[2], mask),
            q=query,
            k=k,
            v=v,
            mask=mask,
            tokens=kwargs.get(TOKENS) if mechanism is not None and mechanism.reads_tokens else None,
            causal=causal,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        )
        if before is not None:
            before(call)
        out, weights = attention(module, query, key, value, attention_mask, *args, **kwargs)
        call.output = out.transpose(1, 2)
        if on_call is not None:
            on_call(call)
        # Through the observed tensor, so that it has a gradient of a loss on the model's outputs.
        return call.output.transpose(1, 2), weights

    with temporary_attention(observed, key_mask) as name, _restored_configs(model):
        switch(model, name)
        yield calls


@contextmanager
def _restored_configs(model: Any) -> Iterator[None]:
    """Restore the attention implementation in all configs of a model on exit."""
    waiting = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    seen = set()
    with ExitStack() as stack:
        while waiting:
            config = waiting.pop()
            if id(config) not in seen:
                seen.add(id(config))
                stack.enter_context(under_implementation(config, implementation_of(config)))
                parts = (getattr(config, name, None) for name in config.sub_configs)
                waiting += [part for part in parts if part is not None]
        yield
