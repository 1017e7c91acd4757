"""What a layer may become: each mechanism with a few of its settings."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from approx.errors import ApproxError, Exit, did_you_mean
from approx.mechanisms import MECHANISMS
from approx.planning.anatomy import Anatomy, Site
from approx.planning.plan import Plan
from approx.planning.rule import Rule
from approx.recipe import BASE
from approx.searching.options import SearchStage

# Settings from cheap to accurate; mechanisms that are not listed are tried at their defaults.
LADDERS: dict[str, tuple[dict[str, Any], ...]] = {
    "clustered": ({"clusters": 25}, {"clusters": 100}),
    "improved-clustered": ({"clusters": 25}, {"clusters": 100}),
    "local": ({"left": 32, "right": 32}, {"left": 64, "right": 64}, {"left": 128, "right": 128}),
    "longformer": ({"window": 128}, {"window": 256}, {}),
    "sinks": ({"window": 128}, {"window": 256}, {}),
    # Their feature maps are learned, so they are tried only after fitting, or if they are named.
    "linear": ({"feature_map": "hedgehog"}, {"feature_map": "hedgehog", "window": 64}),
}
# Exact, so that a search finds whatever is fastest; approximations that need no training; fitted to exact attention first.
_EXACT = ("exact", "flash")
_UNTRAINED = ("improved-clustered", "clustered", "local", "longformer", "bigbird", "sinks", "block", "performer")
_FITTED = ("linear",)
_OF_HEADS = ", "
# The shares of its heads that a layer may convert.
_SHARES = (0.25, 0.5, 0.75)


class Candidate(NamedTuple):
    """What one layer may become.

    Attributes:
        name: Its name, unique in a search.
        rule: Mechanism and settings.
        heads: Number of heads that are converted; None for all.
    """

    name: str
    rule: Rule
    heads: int | None = None

    @property
    def whole(self) -> str:
        """Name of the candidate that converts all heads in the same way."""
        return self.name.partition(_OF_HEADS)[0]

    def on(self, site: Site) -> bool:
        """Whether a site can become this."""
        mechanism = MECHANISMS[self.rule.mechanism]
        able = mechanism.supports_causal if site.causal else mechanism.supports_bidirectional
        if not able or (self.heads is not None and self.heads >= site.heads):
            return False
        settings = {**mechanism.defaults(), **self.rule.settings}
        try:
            probe = mechanism(self.heads or site.heads, site.head_dim, causal=site.causal, scale=site.scale, **settings)
        except ApproxError as error:
            # Some settings are not for every form.
            if error.exit_code != Exit.UNSUPPORTED:
                raise
            return False
        return not probe.reads_tokens or site.fixed_length is None


def candidates(stage: SearchStage, anatomy: Anatomy) -> list[Candidate]:
    """The candidates that some layer of a model can become.

    Args:
        stage: The options.
        anatomy: The model.

    Raises:
        ApproxError: if a mechanism or setting does not exist, or no layer of the model can run any of them.
    """
    if stage.candidates is not None:
        rules = list(stage.candidates)
    else:
        rules = list(_ladders(_names(stage), stage.length, given=stage.mechanisms is not None))
    chosen = stage.candidates is not None or stage.mechanisms is not None
    fitting = [rule for rule in rules if _fits(rule, anatomy, asked=chosen)]
    if not fitting:
        raise ApproxError(
            f"No layer of {anatomy.architecture} can run {', '.join(dict.fromkeys(rule.mechanism for rule in rules))}. "
            "`approx mechanisms --family …` lists what it can run.",
            Exit.UNSUPPORTED,
        )
    whole = [Candidate(name, rule) for name, rule in zip(_named(fitting), fitting, strict=True)]
    if stage.granularity == "layer":
        return whole
    counts = sorted({round(share * site.heads) for share in _SHARES for site in anatomy.sites} - {0})
    parts = [Candidate(f"{one.name}{_OF_HEADS}{count} heads", one.rule, count) for one in whole for count in counts]
    return whole + [one for one in parts if any(one.on(site) for site in anatomy.sites)]


def _names(stage: SearchStage) -> list[str]:
    if stage.mechanisms is None:
        return [*_EXACT, *_UNTRAINED, *(_FITTED if stage.heal else ())]
    for name in stage.mechanisms:
        if name not in MECHANISMS:
            raise ApproxError(
                f"Unknown mechanism '{name}'.{did_you_mean(name, MECHANISMS)} Known: {', '.join(MECHANISMS)}."
            )
    return list(dict.fromkeys(stage.mechanisms))


def _ladders(names: Sequence[str], length: int, *, given: bool) -> Iterator[Rule]:
    for name in names:
        for settings in LADDERS.get(name, ({},)):
            # A window as long as the input saves nothing; what was asked for by name is tried all the same.
            if given or settings.get("window", settings.get("left", 0) + settings.get("right", 0)) < length:
                yield Rule(name, settings=dict(settings))


def _fits(rule: Rule, anatomy: Anatomy, *, asked: bool) -> bool:
    """Whether a layer of the model can run a rule; mistakes in what the user wrote are raised."""
    forms = {site.causal: site for site in anatomy.sites}
    for site in forms.values():
        try:
            Plan((Rule(rule.mechanism, str(site.layer), rule.settings),)).resolve(anatomy)
        except ApproxError as error:
            if asked or error.exit_code != Exit.UNSUPPORTED:
                raise
        else:
            return True
    return False


def _named(rules: Sequence[Rule]) -> list[str]:
    """Short names of rules: the mechanism and the numbers among its settings; in full where two would be the same."""
    short = [_name(rule, lambda key, value: str(value) if type(value) is int else f"{key}={value}") for rule in rules]
    names = [
        _name(rule, lambda key, value: f"{key}={value}") if short.count(name) > 1 else name
        for name, rule in zip(short, rules, strict=True)
    ]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ApproxError(f"The candidate {twice[0]} is listed twice. List it once.")
    return names


def _name(rule: Rule, told: Callable[[str, Any], str]) -> str:
    # The base is called exact.
    mechanism = f"fastest {BASE}" if rule.mechanism == BASE else rule.mechanism
    return " ".join(dict.fromkeys([mechanism, *(told(*setting) for setting in rule.settings.items())]))
