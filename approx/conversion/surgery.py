"""Surgery: carry a plan out on a loaded model, and undo it."""

import copy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from approx.checkpoints import families
from approx.conversion.calibration import calibrate, mechanisms
from approx.conversion.layer_error import Damage
from approx.conversion.separator import named_by, with_separator
from approx.errors import ApproxError, Exit
from approx.planning import positions
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan
from approx.planning.resolve import described, site_record
from approx.seam.dispatch import FORMAT, attach, detach, switch
from approx.seam.transformers_internals import implementation_of


@dataclass
class Receipt:
    """What surgery did to a model.

    Attributes:
        swapped: One entry a converted layer, or a group of its heads where they differ: layer, path, heads, mechanism,
            settings, exact_below, checkpoint.
        left: Layers that stay exact.
        cross_attention: Cross-attention modules, which always stay exact.
        added: Names of the tensors that the mechanisms added to the state dict.
        positions: Usable positions before and after, or None if they were not changed.
        warnings: What the mechanisms have to say about their settings, such as that fine-tuning has to follow.
        errors: Relative error of each swapped layer's output on a calibration batch, once it was measured.
        captured_mass: Exact attention weight on the keys that a layer still sees, for each layer that leaves keys out.
        measured_at: Tokens that each swapped layer attended over when these figures were measured.
        measured_on: The same in words, with what these tokens were: "512 tokens a row, built-in English text".
    """

    swapped: list[dict[str, Any]]
    left: list[int]
    cross_attention: int
    added: list[str]
    positions: tuple[int, int] | None = None
    warnings: list[str] = field(default_factory=list)
    errors: dict[int, float] | None = None
    captured_mass: dict[int, float] | None = None
    measured_at: dict[int, int] | None = None
    measured_on: str | None = None

    def lost(self, damage: dict[int, Damage], told: str) -> None:
        """Write down what the layers lose, once it was measured, on how many tokens and on what."""
        self.measured_at = {layer: one.tokens for layer, one in damage.items()}
        lengths = " and ".join(f"{tokens:,}" for tokens in sorted(set(self.measured_at.values())))
        self.measured_on = f"{lengths} tokens a row, {told}"
        self.errors = {layer: one.error for layer, one in damage.items()}
        self.captured_mass = {
            layer: one.captured_mass for layer, one in damage.items() if one.captured_mass is not None
        }


def convert(
    model: Any,
    plan: Plan,
    *,
    max_length: int | None = None,
    calibration: dict[str, Tensor] | None = None,
    bundle_kernels: bool = False,
) -> Receipt:
    """Exchange the attention of a loaded model, in place.

    The model keeps its tensors, gets a config of its own and becomes an instance of the converted class of its family, so `save_pretrained`
    writes a folder that loads converted.

    Args:
        model: A stock transformers model.
        plan: Which layer gets what.
        max_length: Usable positions afterwards, in tokens, if the table is to be extended.
        calibration: Inputs of the model's forward that mechanisms are fitted to, if any of the plan must be; a few hundred
            tokens of what the model is used for.
        bundle_kernels: Whether the folders that the model is saved to carry the C and Triton of its mechanisms, and not
            plain PyTorch alone.

    Returns:
        The receipt.

    Raises:
        ApproxError: if the model is converted already, cannot be converted, the plan does not fit it, or inputs to fit a
            mechanism to are missing. The model is then as it was.
    """
    receipt = exchange(model, plan, max_length=max_length, bundle_kernels=bundle_kernels)
    try:
        calibrate(model, calibration)
    except BaseException:
        revert(model)
        raise
    return receipt


def exchange(model: Any, plan: Plan, *, max_length: int | None = None, bundle_kernels: bool = False) -> Receipt:
    """`convert` without fitting any mechanism, which then holds whatever it was made with.

    Args and errors: as for `convert`.
    """
    if not (isinstance(model, PreTrainedModel) and isinstance(plan, Plan)):
        raise ApproxError(
            f"A conversion takes a loaded transformers model and an approx.Plan; {type(model).__name__} and {type(plan).__name__} "
            "were given. Load a model with from_pretrained, and without a wrapper around it; make a plan with approx.Plan.of."
        )
    if families.is_converted(model):
        raise ApproxError(
            f"{type(model).__name__} is converted already. Revert it first, or convert the base checkpoint.",
            Exit.REFUSED,
        )
    facts = anatomy(model.config, type(model))
    assignment = with_separator(plan, lambda: named_by(model.config)).resolve(facts)
    resized = None
    if max_length is not None:
        resized = (positions.extendable(model.config, facts.architecture, max_length), max_length)
    sites = {site.path: site_record(site, rules) for site, rules in assignment.items()}
    before = set(model.state_dict())
    _own_configs(model)
    if max_length is not None:
        positions.resize(model, max_length)
    stock_implementation = implementation_of(model.config)
    attach(model, sites)
    # All submodules share the config object, so it changes its class in place and none of them holds a stale one.
    families.change_class(model.config, families.config_class(type(model.config)))
    model.config.approx = {
        "format": FORMAT,
        "bundle_kernels": bundle_kernels,
        "sites": sites,
        "base": {
            "model_type": facts.family,
            "architecture": facts.architecture,
            "implementation": stock_implementation,
            "positions": None if resized is None else resized[0],
        },
    }
    model.__class__ = families.model_class(type(model))
    return Receipt(
        swapped=[{"path": path, **entry} for path, site in sites.items() for entry in described(site)],
        left=[site.layer for site in facts.sites if site not in assignment],
        cross_attention=facts.cross_attention,
        added=sorted(set(model.state_dict()) - before),
        positions=resized,
        warnings=sorted({mechanism.warning for mechanism in mechanisms(model) if mechanism.warning is not None}),
    )


def revert(model: Any) -> None:
    """Undo `convert` on a model, in place: the mechanisms go, the base's class, config and positions come back.

    Raises:
        ApproxError: if the model is not converted.
    """
    if not families.is_converted(model):
        raise ApproxError(f"{type(model).__name__} is not converted, so there is nothing to revert.", Exit.REFUSED)
    record = model.config.approx
    detach(model, record["sites"])
    model.__class__ = families.stock_class(type(model))
    families.make_stock(model.config)
    if record["base"]["positions"] is not None:
        positions.resize(model, record["base"]["positions"])
    switch(model, record["base"]["implementation"])


def _own_configs(model: Any) -> None:
    """Give a model copies of its configs: whoever passed them may make other models of them, which stay as they are."""
    # With one memo for all, modules that shared a config, or held a part of one, share its copy.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, memo))
