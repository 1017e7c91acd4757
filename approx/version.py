"""The version of this package; pyproject.toml reads it from here, so a plain checkout knows it too."""

__version__ = "0.2.0"
