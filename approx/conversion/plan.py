"""A plan: ordered rules that say which layer gets which mechanism; the last rule that matches a layer wins."""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from approx import yaml_text
from approx.conversion.anatomy import Anatomy, Site
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS

_KEYS = ("layers", "mechanism", "settings", "exact_below")


@dataclass(frozen=True)
class Rule:
    """Give some layers a mechanism.

    Attributes:
        mechanism: A name of the registry, e.g. `improved-clustered`.
        layers: `all`, or numbers and ranges such as `0-5,8`; -1 is the last layer.
        settings: Settings of the mechanism; what is left out has its default.
        exact_below: Inputs shorter than this many tokens keep exact attention, decided anew for each call.
    """

    mechanism: str
    layers: str = "all"
    settings: dict[str, Any] = field(default_factory=dict)
    exact_below: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The rule as plain data, without what is at its default."""
        data: dict[str, Any] = {"layers": self.layers, "mechanism": self.mechanism}
        if self.settings:
            data["settings"] = dict(self.settings)
        if self.exact_below:
            data["exact_below"] = self.exact_below
        return data


@dataclass(frozen=True)
class Plan:
    """Ordered rules; the last one that matches a layer wins, and layers that none matches stay exact."""

    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, mechanism: str, layers: str = "all", *, exact_below: int = 0, **settings: Any) -> "Plan":
        """The plan of a single rule."""
        return cls((Rule(mechanism, layers, settings, exact_below),))

    @classmethod
    def parse(cls, data: Any, source: str = "plan") -> "Plan":
        """Make a plan of plain data: a rule, a list of rules, or `{rules: [...]}`.

        Raises:
            ApproxError: with every mistake of form in `data`, each with the nearest known name.
        """
        if isinstance(data, dict) and set(data) == {"rules"}:
            data = data["rules"]
        items = [data] if isinstance(data, dict) else data
        if not isinstance(items, list) or not items:
            raise ApproxError(
                f"{source}: a plan is a list of rules with the keys {', '.join(_KEYS)}, found {_shown(data)}. "
                "Example: [{layers: all, mechanism: improved-clustered}]"
            )
        rules, mistakes = [], []
        for number, item in enumerate(items):
            where = f"{source}, rule {number + 1}"
            found = _form_mistakes(item, where)
            mistakes += found
            if not found:
                rules.append(
                    Rule(
                        mechanism=item["mechanism"],
                        layers=str(item.get("layers", "all")),
                        settings=dict(item.get("settings") or {}),
                        exact_below=item.get("exact_below", 0),
                    )
                )
        if mistakes:
            raise ApproxError("\n".join(mistakes))
        return cls(tuple(rules))

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Read a plan from a YAML or JSON file.

        Raises:
            ApproxError: if the file is missing, is not YAML, or holds mistakes.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ApproxError(f"Plan {path} cannot be read: {reason}. Give the path of a YAML or JSON file.") from None
        try:
            data, repeated = yaml_text.load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            # Dates and numbers that are none are ValueErrors in YAML.
            raise ApproxError(f"Plan {path} is not valid YAML or JSON: {' '.join(str(error).split())}") from None
        if repeated:
            raise ApproxError("\n".join(f"{path}: {mistake}" for mistake in repeated))
        return cls.parse(data, str(path))

    def to_data(self) -> list[dict[str, Any]]:
        """The rules as plain data; `Plan.parse` makes the same plan of it."""
        return [rule.to_dict() for rule in self.rules]

    def to_yaml(self) -> str:
        """The plan as YAML text that `Plan.read` understands."""
        return yaml.safe_dump({"rules": self.to_data()}, sort_keys=False)

    def to_json(self) -> str:
        """The plan as JSON text that `Plan.read` understands."""
        return json.dumps({"rules": self.to_data()}, indent=2)

    def resolve(self, anatomy: Anatomy) -> dict[Site, Rule]:
        """Say which site gets what, after checking every rule against the model.

        Returns:
            Site -> rule whose settings are complete (defaults written out), in the order of the layers; sites that
            stay exact are left out.

        Raises:
            ApproxError: with all mistakes at once: unknown names and settings, layers that do not exist, a mechanism
                without a causal form on a causal layer, settings out of range; or if nothing would be swapped.
        """
        mistakes: list[str] = []
        unsupported: list[str] = []
        chosen: dict[int, Rule] = {}
        for number, rule in enumerate(self.rules):
            where = f"rule {number + 1}" if len(self.rules) > 1 else "the plan"
            try:
                layers = parse_layers(rule.layers, len(anatomy.sites))
            except ApproxError as error:
                mistakes.append(f"In {where}: {error}")
                layers = []
            if rule.mechanism not in MECHANISMS:
                known = f"Known: {', '.join(sorted(MECHANISMS))}."
                mistakes.append(
                    f"Unknown mechanism '{rule.mechanism}' in {where}.{_nearest(rule.mechanism, MECHANISMS)} {known}"
                )
                continue
            settings, wrong = _complete(rule)
            mistakes += [f"In {where}: {text}" for text in wrong]
            for layer in layers:
                chosen[layer] = Rule(rule.mechanism, str(layer), settings, rule.exact_below)
            if not wrong:
                sites = [anatomy.sites[layer] for layer in layers]
                wrong_usage, wrong_support = _trial(rule, settings, sites, anatomy)
                mistakes += [f"In {where}: {text}" for text in wrong_usage]
                unsupported += [f"In {where}: {text}" for text in wrong_support]
        if mistakes or unsupported:
            code = Exit.USAGE if mistakes else Exit.UNSUPPORTED
            raise ApproxError("\n".join(dict.fromkeys(mistakes + unsupported)), code)
        if not chosen:
            raise ApproxError("The plan chooses no layer, so nothing would be swapped. Use 'layers: all'.")
        return {anatomy.sites[layer]: chosen[layer] for layer in sorted(chosen)}


def parse_layers(text: str, count: int) -> list[int]:
    """Numbers of the layers that `text` names, e.g. `all`, `-1`, `0-5,8`.

    Args:
        text: Numbers and inclusive ranges, separated by commas; negative numbers count from the last layer.
        count: How many layers the model has.

    Raises:
        ApproxError: if the text is not of this form or names a layer that does not exist.
    """
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
                f"Layers '{text}' were asked for, but '{part}' is no layer number or range. "
                "Use 'all', or numbers and ranges such as '0-5,8' or '-1'."
            ) from None
        ends = [end + count if end < 0 else end for end in (low, high)]
        for asked, end in zip((low, high), ends, strict=True):
            if not 0 <= end < count:
                raise ApproxError(
                    f"Layer {asked} asked for, but the model has layers 0-{count - 1}. "
                    f"Use 'layers: all' or numbers up to {count - 1}."
                )
        if ends[0] > ends[1]:
            raise ApproxError(
                f"Layers '{part}' run backwards. Write the lower number first, e.g. '{ends[1]}-{ends[0]}'."
            )
        chosen += range(ends[0], ends[1] + 1)
    return sorted(set(chosen))


def _complete(rule: Rule) -> tuple[dict[str, Any], list[str]]:
    defaults = MECHANISMS[rule.mechanism].defaults()
    wrong = []
    for name in rule.settings:
        if name not in defaults:
            allowed = f"Settings of '{rule.mechanism}': {', '.join(defaults)}." if defaults else "It has no settings."
            wrong.append(f"'{rule.mechanism}' has no setting '{name}'.{_nearest(name, defaults)} {allowed}")
    return {**defaults, **rule.settings}, wrong


def _trial(rule: Rule, settings: dict[str, Any], sites: list[Site], anatomy: Anatomy) -> tuple[list[str], list[str]]:
    """Mistakes that only show when the mechanism meets the layers: its constructor is the one judge of settings."""
    mechanism = MECHANISMS[rule.mechanism]
    usage, support = [], []
    for form in ("causal", "bidirectional"):
        layers = [site.layer for site in sites if site.causal == (form == "causal")]
        if layers and not getattr(mechanism, f"supports_{form}"):
            able = ", ".join(name for name, kind in sorted(MECHANISMS.items()) if getattr(kind, f"supports_{form}"))
            free = [site.layer for site in anatomy.sites if site.causal != (form == "causal")]
            hint = f" or choose among the layers that are not: {free[0]}-{free[-1]}" if free else ""
            support.append(
                f"'{rule.mechanism}' has no {form} form, but layers {_ranges(layers)} of {anatomy.architecture} are "
                f"{form}. Use one of {able}{hint}."
            )
    causal = [site.layer for site in sites if site.causal]
    if causal and rule.exact_below:
        support.append(
            f"'exact_below' cannot be used on causal layers ({_ranges(causal)}): a growing cache would mix both kinds of "
            "attention. Leave it out."
        )
    # Layers that do not exist leave no site; the settings are told wrong all the same.
    for shape in {(site.heads, site.head_dim, site.scale) for site in sites or anatomy.sites[:1]}:
        try:
            causal_only = not mechanism.supports_bidirectional
            mechanism(shape[0], shape[1], causal=causal_only, scale=shape[2], **settings)
        except ApproxError as error:
            usage.append(str(error))
        except (TypeError, OverflowError, RuntimeError, MemoryError) as error:
            usage.append(f"'{rule.mechanism}' cannot be made with these settings: {str(error).splitlines()[0]}")
    return usage, support


def _form_mistakes(item: Any, where: str) -> list[str]:
    if not isinstance(item, dict):
        return [f"{where}: a rule is a mapping with the keys {', '.join(_KEYS)}, found {_shown(item)}."]
    mistakes = [
        f"{where}: unknown key '{key}'.{_nearest(str(key), _KEYS)} Known: {', '.join(_KEYS)}."
        for key in item
        if key not in _KEYS
    ]
    if "mechanism" not in item:
        mistakes.append(f"{where}: the key 'mechanism' is missing. Known mechanisms: {', '.join(sorted(MECHANISMS))}.")
    elif not isinstance(item["mechanism"], str):
        mistakes.append(f"{where}: 'mechanism' must be a name, found {_shown(item['mechanism'])}.")
    if not isinstance(item.get("layers", "all"), str | int) or isinstance(item.get("layers"), bool):
        mistakes.append(
            f"{where}: 'layers' must be 'all', a number or ranges such as '0-5,8', found {_shown(item['layers'])}."
        )
    settings = item.get("settings")
    if settings is not None and (not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings)):
        mistakes.append(f"{where}: 'settings' must be a mapping of names to values, found {_shown(settings)}.")
    below = item.get("exact_below", 0)
    if not isinstance(below, int) or isinstance(below, bool) or below < 0:
        mistakes.append(f"{where}: 'exact_below' must be a number of tokens, 0 or more, found {_shown(below)}.")
    return mistakes


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def _ranges(layers: list[int]) -> str:
    consecutive = layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if consecutive and len(layers) > 1 else ", ".join(map(str, layers))
