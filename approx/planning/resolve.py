"""Resolve the rules of a plan for a model, and report every mistake that depends on the model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from approx.errors import ApproxError, Exit, did_you_mean
from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import Mechanism
from approx.mechanisms.refusals import refusals
from approx.planning.anatomy import Anatomy, Site
from approx.planning.rule import Rule
from approx.planning.selection import parse_heads, parse_layers, ranges
from approx.seam.layer_entry import parts


def resolve(rules: Sequence[Rule], anatomy: Anatomy) -> dict[Site, tuple[Rule, ...]]:
    """See `Plan.resolve`: site -> the rules of its groups of heads."""
    mistakes: list[str] = []
    unsupported: list[str] = []
    # The rule number of each head of each site; later rules overwrite earlier ones.
    chosen: dict[Site, list[int | None]] = {site: [None] * site.heads for site in anatomy.sites}
    named: list[dict[Site, list[int]]] = []
    for number, rule in enumerate(rules):
        places, wrong = _places(rule, anatomy)
        mistakes += [f"In {_name(number, rules)}: {text}" for text in wrong]
        named.append(places)
        for site, heads in places.items():
            for head in heads:
                chosen[site][head] = number
    complete: list[dict[str, Any]] = []
    for number, rule in enumerate(rules):
        where = _name(number, rules)
        wrong = unknown_names(rule, where)
        mistakes += wrong
        complete.append({} if wrong else {**MECHANISMS[rule.mechanism].defaults(), **rule.settings})
        if not wrong:
            # Later rules may take over some of its heads.
            sizes = {site: {len(heads), chosen[site].count(number)} - {0} for site, heads in named[number].items()}
            wrong_usage, wrong_support = _trial(rule, complete[number], sizes, anatomy)
            mistakes += [f"In {where}: {text}" for text in wrong_usage]
            unsupported += [f"In {where}: {text}" for text in wrong_support]
    if mistakes or unsupported:
        code = Exit.USAGE if mistakes else Exit.UNSUPPORTED
        raise ApproxError("\n".join(dict.fromkeys(mistakes + unsupported)), code)
    chosen = {site: numbers for site, numbers in chosen.items() if set(numbers) != {None}}
    if not chosen:
        raise ApproxError("The plan selects no layer, so nothing would change. Use 'layers: all'.")
    return {site: _groups(site, chosen, rules, complete) for site in chosen}


def unknown_names(rule: Rule, where: str) -> list[str]:
    """The mistakes in a rule's mechanism and the names of its settings, which need no model to be found.

    Args:
        rule: The rule.
        where: Its place in messages: `rule 2`, `the plan`.
    """
    if rule.mechanism not in MECHANISMS:
        hint = did_you_mean(rule.mechanism, MECHANISMS)
        return [f"Unknown mechanism '{rule.mechanism}' in {where}.{hint} Known: {', '.join(sorted(MECHANISMS))}."]
    defaults = MECHANISMS[rule.mechanism].defaults()
    allowed = f"Settings of '{rule.mechanism}': {', '.join(defaults)}." if defaults else "It has no settings."
    return [
        f"In {where}: '{rule.mechanism}' has no setting '{name}'.{did_you_mean(name, defaults)} {allowed}"
        for name in rule.settings
        if name not in defaults
    ]


def site_record(site: Site, rules: Sequence[Rule]) -> dict[str, Any]:
    """A converted layer's entry in config.json: the arguments of its mechanism, for all heads or per group."""
    facts = {key: getattr(site, key) for key in ("layer", "heads", "head_dim", "causal", "scale")}
    entries = [
        {key: getattr(rule, key) for key in ("mechanism", "settings", "exact_below", "recompute")} for rule in rules
    ]
    if len(rules) == 1:
        return entries[0] | facts
    heads = [parse_heads(rule.heads, site.heads, "it has") for rule in rules]
    return facts | {"groups": [entry | {"heads": some} for entry, some in zip(entries, heads, strict=True)]}


