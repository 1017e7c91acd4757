"""One sparse pattern, told: its figures, its pictures and, if asked for, its speed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.bench import Contender, bench
from approx.evaluation.options import BenchStage
from approx.patterns import Pattern, figures
from approx.publishing.patterns import flow_picture, steps_picture
from approx.publishing.pictures import write_pictures
from approx_kernels.dispatch.implementation import chosen_in

# The attention of one layer of BERT base.
HEADS, HEAD_DIM = 12, 64
# More positions than this make a thicket of the flow graph.
MOST_DRAWN = 48


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
        pattern: What is drawn.
        folder: Made where it is missing; older pictures of these names are replaced.
        length: Tokens at which single pairs and paths are drawn, where the pattern has more than `MOST_DRAWN`; its
            settings shrink with it, and the pictures say so.
        node: The position whose paths are lit in the flow graph; the last or the middle one without it.
        suffixes: What to draw, of `.svg` and `.png`.

    Returns:
        The files written.

    Raises:
        ApproxError: if the length or the node is out of range, or the folder cannot be written.
    """
    if not 1 <= length <= MOST_DRAWN:
        raise ApproxError(f"Asked to draw {length} tokens pair by pair; allowed is 1 to {MOST_DRAWN}.")
    small = pattern.shrunk(length) if pattern.length > MOST_DRAWN else pattern
    if node is not None and not 0 <= node < small.length:
        raise ApproxError(
            f"Position {node} was asked for, but the graph is drawn over {small.length} tokens: 0 to {small.length - 1}."
        )
    title = _named(pattern)
    views, note = [pattern.steps], ""
    if small is not pattern:
        views.insert(0, small.steps)
        note = f"drawn with {_counted(small)}, and as it is: a point stands for many pairs, paler if few are seen"
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


def tell(
    pattern: Pattern, *, block: int = 64, device: str | None = None, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Give the figures of a pattern, and with a device its speed against exact attention there.

    Args:
        pattern: What is told of.
        block: Side of the tiles of the block density.
        device: Where one layer's attention is timed, 12 heads of size 64, float32; None times nothing.
        progress: Called with the stage, how much of it is done, and how much there is.

    Returns:
        As `approx.patterns.figures`, with `speed`: rows as in a record.
    """
    progress(f"count {pattern.name}", 0, 1)
    found = figures(pattern, block)
    progress(f"count {pattern.name}", 1, 1)
    if device is not None:
        found["speed"] = _speed(pattern, device, progress)
    return found


def refuse_existing(folder: Path, force: bool) -> None:
    """Check that pictures may be drawn into a folder, before the work starts.

    Raises:
        ApproxError: if it holds something and `force` is not given, or is not a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ApproxError(f"{folder} is a file, a folder is to be written there. Choose another with -o.", Exit.REFUSED)
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ApproxError(
            f"{folder} exists already. Choose another folder with -o, replace its pictures with --force, or leave them "
            "out with --no-draw.",
            Exit.REFUSED,
        )


def _speed(pattern: Pattern, device: str, progress: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    ours = {name: made.to(device).eval() for name, made in pattern.mechanisms(HEADS, HEAD_DIM).items()}

    def make_inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        # Which pairs are computed depends on no value, so random ones are as good as real ones.
        generator = torch.Generator("cpu").manual_seed(0)
        shape = (3, batch, HEADS, length, HEAD_DIM)
        return tuple(torch.randn(shape, generator=generator).to(device))

    def exact(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        q, k, v = inputs
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=pattern.causal)

    return bench(
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
    )["speed"]


def _named(pattern: Pattern) -> str:
    return f"{pattern.name}{', causal' if pattern.causal else ''}: {_counted(pattern)}"


def _counted(pattern: Pattern) -> str:
    return f"{pattern.length:,} token{'s'[: pattern.length > 1]}, {pattern.told}"
