"""Commands about this machine: doctor, and `approx --version --verbose`."""

from typing import Annotated

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.terminal import Terminal, table
from approx.errors import ApproxError, Exit
from approx.version import __version__

Probe = Annotated[
    bool,
    typer.Option(
        "--probe",
        help="Measure for a few minutes which exact attention is fastest on this machine; later processes use it.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(app, "Machine", "approx doctor", "approx doctor --offline --json", "approx doctor --probe")(doctor)


def doctor(terminal: Terminal, offline: options.Offline = False, probe: Probe = False) -> None:
    """Check versions, kernels, GPU, hub and data, and show how to fix problems."""
    from approx.doctor import health, probing

    if probe:
        with terminal.progress() as bar:
            probing.probe(bar)
    findings = health.examine(offline=offline)
    rows = [[finding.what, finding.state, finding.found] for finding in findings]
    terminal.result([vars(finding) for finding in findings], table(["what", "state", "found"], rows))
    broken = [finding.what for finding in findings if finding.state == "broken"]
    if broken:
        raise ApproxError(f"Not usable: {', '.join(broken)}. The table shows how to fix it.", Exit.MISSING)


def print_versions() -> None:
    """Print the version and the state of each part on this machine."""
    from approx.doctor import health

    typer.echo(f"approx {__version__}")
    for finding in health.examine(offline=True):
        typer.echo(f"{finding.what}: {finding.found}")
