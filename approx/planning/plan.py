"""A plan: ordered rules that assign mechanisms to layers and heads; the last matching rule wins."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from approx import yaml_text
from approx.errors import ApproxError, Exit, did_you_mean, shown
from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import Mechanism
from approx.mechanisms.refusals import refusals
from approx.planning.anatomy import Anatomy, Site, ranges
from approx.planning.rule import KEYS, Rule, unwrapped
from approx.seam.dispatch import parts
from approx.validation import error_lines, validate
from approx.yaml_text import Document


def parse_layers(text: str, count: int) -> list[int]:
    """Numbers of the layers that `text` names, e.g. `all`, `-1`, `0-5,8`.

    Args:
        text: Numbers and inclusive ranges, separated by commas; negative numbers count from the last layer.
        count: Number of layers of the model.

    Raises:
        ApproxError: if the text is not of this form or names a layer that does not exist.
    """
    return sorted(set(_numbers(text, count, "layer", "the model has")))


def parse_heads(text: str, count: int, owner: str) -> list[int]:
    """Numbers of the heads that `text` names, in the form of `parse_layers`.

    Args:
        text: Numbers and inclusive ranges; negative numbers count from the last head.
        count: Number of heads.
        owner: Start of a clause in messages, such as `layers 0-5 have`.

    Raises:
        ApproxError: also if a head is named twice.
    """
    heads = sorted(_numbers(text, count, "head", owner))
    twice = sorted({head for head, after in pairwise(heads) if head == after})
    if twice:
        raise ApproxError(f"Heads '{text}' name head {ranges(twice)} twice. Name each head once.")
    return heads


def _numbers(text: str, count: int, noun: str, owner: str) -> list[int]:
    if text.strip() == "all":
        return list(range(count))
    chosen: list[int] = []
    for part in text.split(","):
        part = part.strip()
        first, dash, last = part[1:].partition("-") if part.startswith("-") else part.partition("-")
        sign = -1 if part.startswith("-") else 1
        try:
            low = sign * int(first)
            high = int(last) if dash else low
        except ValueError:
            raise ApproxError(
                f"{noun.capitalize()}s are '{text}', but '{part}' is not a {noun} number or range. "
                "Use 'all', or numbers and ranges such as '0-5,8' or '-1'."
            ) from None
        ends = [end + count if end < 0 else end for end in (low, high)]
        for asked, end in zip((low, high), ends, strict=True):
            if not 0 <= end < count:
                raise ApproxError(
                    f"{noun.capitalize()} {asked} does not exist: {owner} {noun}s 0-{count - 1}. "
                    f"Use '{noun}s: all' or numbers up to {count - 1}."
                )
        if ends[0] > ends[1]:
            raise ApproxError(
                f"{noun.capitalize()}s '{part}' run backwards. Write the lower number first, e.g. '{ends[1]}-{ends[0]}'."
            )
        chosen += range(ends[0], ends[1] + 1)
    return chosen


def resolve(rules: Sequence[Rule], anatomy: Anatomy) -> dict[Site, tuple[Rule, ...]]:
    """See `Plan.resolve`: site -> the rules of its groups of heads."""
    mistakes: list[str] = []
    unsupported: list[str] = []
    # The rule number of each head of each site; later rules overwrite earlier ones.
    chosen: dict[Site, list[int | None]] = {site: [None] * site.heads for site in anatomy.sites}
    named: list[dict[Site, list[int]]] = []
    for number, rule in enumerate(rules):
        places, wrong, kept = _places(rule, anatomy)
        mistakes += [f"In {_name(number, rules)}: {text}" for text in wrong]
        unsupported += [f"In {_name(number, rules)}: {text}" for text in kept]
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
    entries = []
    for rule in rules:
        entry = {key: getattr(rule, key) for key in ("mechanism", "settings", "exact_below", "recompute")}
        if origin := MECHANISMS.origin(rule.mechanism):
            entry["package"] = origin.pinned
        entries.append(entry)
    if len(rules) == 1:
        return entries[0] | facts
    heads = [parse_heads(rule.heads, site.heads, "it has") for rule in rules]
    return facts | {"groups": [entry | {"heads": some} for entry, some in zip(entries, heads, strict=True)]}


@dataclass(frozen=True)
class Part:
    """A converted layer, or a group of its heads if they differ; `heads` is `all`, or numbers and ranges."""

    layer: int
    heads: str
    mechanism: str
    settings: dict[str, Any]
    exact_below: int
    recompute: bool


def described(site: Mapping[str, Any]) -> list[Part]:
    """A converted layer of config.json in readable form: one part per group of its heads."""
    return [
        Part(
            site["layer"],
            ranges(part["heads"]) if part is not site else "all",
            part["mechanism"],
            part["settings"],
            part.get("exact_below", 0),
            part.get("recompute", False),
        )
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


def _places(rule: Rule, anatomy: Anatomy) -> tuple[dict[Site, list[int]], list[str], list[str]]:
    """Site -> heads that a rule names there, the mistakes in its numbers, and the layers that cannot be converted."""
    mistakes, places = [], {}
    try:
        named = [anatomy.sites[layer] for layer in parse_layers(rule.layers, len(anatomy.sites))]
    except ApproxError as error:
        mistakes, named = [str(error)], []
    sites = [site for site in named if site.kept is None]
    kept = [] if rule.layers.strip() == "all" else [site for site in named if site.kept is not None]
    # Check heads even if the layers do not exist.
    for count in sorted({site.heads for site in sites or anatomy.convertible[:1]}):
        alike = [site for site in sites if site.heads == count]
        owner = f"layers {ranges(site.layer for site in alike)} have" if alike else "the model has"
        try:
            places |= dict.fromkeys(alike, parse_heads(rule.heads, count, owner))
        except ApproxError as error:
            mistakes.append(str(error))
    able = ranges(site.layer for site in anatomy.convertible)
    refused = [
        f"layer {site.layer} of {anatomy.architecture} cannot be converted: it has {site.kept}. Layers that can: {able}."
        for site in kept
    ]
    return {site: places[site] for site in sites if site in places}, mistakes, refused


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
            free = [site.layer for site in anatomy.convertible if site.causal != (form == "causal")]
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
    tried = sizes or {site: {site.heads} for site in anatomy.convertible[:1]}
    for heads, head_dim, causal, scale in sorted(
        {(n, site.head_dim, _form(mechanism, site), site.scale) for site, counts in tried.items() for n in counts}
    ):
        for error in refusals(rule.mechanism, mechanism, settings, heads, head_dim, causal=causal, scale=scale):
            (support if error.exit_code == Exit.UNSUPPORTED else usage).append(str(error))
    return usage, support


def _form(mechanism: type[Mechanism], site: Site) -> bool:
    """Whether to try the causal form: the layer's form, or the only one that the mechanism has."""
    return mechanism.supports_causal and (site.causal or not mechanism.supports_bidirectional)


