"""The steps of sparse patterns, in turn over heads or layers."""

from typing import Any

from approx.mechanisms.mechanism import checked, one_of, whole_number


def chosen_steps(mode: Any, step: Any, count: int) -> tuple[int | None, ...]:
    """The steps of a sparse pattern that the heads use in turn; None stands for all of them merged.

    `mode` is `merged`; `heads`, where heads take turns; or `interleave`, where layers do: a layer on its own uses
    step 1. `step`, from 1, is one step for all heads.
    """
    one_of("mode", mode, ("merged", "interleave", "heads"))
    if step is not None:
        checked("mode", mode, mode != "heads", "'merged' or 'interleave' with a step, which all heads then use")
        return (whole_number("step", step, 1, count),)
    return {"merged": (None,), "interleave": (1,), "heads": tuple(range(1, count + 1))}[mode]


def interleaved(settings: dict[str, Any], rank: int, count: int) -> dict[str, Any]:
    """The settings of the layer of that rank; with `mode: interleave` they name its step among `count`."""
    own = settings.get("mode") == "interleave" and settings.get("step") is None
    return settings | {"step": rank % count + 1} if own else settings
