"""Commands about this machine: doctor, and `approx --version --verbose`."""

from typing import Annotated, Any

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.tables import table
from approx.cli.terminal import Terminal
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
    terminal.result({"findings": [vars(finding) for finding in findings]}, table(["what", "state", "found"], rows))
    broken = [finding.what for finding in findings if finding.state == "broken"]
    if broken:
        raise ApproxError(f"Not usable: {', '.join(broken)}. The table shows how to fix it.", Exit.MISSING)


def print_versions(terminal: Terminal) -> None:
    """Print the version; if verbose, also the state of each part on this machine."""
    data: dict[str, Any] = {"approx": __version__}
    lines = [f"approx {__version__}"]
    if terminal.verbose:
        from approx.doctor import health

        findings = health.examine(offline=True)
        data["findings"] = [vars(finding) for finding in findings]
        lines += [f"{finding.what}: {finding.found}" for finding in findings]
    terminal.result(data, *lines)
