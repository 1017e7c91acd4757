"""Trainings in a report: modes, held-out scores before and after, and curves."""

from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from approx.evaluation.record_training import Trained
from approx.publishing import wording
from approx.publishing.drawing import draw


def training_table(trained: Trained) -> dict[str, Any]:
    """Lay out one training: a row per mode, and the scores of held-out training examples."""
    scores = [
        ("exact attention, before training", trained.exact),
        ("before", trained.before),
        ("after", trained.after),
    ]
    return {
        "name": trained.name,
        "measure": trained.measure,
        "examples": wording.count(trained.examples),
        "held_out": wording.count(trained.held_out),
        "approximated": None if trained.approximated is None else wording.percent(trained.approximated),
        "scores": [(name, wording.decimal(value, 4)) for name, value in scores if value is not None],
        "rows": [
            {
                "mode": phase.mode,
                "steps": wording.count(phase.steps),
                "best_step": wording.count(phase.best_step),
                "parameters": wording.count(phase.parameters),
                "tokens": wording.count(phase.tokens),
                "time": wording.duration(phase.seconds),
                "ended": wording.ENDED.get(phase.ended, phase.ended),
            }
            for phase in trained.phases
        ],
    }


def training_figure(trained: Trained, colour: str, identity: str) -> Markup | None:
    """Draw the loss of each mode against its steps, and below it the measure that chose the best step.

    Returns None if nothing was trained, because the budget was met already.

    Args:
        trained: An entry of "trainings".
        colour: Colour of the variant.
        identity: Unique in the page.
    """
    phases = trained.phases
    if not phases:
        return None

    def paint(axes: Axes) -> None:
        axes.set_axis_off()
        for number, phase in enumerate(phases):
            width = 1 / len(phases)
            loss = axes.inset_axes((number * width + 0.09, 0.56, width - 0.12, 0.36))
            value = axes.inset_axes((number * width + 0.09, 0.08, width - 0.12, 0.36), sharex=loss)
            for part, key, label in (
                (loss, "loss", "training loss"),
                (value, "validation", f"held-out {phase.measure}"),
            ):
                part.patch.set_visible(False)
                points = [(point.step, held) for point in phase.curve if (held := getattr(point, key)) is not None]
                if points:
                    steps, values = zip(*points, strict=True)
                    part.plot(
                        steps,
                        values,
                        color=colour,
                        linewidth=1.4,
                        # A line of one point would not be seen.
                        marker="o" if key == "validation" or len(points) == 1 else None,
                        markersize=3,
                    )
                part.set_ylabel(label)
                part.yaxis.set_major_locator(MaxNLocator(4))
                part.xaxis.set_major_locator(MaxNLocator(4, integer=True))
                part.xaxis.set_major_formatter(FuncFormatter(lambda step, _: wording.count(int(step))))
            value.axvline(phase.best_step, color=colour, linewidth=0.8, linestyle=":")
            loss.set_title(phase.mode, fontsize=9)
            loss.tick_params(labelbottom=False)
            value.set_xlabel("steps")

    modes = " and ".join(phase.mode for phase in phases)
    title = f"Training of {trained.name}: loss and held-out {phases[-1].measure} against steps, of {modes}."
    return draw(
        identity,
        f"{title} A dotted line marks the step whose weights were kept.",
        paint,
        (3.6 * len(phases) + 1.2, 4.4),
    )