@dataclass(frozen=True)
class Plan:
    """Ordered rules; for each head of each layer the last matching one wins, and unmatched heads stay exact."""

    rules: tuple[Rule, ...]

    @classmethod
    def of(
        cls,
        mechanism: str,
        layers: str | int = "all",
        *,
        heads: str | int = "all",
        exact_below: int = 0,
        recompute: bool = False,
        **settings: Any,
    ) -> "Plan":
        """The plan of a single rule; `Rule` documents the arguments.

        Raises:
            ApproxError: listing every mistake in its form, or if the mechanism or a setting is unknown.
        """
        rule = {
            "mechanism": mechanism,
            "layers": layers,
            "heads": heads,
            "settings": settings,
            "exact_below": exact_below,
            "recompute": recompute,
        }
        plan = cls.parse(rule)
        if wrong := unknown_names(plan.rules[0], "the plan"):
            raise ApproxError("\n".join(wrong))
        return plan

    @classmethod
    def parse(cls, data: Any, source: str = "plan") -> "Plan":
        """Parse a plan from plain data: a rule, a list of rules, or `{rules: [...]}`.

        Raises:
            ApproxError: listing every mistake in the form of `data`, each with the nearest known name.
        """
        return cls._made(data, source, None)

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Read a plan from a YAML or JSON file.

        Raises:
            ApproxError: if the file is missing, is not YAML, or has mistakes, which are listed with their lines.
        """
        document = yaml_text.read(Path(path), "plan")
        return cls._made(document.data, str(path), document)

    @classmethod
    def _made(cls, data: Any, source: str, document: Document | None) -> "Plan":
        items = unwrapped(data)
        if not items or not isinstance(data, dict | list):
            raise ApproxError(
                f"{source}: a plan is a list of rules with the keys {', '.join(KEYS)}, not {shown(data)}. "
                "Example: [{layers: all, mechanism: improved-clustered}]"
            )
        if isinstance(data, dict) and len(data) == 1 and "rules" not in data:
            ((key, value),) = data.items()
            if isinstance(value, list) and key not in KEYS:
                raise ApproxError(
                    f"{source}: unknown key {shown(key)}. The rules of a plan are a list under the key 'rules'."
                )
        rules, mistakes = [], []
        for number, item in enumerate(items):
            rule, wrong = validate(Rule, item, f"rule {number + 1}", _place(data, number))
            rules.append(rule)
            mistakes += wrong
        if lines := error_lines(mistakes, source, document):
            raise ApproxError("\n".join(lines))
        return cls(tuple(rules))

    def to_data(self) -> list[dict[str, Any]]:
        """The rules as plain data, for `Plan.parse`."""
        return [rule.to_dict() for rule in self.rules]

    def to_yaml(self) -> str:
        """The plan as YAML text, for `Plan.read`."""
        return yaml.safe_dump({"rules": self.to_data()}, sort_keys=False)

    def to_json(self) -> str:
        """The plan as JSON text, for `Plan.read`."""
        return json.dumps({"rules": self.to_data()}, indent=2)

    def resolve(self, anatomy: Anatomy) -> dict[Site, tuple[Rule, ...]]:
        """Assign rules to sites, after checking every rule against the model.

        Returns:
            Site -> the rules of its groups of heads, ordered by lowest head, or a single rule if all heads are alike;
            settings are complete and resolved for the layer. In a layer with rules, heads without one form a group with
            `sdpa`; sites without rules are left out.

        Raises:
            ApproxError: listing all mistakes at once: unknown names and settings, layers and heads that do not exist, a
                mechanism without a causal form on a causal layer, a layer that cannot be converted named by its number,
                settings out of range; or if no layer is selected.
        """
        return resolve(self.rules, anatomy)


def _place(data: Any, number: int) -> tuple[Any, ...]:
    """The location of a rule in a file."""
    if isinstance(data, list):
        return (number,)
    return ("rules", number) if set(data) == {"rules"} else ()


def seeded(plan: Plan, seed: int) -> Plan:
    """The plan with this seed for every mechanism that takes one and has none in the plan.

    A plan without randomness is returned unchanged.
    """
    return Plan(
        tuple(replace(rule, settings={**rule.settings, "seed": seed}) if _open(rule) else rule for rule in plan.rules)
    )


def _open(rule: Rule) -> bool:
    kind = MECHANISMS.get(rule.mechanism)
    return kind is not None and "seed" in kind.defaults() and "seed" not in rule.settings
