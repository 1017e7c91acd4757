"""The command that publishes a converted folder on a hub: push."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError

if TYPE_CHECKING:
    from approx.pushing.push import Upload

_INTERRUPTED = (
    "Interrupted. The hub holds either all files of a commit or none; run the same command to complete the push."
)


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    command(
        app,
        "Publish",
        "approx push converted me/my-model --dry-run",
        "approx push converted me/my-model --record quality.json --record speed.json",
        "approx push converted me/my-model --create-pr --yes",
        interrupted=_INTERRUPTED,
    )(push)


def push(
    terminal: Terminal,
    folder: Annotated[str, typer.Argument(help="A converted folder.", show_default=False)],
    repo: Annotated[str, typer.Argument(help="The repository, owner/name.", show_default=False)],
    record: Annotated[
        list[Path] | None, typer.Option(help="A record of this folder to include, scrubbed; may be repeated.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Create a public repository. Default: private.")] = False,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead of writing to the branch.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to write to, created if missing. Default: main.")] = None,
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The base on the hub, owner/name, if a local copy of it was converted.")
    ] = None,
    license_: Annotated[
        str | None, typer.Option("--license", help="The licence, such as apache-2.0. Default: that of the base.")
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="A language, such as en; may be repeated. Default: that of the base.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder that would be pushed and list its files; send nothing.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --dry-run: the folder to write. Default: FOLDER.push.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Upload without asking.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Write over files that were edited on the hub or are another model's, and over an existing --output.",
        ),
    ] = False,
    offline: options.Offline = False,
) -> None:
    """Push a verified folder to a hub, with a model card; download it again and compare.

    The hub is that of HF_ENDPOINT; the token comes from HF_TOKEN or `hf auth login`.
    """
    from approx import api

    if output is not None and not dry_run:
        raise ApproxError("--output has an effect only with --dry-run. Give both or neither.")
    if offline and not dry_run:
        raise ApproxError("--offline was given, but a push needs the hub. See what would be pushed with --dry-run.")
    settings: dict[str, Any] = {"records": record or [], "public": public, "force": force}
    settings |= {"base_model": base_model, "license": license_, "language": language}
    if dry_run:
        place = output or Path(folder).with_name(f"{Path(folder).resolve().name}.push")
        with terminal.progress() as bar:
            made = api.push(folder, repo, dry_run=place, offline=offline, progress=bar, **settings)
        terminal.result(made, _files(list(made.files.items()), None), made.summary)
        _notes(terminal, made.notes, made.left)
        return

    def agree(upload: "Upload") -> bool:
        if not (yes and terminal.quiet):
            _show(terminal, upload)
        _notes(terminal, upload.notes, upload.left)
        if yes:
            return True
        try:
            return typer.confirm("Upload?", err=True)
        except typer.Abort:
            raise ApproxError(
                "Nothing was uploaded: there was no answer. Pass --yes to upload without asking."
            ) from None

    with terminal.progress() as bar:
        done = api.push(
            folder, repo, create_pr=create_pr, revision=revision, message=message, agree=agree, progress=bar, **settings
        )
    terminal.result(done, done.summary, f"Downloaded again and compared: {done.check}.")


def _show(terminal: Terminal, upload: "Upload") -> None:
    """Print the planned upload on stderr, where the question appears."""
    terminal.err.print(_files(upload.files, set(upload.written)))
    for name in upload.deleted:
        terminal.err.print(f"deleted: {name}")
    terminal.err.print(upload.card)
    kind = "private" if upload.private else "PUBLIC"
    place = f"{upload.endpoint}/{upload.repo}, branch {upload.revision}"
    made = "a new" if upload.new else "the existing"
    how = ", as a pull request" if upload.create_pr else ""
    terminal.err.print(f"To {made} {kind} repository {place}{how}.")


def _files(files: list[tuple[str, int]], written: set[str] | None) -> Any:
    rows = [
        [name, f"{size:,}", "" if written is None else "upload" if name in written else "the same there"]
        for name, size in files
    ]
    total = sum(size for _, size in files)
    return table(["file", "bytes", "change"], rows, title=f"{len(files)} files, {total / 1e6:,.2f} MB")


def _notes(terminal: Terminal, notes: list[str], left: list[str]) -> None:
    for note in notes:
        terminal.note(note)
    if left:
        terminal.note(f"Not pushed: {', '.join(left)}")
