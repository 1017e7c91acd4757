"""The version of this package, which pyproject.toml reads from here, and how the packages of its extras are installed."""

__version__ = "0.2.0"


def install(extra: str) -> str:
    """The command that installs what an extra of pyproject.toml adds.

    It names the packages themselves, because no package index has `approx-attention`.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        lines = map(Requirement, metadata.requires("approx-attention") or [])
    except metadata.PackageNotFoundError:
        lines = iter(())
    # Requirements of no extra have no marker here.
    added = [one for one in lines if one.marker and one.marker.evaluate({"extra": extra})]
    if not added:
        # A plain checkout, whose `cli.py` runs without installation.
        return f"pip install '.[{extra}]' in the repository of approx"
    return " ".join(["pip install", *(f"'{one.name}{one.specifier}'" for one in added)])
