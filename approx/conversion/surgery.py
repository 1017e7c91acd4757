"""Surgery: apply a plan to a loaded model, and undo it; find the tokens that separate texts."""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from approx.checkpoints import checkpoint, families
from approx.checkpoints.history import Receipt, Swapped
from approx.conversion.calibration import calibrate, mechanisms
from approx.errors import ApproxError, Exit
from approx.mechanisms.clustered import ClusteredAttention
from approx.mechanisms.exact_keys import without_estimate
from approx.mechanisms.mechanism import BY_CONTENT, MECHANISMS, Mechanism
from approx.planning import positions
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan, described, site_record
from approx.planning.rule import Rule
from approx.seam.dispatch import FORMAT, attach, detach, switch
from approx.seam.internals import implementation_of

# Clusters of so few that a model answers hardly any question about a text.
_FEW_CLUSTERS = 25


def with_separator(plan: Plan, find: Callable[[], int | None], *, answers: bool) -> Plan:
    """The plan with the settings filled in that choose tokens by content and depend on the model.

    Where a model answers questions about a text, the question is exact unless `global_tokens` says otherwise, since every
    token of the text has to know it. Rules that need a `separator` and leave it out get it.

    Args:
        plan: The original plan.
        find: Looks up the id of the separator; called only if a rule needs it.
        answers: Whether the model answers questions about a text, see `answers_questions`.

    Raises:
        ApproxError: if a rule needs it and `find` returns None.
    """
    if answers and any(map(_may_ask, plan.rules)) and (separator := find()) is not None:
        asked = {"global_tokens": "question", "separator": separator}
        rules = (replace(rule, settings={**rule.settings, **asked}) if _may_ask(rule) else rule for rule in plan.rules)
        plan = Plan(tuple(rules))
    lacking = [rule for rule in plan.rules if _lacks(rule.settings)]
    if not lacking:
        return plan
    separator = find()
    if separator is None:
        raise ApproxError(
            f"global_tokens '{lacking[0].settings['global_tokens']}' needs a separator token, but neither the "
            "tokenizer nor the config of this model names one. Give its id as the setting 'separator'."
        )
    rules = (
        replace(rule, settings={**rule.settings, "separator": separator}) if _lacks(rule.settings) else rule
        for rule in plan.rules
    )
    return Plan(tuple(rules))


def of_checkpoint(source: checkpoint.Source) -> int | None:
    """The separator of a checkpoint's tokenizer or, without a tokenizer, of its config; None if there is none."""
    try:
        return named_by(checkpoint.processor(source))
    except ApproxError:
        return named_by(source.config)


def named_by(holder: Any) -> int | None:
    """The separator token of a tokenizer or a config, or else its end token; None if it names neither."""
    ids = (getattr(holder, name, None) for name in ("sep_token_id", "eos_token_id"))
    return next((number for number in ids if type(number) is int), None)


def answers_questions(stock_class: type) -> bool:
    """Whether a transformers class answers questions about a text."""
    return stock_class.__name__.endswith("ForQuestionAnswering")


def _may_ask(rule: Rule) -> bool:
    """Whether a rule leaves it to the model which tokens are global."""
    kind = MECHANISMS.get(rule.mechanism)
    return (
        kind is not None
        and rule.settings.get("global_tokens", kind.defaults().get("global_tokens")) == "auto"
        and rule.settings.get("gate") is not False
    )


def _lacks(settings: dict[str, Any]) -> bool:
    return settings.get("global_tokens") in BY_CONTENT and settings.get("separator") is None


def convert(
    model: Any,
    plan: Plan,
    *,
    max_length: int | None = None,
    calibration: dict[str, Tensor] | None = None,
    bundle_kernels: bool = False,
) -> Receipt:
    """Replace the attention of a loaded model, in place.

    The model keeps its tensors, gets its own config and becomes an instance of the converted class of its family, so
    `save_pretrained` writes a folder that loads converted.

    Args:
        model: A stock transformers model.
        plan: The mechanism of each layer.
        max_length: Usable positions afterwards, in tokens, to extend the position table.
        calibration: Inputs of the model's forward for mechanisms that need calibration; a few hundred typical tokens.
        bundle_kernels: Whether folders saved from the model include the C and Triton of its mechanisms instead of plain
            PyTorch.

    Returns:
        The receipt.

    Raises:
        ApproxError: if the model is already converted or cannot be converted, the plan does not fit it, or a mechanism
            needs calibration inputs. The model is then unchanged.
    """
    receipt = exchange(model, plan, max_length=max_length, bundle_kernels=bundle_kernels)
    try:
        calibrate(model, calibration)
    except BaseException:
        revert(model)
        raise
    return receipt


