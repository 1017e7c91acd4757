"""The figures, pictures and optionally the speed of one sparse pattern."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.bench import Contender, bench
from approx.evaluation.options import BenchStage
from approx.evaluation.record import Speed
from approx.patterns import Pattern, figures
from approx.progress import Progress
from approx.publishing.patterns import flow_picture, steps_picture
from approx.publishing.plots import write_pictures
from approx_kernels.dispatch.implementation import chosen_in

# The attention of one layer of BERT base.
HEADS, HEAD_DIM = 12, 64
# A flow graph of more positions is not legible.
MOST_DRAWN = 48


@dataclass(frozen=True)
class Study:
    """The measurements of a pattern.

    Attributes:
        figures: The figures of `approx.patterns.figures`.
        speed: Times of one layer's attention, as in a record; empty if nothing was timed.
    """

    figures: dict[str, Any]
    speed: list[Speed]

    def to_data(self) -> dict[str, Any]:
        """The figures as plain data, with `speed` if anything was timed."""
        return self.figures | ({"speed": [row.to_data() for row in self.speed]} if self.speed else {})


def draw(
    pattern: Pattern,
    folder: Path,
    *,
    length: int = 16,
    node: int | None = None,
    suffixes: Sequence[str] = (".svg", ".png"),
) -> list[Path]:
    """Draw the steps and the information-flow graph into `steps.svg`, `flow.svg` and the same as PNG.

    Args:
        pattern: The pattern.
        folder: Created if missing; older pictures of these names are replaced.
        length: Length for drawing single pairs and paths if the pattern has more than `MOST_DRAWN` tokens; its settings
            shrink in proportion, as the pictures say.
        node: The position whose paths are highlighted in the flow graph; the last or the middle one by default.
        suffixes: Formats to draw: `.svg`, `.png`.

    Returns:
        The written files.

    Raises:
        ApproxError: if the length or the node is out of range, or the folder cannot be written.
    """
    if not 1 <= length <= MOST_DRAWN:
        raise ApproxError(f"The length for drawing is {length} tokens; allowed is 1 to {MOST_DRAWN}.")
    small = pattern.shrunk(length) if pattern.length > MOST_DRAWN else pattern
    if node is not None and not 0 <= node < small.length:
        raise ApproxError(
            f"Position {node} is out of range: the graph is drawn over {small.length} tokens, 0 to {small.length - 1}."
        )
    title = _named(pattern)
    views, note = [pattern.steps], ""
    if small is not pattern:
        views.insert(0, small.steps)
        note = f"drawn with {_counted(small)}, and at full length: a point stands for many pairs, paler if few are seen"
    pictures = {
        "steps": steps_picture(title, note, views, causal=pattern.causal, suffixes=suffixes),
        "flow": flow_picture(
            f"{title}: information flow",
            "" if small is pattern else f"drawn with {_counted(small)}",
            small.steps,
            causal=pattern.causal,
            node=node,
            suffixes=suffixes,
        ),
    }
    return write_pictures(pictures, folder)


def report(pattern: Pattern, *, block: int = 64, device: str | None = None, progress: Progress) -> Study:
    """Count a pattern and, with a device, time it against exact attention.

    Args:
        pattern: The pattern.
        block: Side of the tiles of the block density.
        device: Device to time one layer's attention on, with 12 heads of size 64 in float32; None times nothing.
        progress: Called with stage, done and total.
    """
    progress(f"count {pattern.name}", 0, 1)
    counted = figures(pattern, block)
    progress(f"count {pattern.name}", 1, 1)
    return Study(counted, [] if device is None else _speed(pattern, device, progress))


def refuse_existing(folder: Path, force: bool) -> None:
    """Check that pictures can be written into a folder, before the work starts.

    Raises:
        ApproxError: if the folder is not empty and `force` is false, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ApproxError(f"{folder} is a file, not a folder. Choose another folder with -o.", Exit.REFUSED)
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ApproxError(
            f"{folder} exists already. Choose another folder with -o, replace its pictures with --force, or draw none with "
            "--no-draw.",
            Exit.REFUSED,
        )


def _speed(pattern: Pattern, device: str, progress: Progress) -> list[Speed]:
    ours = {name: made.to(device).eval() for name, made in pattern.mechanisms(HEADS, HEAD_DIM).items()}

    def make_inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        # The pairs do not depend on the values, so random ones will do.
        generator = torch.Generator("cpu").manual_seed(0)
        shape = (3, batch, HEADS, length, HEAD_DIM)
        return tuple(torch.randn(shape, generator=generator).to(device))

    def exact(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        q, k, v = inputs
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=pattern.causal)

    rows = bench(
        [
            Contender("exact (SDPA)", exact, "base"),
            *(Contender(name, lambda inputs, made=made: made(*inputs)) for name, made in ours.items()),
        ],
        BenchStage(lengths=[pattern.length], inputs="synthetic"),
        make_inputs=make_inputs,
        device=device,
        dtype="float32",
        chosen_in=chosen_in,
        progress=lambda done, total, what: progress(f"time {what}", done, total),
    )
    return list(rows)


def _named(pattern: Pattern) -> str:
    return f"{pattern.name}{', causal' if pattern.causal else ''}: {_counted(pattern)}"


def _counted(pattern: Pattern) -> str:
    return f"{pattern.length:,} token{'s'[: pattern.length > 1]}, {pattern.description}"