def described(site: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A converted layer of config.json in readable form: one entry per group of its heads.

    Returns:
        Entries with layer, heads (`all`, or numbers and ranges), mechanism, settings, exact_below and recompute.
    """
    plain = {"exact_below": 0, "recompute": False}
    return [
        {
            "layer": site["layer"],
            "heads": ranges(part["heads"]) if part is not site else "all",
            **{key: part.get(key, plain.get(key)) for key in ("mechanism", "settings", "exact_below", "recompute")},
        }
        for part in parts(site)
    ]


def _groups(
    site: Site, chosen: dict[Site, list[int | None]], rules: Sequence[Rule], complete: list[dict[str, Any]]
) -> tuple[Rule, ...]:
    groups = []
    for number in dict.fromkeys(chosen[site]):
        heads = [head for head, one in enumerate(chosen[site]) if one == number]
        if number is None:
            rule, settings = Rule("sdpa"), {}
        else:
            rule = rules[number]
            rank = [other for other, numbers in chosen.items() if number in numbers].index(site)
            settings = MECHANISMS[rule.mechanism].for_layer(complete[number], rank)
        text = "all" if len(heads) == site.heads else ranges(heads)
        groups.append(replace(rule, layers=str(site.layer), settings=settings, heads=text))
    return tuple(groups)


def _name(number: int, rules: Sequence[Rule]) -> str:
    return f"rule {number + 1}" if len(rules) > 1 else "the plan"


def _places(rule: Rule, anatomy: Anatomy) -> tuple[dict[Site, list[int]], list[str]]:
    """Site -> heads that a rule names there, and the mistakes in its numbers."""
    mistakes, places = [], {}
    try:
        sites = [anatomy.sites[layer] for layer in parse_layers(rule.layers, len(anatomy.sites))]
    except ApproxError as error:
        mistakes, sites = [str(error)], []
    # Check heads even if the layers do not exist.
    for count in sorted({site.heads for site in sites or anatomy.sites[:1]}):
        alike = [site for site in sites if site.heads == count]
        owner = f"layers {ranges(site.layer for site in alike)} have" if alike else "the model has"
        try:
            places |= dict.fromkeys(alike, parse_heads(rule.heads, count, owner))
        except ApproxError as error:
            mistakes.append(str(error))
    return {site: places[site] for site in sites if site in places}, mistakes


def _trial(
    rule: Rule, settings: dict[str, Any], sizes: dict[Site, set[int]], anatomy: Anatomy
) -> tuple[list[str], list[str]]:
    """Mistakes that depend on the layers, including those that the mechanism's constructor reports."""
    mechanism = MECHANISMS[rule.mechanism]
    usage, support = [], []
    for form in ("causal", "bidirectional"):
        layers = [site.layer for site in sizes if site.causal == (form == "causal")]
        if layers and not getattr(mechanism, f"supports_{form}"):
            able = ", ".join(name for name, kind in sorted(MECHANISMS.items()) if getattr(kind, f"supports_{form}"))
            free = [site.layer for site in anatomy.sites if site.causal != (form == "causal")]
            hint = f" or choose among the layers that are not: {free[0]}-{free[-1]}" if free else ""
            support.append(
                f"'{rule.mechanism}' has no {form} form, but layers {ranges(layers)} of {anatomy.architecture} are "
                f"{form}. Use one of {able}{hint}."
            )
    causal = [site.layer for site in sizes if site.causal]
    if causal and rule.exact_below:
        support.append(
            f"'exact_below' cannot be used on causal layers ({ranges(causal)}): a growing cache would mix both kinds of "
            "attention. Leave it out."
        )
    # Check settings even if the layers do not exist.
    tried = sizes or {site: {site.heads} for site in anatomy.sites[:1]}
    for heads, head_dim, causal, scale in sorted(
        {(n, site.head_dim, _form(mechanism, site), site.scale) for site, counts in tried.items() for n in counts}
    ):
        for error in refusals(rule.mechanism, mechanism, settings, heads, head_dim, causal=causal, scale=scale):
            (support if error.exit_code == Exit.UNSUPPORTED else usage).append(str(error))
    return usage, support


def _form(mechanism: type[Mechanism], site: Site) -> bool:
    """Whether to try the causal form: the layer's form, or the only one that the mechanism has."""
    return mechanism.supports_causal and (site.causal or not mechanism.supports_bidirectional)