def exchange(model: Any, plan: Plan, *, max_length: int | None = None, bundle_kernels: bool = False) -> Receipt:
    """`convert` without calibration: mechanisms keep their initial state.

    Args and errors: as for `convert`.
    """
    if not (isinstance(model, PreTrainedModel) and isinstance(plan, Plan)):
        raise ApproxError(
            f"A conversion takes a loaded transformers model and an approx.Plan; {type(model).__name__} and "
            f"{type(plan).__name__} were passed. Load a model with from_pretrained, without a wrapper; create a plan "
            "with approx.Plan.of."
        )
    if families.is_converted(model):
        raise ApproxError(
            f"{type(model).__name__} is converted already. Revert it first, or convert the base checkpoint.",
            Exit.REFUSED,
        )
    facts = anatomy(model.config, type(model))
    answers = answers_questions(type(model))
    assignment = with_separator(plan, lambda: named_by(model.config), answers=answers).resolve(facts)
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
    # All submodules share the config object, so its class changes in place.
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
        swapped=[Swapped(path=path, **vars(part)) for path, site in sites.items() for part in described(site)],
        left=[site.layer for site in facts.sites if site not in assignment],
        cross_attention=facts.cross_attention,
        added=sorted(set(model.state_dict()) - before),
        positions=resized,
        warnings=sorted({warning for mechanism in mechanisms(model) for warning in _warnings(mechanism, answers)}),
    )


def _warnings(mechanism: Mechanism, answers: bool) -> Iterator[str]:
    """What to know of a mechanism, on conversion of a model that answers questions about a text or of another one."""
    if mechanism.warning is not None:
        yield mechanism.warning
    if answers and type(mechanism) is ClusteredAttention:
        clusters = mechanism.clusters
        if isinstance(clusters, int) and clusters <= _FEW_CLUSTERS:
            yield (
                f"clustered with {clusters} clusters loses most answers: with 25, MiniLM has an F1 of 20 on SQuAD, with "
                "improved-clustered of 57, and exact 60. Take improved-clustered, or more clusters."
            )


def revert(model: Any) -> None:
    """Undo `convert` on a model, in place: remove the mechanisms and restore the base's class, config and positions.

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


def keep_exact(model: Any, layers: Collection[int]) -> None:
    """Undo the conversion of some layers of a converted model, in place; the others stay as they are.

    Args:
        model: The model.
        layers: Numbers of converted layers, not all of them.
    """
    sites = model.config.approx["sites"]
    paths = [path for path, site in sites.items() if site["layer"] in layers]
    detach(model, paths)
    model.config.approx = {
        **model.config.approx,
        "sites": {path: site for path, site in sites.items() if path not in paths},
    }


def use_exact_attention(model: Any) -> None:
    """Undo `convert` on a model, in place, except for extended positions, so that only attention changes.

    Raises:
        ApproxError: if the model is not converted.
    """
    if families.is_converted(model):
        model.config.approx["base"]["positions"] = None
    revert(model)


@dataclass(frozen=True)
class Estimates:
    """The estimates of a model's mechanisms that can be switched off, see `exact_keys.without_estimate`.

    Attributes:
        part: What they are called: `linear part`, or `estimated part` where mechanisms differ.
        layers: Numbers of the layers that have one beside exact keys.
        why: Why there is none; empty otherwise.
    """

    part: str
    layers: list[int]
    why: str


def estimates(model: Any) -> Estimates:
    """Find the estimates of a model, converted or not, that `without_estimates` switches off."""
    if not families.is_converted(model):
        return Estimates("estimated part", [], "the model is not converted")
    found = {path: site["layer"] for path, site in model.config.approx["sites"].items() if _alone(model, path)}
    estimating = [one for one in mechanisms(model) if one.estimate is not None]
    parts = {one.estimate for one in estimating if without_estimate(one) is not None}
    part = parts.pop() if len(parts) == 1 else None
    lacking = "its mechanisms have no exact key besides what they estimate, so nothing would be left"
    why = "" if found else lacking if estimating else "its mechanisms weigh or skip each key and estimate none"
    return Estimates(part or "estimated part", sorted(found.values()), why)


@contextmanager
def without_estimates(model: Any) -> Iterator[None]:
    """Switch off the estimates of a converted model: where a layer has one, only its exact keys are left."""
    whole: dict[Any, Mechanism] = {}
    try:
        for path in model.config.approx["sites"]:
            if alone := _alone(model, path):
                module = model.base_model.get_submodule(path)
                whole[module] = module.mechanism
                module.mechanism = alone.train(module.training)
        yield
    finally:
        for module, mechanism in whole.items():
            module.mechanism = mechanism


def _alone(model: Any, path: str) -> Mechanism | None:
    return without_estimate(model.base_model.get_submodule(path).mechanism)


def _own_configs(model: Any) -> None:
    """Give a model copies of its configs, since other models may share the originals."""
    # One memo for all keeps configs, and parts of them, shared between modules.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, memo))
