"""The command that draws attention: look."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from approx.cli import options
from approx.cli.command import command, typed_command
from approx.cli.tables import table
from approx.cli.terminal import Terminal

_INPUT, _DRAWN = "Input", "Drawn large"


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    command(
        app,
        "Measure",
        'approx look converted-bert --text "a fine film" -o look',
        "approx look converted-squad --text article.txt --layer 3 --head 2",
        "approx look converted-whisper --audio speech.flac --against whisper",
    )(look)


def look(
    terminal: Terminal,
    model: options.Model,
    text: Annotated[
        str | None, typer.Option(help="A text, or a .txt file.", show_default=False, rich_help_panel=_INPUT)
    ] = None,
    audio: Annotated[
        Path | None, typer.Option(help="A recording, FLAC or WAV.", show_default=False, rich_help_panel=_INPUT)
    ] = None,
    image: Annotated[Path | None, typer.Option(help="An image.", show_default=False, rich_help_panel=_INPUT)] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Draw this layer large; -1 is the last. Default: the heads that change most.",
            show_default=False,
            rich_help_panel=_DRAWN,
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            help="Draw this head large. Default: the one of the layer that changes most.",
            show_default=False,
            rich_help_panel=_DRAWN,
        ),
    ] = None,
    against: options.Against = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("look"),
    force: options.Force = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Draw the attention of a checkpoint on one input: exact, approximate and their difference, of every head.

    The folder holds one offline page, index.html, and its pictures as SVG and PNG. By default exact attention runs on the inputs
    of each layer, with the same weights; --against compares with another checkpoint.
    """
    from approx import api
    from approx.publishing.wording import percent

    with terminal.progress() as bar:
        made = api.look(
            model,
            output,
            text=text,
            audio=audio,
            image=image,
            layer=layer,
            head=head,
            against=against,
            force=force,
            device=device,
            dtype=dtype,
            offline=offline,
            merge_adapter=merge_adapter,
            command=typed_command(),
            progress=bar,
        )
    rows = [
        [
            one.name,
            one.mechanism,
            *(
                ("–", "–")
                if one.mechanism == "exact"
                else (_range(one.kept, percent), _range(one.error, "{:.2f}".format))
            ),
        ]
        for one in made.layers
    ]
    drawn = [f"Layer {one.layer}, head {one.head} is drawn large: {one.why}." for one in made.large]
    terminal.result(made, table(["", "mechanism", "attention kept", "error"], rows), *drawn)
    terminal.note(f"Open {made.files[0]}")


def _range(values: list[float], words: Callable[[float], str]) -> str:
    """The least and the largest value."""
    low, high = words(min(values)), words(max(values))
    return low if low == high else f"{low} … {high}"
