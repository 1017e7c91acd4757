"""One rule of a plan: which layers and heads get which mechanism."""

from dataclasses import field
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass

from approx.validation import Model, listed


def _selection(value: Any) -> Any:
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    raise ValueError("'all', a number or ranges such as '0-5,8'")


_Selection = Annotated[str, BeforeValidator(_selection, json_schema_input_type=str | int)]
_Settings = Annotated[
    dict[str, Any],
    BeforeValidator(lambda value: {} if value is None else value, json_schema_input_type=dict[str, Any] | None),
]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Rule:
    """Give some layers, or some heads of them, a mechanism.

    Attributes:
        mechanism: Name of a mechanism, e.g. `improved-clustered`.
        layers: `all`, or numbers and ranges such as `0-5,8`; -1 is the last layer.
        settings: Settings of the mechanism; those left out take their defaults.
        exact_below: Inputs shorter than this many tokens keep exact attention, decided at each call.
        heads: `all`, or numbers and ranges such as `0-3,8`; -1 is the last head.
        recompute: Whether training recomputes the mechanism in the backward pass instead of keeping its intermediates.
    """

    mechanism: Annotated[str, Field(examples=["improved-clustered"])]
    layers: _Selection = "all"
    settings: _Settings = field(default_factory=dict)
    exact_below: Annotated[int, Strict(), Field(ge=0)] = 0
    heads: _Selection = "all"
    recompute: Annotated[bool, Strict()] = False

    def to_dict(self) -> dict[str, Any]:
        """The rule as plain data, without defaults except for layers and mechanism."""
        data = {key: getattr(self, key) for key in KEYS}
        plain = Rule(self.mechanism)
        return {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in data.items()
            if key in ("layers", "mechanism") or value != getattr(plain, key)
        }


# In the order in which people write them.
KEYS = ("layers", "heads", "mechanism", "settings", "exact_below", "recompute")


class RuleList(Model):
    """A plan as written in a file.

    Attributes:
        rules: In order; the last matching one wins.
    """

    rules: list[Rule]


def unwrapped(data: Any) -> Any:
    """The rules of a plan given as a rule, a list of rules or `{rules: [...]}`."""
    return listed(data["rules"] if isinstance(data, dict) and set(data) == {"rules"} else data)


Rules = Annotated[
    list[Rule],
    Field(min_length=1),
    BeforeValidator(unwrapped, json_schema_input_type=Rule | list[Rule] | RuleList),
]
