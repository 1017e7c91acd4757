"""The damage of each candidate at each site: how much the model's outputs feel the error of its output.

To second order, the divergence of the outputs after a change e of a site's output is e·F·e / 2 with the Fisher information F,
the expectation of (g·e)² over the gradients g of drawn labels. One forward and a few backward passes per batch give g at all
sites. Unlike a sum of squared errors times squared gradients, this sees that errors of many tokens add up.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from approx.conversion.calibration import evaluating
from approx.errors import ApproxError, Exit
from approx.evaluation.prediction_cache import fingerprint
from approx.planning.anatomy import Anatomy
from approx.seam.observe import Call, observe
from approx.searching.divergence import surrogate
from approx.searching.judging import Batch
from approx.tasks.classification import SEVERAL, kind_of_outputs
from approx_kernels.runtime.atomic_file import write_whole

# Labels drawn for each input.
_DRAWS = 4
_SCHEMA = 1

Damages = dict[str, list[NDArray[np.float64] | None]]
"""Name of a candidate -> for each site the products of the effects of two heads, [H, H]; None where it cannot be used."""


def measure(
    model: Any,
    anatomy: Anatomy,
    running: Mapping[str, Any],
    batches: Sequence[Batch],
    seed: int,
    advance: Callable[[int, int], None],
) -> Damages:
    """Estimate the damage of candidates at every site of an exact model.

    Args:
        model: The exact model.
        anatomy: Its anatomy.
        running: Name of a candidate -> a model with it, for all heads, at every site that can become it.
        batches: Inputs.
        seed: Seed of the drawn labels.
        advance: Called with batches done and in all.
    """
    layers = {site.path: site.layer for site in anatomy.sites}
    mechanisms = {
        name: [getattr(one.base_model.get_submodule(site.path), "mechanism", None) for site in anatomy.sites]
        for name, one in running.items()
    }
    total: dict[tuple[str, int], Any] = {}
    count = 0
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for number, batch in enumerate(batches):
        advance(number, len(batches))
        for call, gradients in _with_gradients(model, batch, layers, generator):
            layer = call.layer or 0
            for name, at_sites in mechanisms.items():
                if at_sites[layer] is not None:
                    effects = _effects(at_sites[layer], call, gradients, batch)
                    total[name, layer] = total.get((name, layer), 0.0) + effects.T @ effects
        count += len(batch.rows) * _DRAWS
    advance(len(batches), len(batches))
    return {
        name: [None if one is None else total[name, layer] / (2 * count) for layer, one in enumerate(at_sites)]
        for name, at_sites in mechanisms.items()
    }


def of_heads(products: NDArray[np.float64], count: int | None) -> tuple[float, list[int]]:
    """The least damage of converting `count` heads of a layer, and which; all heads without a count.

    Heads are added one by one, each time the one that adds least.
    """
    if count is None:
        return max(float(products.sum()), 0.0), []
    chosen: list[int] = []
    while len(chosen) < count:
        waiting = [head for head in range(len(products)) if head not in chosen]
        added = {head: products[head, head] + 2 * products[head, chosen].sum() for head in waiting}
        chosen.append(min(waiting, key=lambda head: (added[head], head)))
    return max(float(products[np.ix_(chosen, chosen)].sum()), 0.0), sorted(chosen)


def save(path: Path, about: str, found: Damages) -> None:
    """Write sensitivities as JSON; `about` identifies the model, the candidates and the examples."""
    data = {name: [None if one is None else one.tolist() for one in sites] for name, sites in found.items()}
    made = {"schema": _SCHEMA, "about": about, "damages": data, "sha256": fingerprint(data)}
    write_whole(path, json.dumps(made))


def load(path: Path, about: str) -> Damages:
    """Read sensitivities.

    Raises:
        ApproxError: if the file cannot be read, or is about another model, other candidates or other examples.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = {
            name: [None if one is None else np.asarray(one, float) for one in sites]
            for name, sites in data["damages"].items()
        }
        known = data["about"]
        # An earlier version kept no hash.
        if data.get("sha256") not in (None, fingerprint(data["damages"])):
            raise ValueError("its damages are not those that were measured")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ApproxError(
            f"{path} holds no sensitivities of a search: {' '.join(str(error).split())[:200]}. Leave it out, and they are measured.",
            Exit.UNAVAILABLE,
        ) from None
    if known != about:
        raise ApproxError(
            f"{path} was measured for another model, other candidates or other examples. Leave it out, and they are measured.",
            Exit.REFUSED,
        )
    return found


def _with_gradients(
    model: Any, batch: Batch, layers: Mapping[str, int], generator: torch.Generator
) -> Iterator[tuple[Call, list[Tensor]]]:
    """The attention calls of one forward pass, and at each output the gradients for several draws of labels."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with observe(model, layers=layers) as calls, evaluating(model), torch.enable_grad():
            outputs = model(**batch.inputs)
            seen = [call for call in calls if call.layer is not None]
            several = kind_of_outputs(model.config) == SEVERAL
            draws = (surrogate(outputs, batch.mask, generator, several=several) for _ in range(_DRAWS))
            gradients = [torch.autograd.grad(one, [call.output for call in seen], retain_graph=True) for one in draws]
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    for number, call in enumerate(seen):
        yield call, [drawn[number] for drawn in gradients]


@torch.no_grad()
def _effects(mechanism: Any, call: Call, gradients: Sequence[Tensor], batch: Batch) -> NDArray[np.float64]:
    """The change of each drawn loss by the error of each head, [draws x B, H]."""
    tokens = {"tokens": batch.inputs["input_ids"]} if mechanism.reads_tokens else {}
    q, k, v = (x.detach() for x in (call.q, call.k, call.v))
    error = mechanism(q, k, v, call.mask, **tokens).float() - call.output.detach().float()
    # Padding has no gradient.
    return torch.cat([(error * gradient).sum((2, 3)) for gradient in gradients]).cpu().double().numpy()
