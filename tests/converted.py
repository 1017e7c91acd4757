"""Load converted folders in separate processes."""

import os
import subprocess
import sys

from approx.checkpoints import families
from approx.seam.internals import auto_classes
from zoo import tiny


def code(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


def auto_class(architecture):
    family = families.stock_class(type(tiny(architecture))).config_class.model_type
    return next(auto for auto, name in auto_classes(family).items() if name == architecture)


def run(*command, **more):
    """Run a child process without access to this repository or a terminal."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**environment, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
