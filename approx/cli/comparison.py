"""Commands that show exact and converted side by side on single inputs: generate, predict."""

from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError

if TYPE_CHECKING:
    from rich.table import Table

    from approx.measuring.prediction import Continued, Predicted

_PANEL = "Measure"
_SHOWN = 60


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(
        app,
        _PANEL,
        'approx generate converted-gpt2 --prompt "Once upon a time" --prompt "To be or" --max-new-tokens 30',
        'approx generate converted-gpt2 --against gpt2 --prompt "The meaning of life is" --sample --temperature 0.7 --seed 1',
    )(generate)
    command(
        app,
        _PANEL,
        'approx predict converted-bert "a fine film" "a dull film"',
        'approx predict converted-squad article.txt --question "Who wrote it?"',
        "approx predict converted-wav2vec2 speech.flac --against wav2vec2",
    )(predict)


def generate(
    terminal: Terminal,
    model: options.Model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be repeated.", show_default=False)
    ] = None,
    against: options.Against = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 50,
    sample: Annotated[bool, typer.Option("--sample", help="Draw each token instead of taking the likeliest.")] = False,
    temperature: Annotated[
        float | None, typer.Option(min=1e-3, help="With --sample: below 1 is safer, above 1 is wilder. Default: 1.")
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Continue prompts with exact and with converted attention, and show where the texts differ first."""
    from approx import api

    if not prompt:
        raise ApproxError('No prompt was given. Give one with --prompt, e.g. --prompt "Once upon a time".')
    if temperature is not None and not sample:
        raise ApproxError("--temperature has an effect only with --sample. Give both or neither.")
    made = api.generate(
        model,
        prompt,
        against=against,
        max_new_tokens=max_new_tokens,
        sample=sample,
        temperature=temperature or 1.0,
        seed=seed,
        device=device,
        dtype=dtype,
        offline=offline,
        merge_adapter=merge_adapter,
    )
    terminal.result(made, *(part for one in made.prompts for part in _generated(one)))
    terminal.note("Times are of one run; `approx bench --mode generate` measures them.")


def predict(
    terminal: Terminal,
    model: options.Model,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="A text, a .txt file, a recording (FLAC, WAV) or an image.", show_default=False
        ),
    ],
    against: options.Against = None,
    question: Annotated[
        str | None, typer.Option(help="The question to the text, for question answering.", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Labels or candidates to show.")] = 5,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Predict from single inputs with exact and with converted attention, side by side."""
    from approx import api

    made = api.predict(
        model,
        inputs,
        against=against,
        question=question,
        top=top,
        device=device,
        dtype=dtype,
        offline=offline,
        merge_adapter=merge_adapter,
    )
    terminal.result(made, *(part for one in made.inputs for part in _predicted(one, top)))


def _generated(one: "Continued") -> "list[Table | str]":
    from approx.publishing import wording

    said = one.continuations
    rows = [
        ["text", *(repr(entry.text)[1:-1] for entry in said.values())],
        ["tokens/s", *(wording.milliseconds(entry.tokens_per_second) for entry in said.values())],
        ["first, ms", *(wording.milliseconds(entry.first_token_ms) for entry in said.values())],
        ["cache, MB", *(wording.milliseconds(entry.cache_mb) for entry in said.values())],
    ]
    title = f"{_short(one.prompt)} ({one.tokens} tokens)"
    return [table(["", *said], rows, title=title), *_parting(one)]


def _parting(one: "Continued") -> list[str]:
    lines = []
    for label, place in one.differences.items():
        if place is None:
            lines.append(f"All {len(one.continuations[label].tokens)} tokens of {label} are those of exact.")
        else:
            tokens = ["the end" if word is None else repr(word) for word in (place.base, place.own)]
            lines.append(
                f"Token {place.token} is the first that differs: {tokens[0]} in exact, {tokens[1]} in {label}."
            )
    return lines


def _predicted(one: "Predicted", top: int) -> "list[Table | str]":
    from approx.publishing import wording

    said = one.predictions
    labels, base = list(said), next(iter(said.values()))
    title = _short(one.question or one.input)
    if one.kind == "labels":
        names = sorted(base, key=lambda name: -base[name])[:top]
        rows = [[name, *(wording.decimal(said[label].get(name, 0.0), 3) for label in labels)] for name in names]
        best = {label: max(scores, key=scores.__getitem__) for label, scores in said.items()}
        return (
            [table(["", *labels], rows, title=title), *_agreement(best)]
            if len(base) > 1
            else [table(["", *labels], rows, title=title)]
        )
    if one.kind == "text":
        return [table(["", "text"], [[label, said[label]] for label in labels], title=title), *_agreement(said)]
    if one.kind == "masks":
        rows = [
            [f"mask {number + 1}" if not place else "", *(f"{_cell(each)}" for each in line)]
            for number, masks in enumerate(zip(*(said[label] for label in labels), strict=True))
            for place, line in enumerate(zip_longest(*(mask.items() for mask in masks)))
        ]
        return [table(["", *labels], rows, title=title)]
    rows = [
        [f"{row[0]['word']}", *(f"{each['label']} {each['probability']:.3f}" for each in row)]
        for row in zip(*(said[label] for label in labels), strict=True)
    ]
    return [table(["", *labels], rows, title=title)]


def _agreement(said: dict[str, str]) -> list[str]:
    (_, base), *others = said.items()
    lines = []
    for label, other in others:
        if other == base:
            lines.append(f"{label} predicts the same.")
            continue
        pairs = list(zip_longest(base.split(), other.split(), fillvalue="the end"))
        place, words = next((n + 1, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
        where = f"Word {place} is the first that differs: " if len(pairs) > 1 else ""
        lines.append(f"{where}{words[0]} in exact, {words[1]} in {label}.")
    return lines


def _cell(pair: tuple[str, float] | None) -> str:
    return "" if pair is None else f"{pair[0]} {pair[1]:.3f}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
