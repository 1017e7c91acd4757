# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""Whether a slim converted folder runs the code of the installed package, or its own. Travels with converted checkpoints."""

import logging
import re
from importlib import import_module
from typing import Any

_LOG = logging.getLogger(__name__)
_PLAIN = "This converted model runs its plain PyTorch code, which is slower than the C and Triton of the package"


def installed_model(layout: int, version: str) -> Any:
    """The base class of converted models in the package `approx-attention`, with its C and Triton; the log says what runs.

    Args:
        layout: Format of the config that the folder was written with.
        version: Version of the package that wrote the folder; older ones may lack its mechanisms, and the next major version
            may compute them differently.

    Returns:
        `ApproxModel`, or None where there is no compatible package and the folder's own code has to run.
    """
    try:
        # By name, because transformers would take a plain import for a package that the folder needs.
        installed = import_module("approx.version").__version__
        model = import_module("approx.seam.model").ApproxModel
        understood = import_module("approx.seam.dispatch").FORMAT
    except ImportError:
        _LOG.warning("%s. To get the speed: pip install approx-attention", _PLAIN)
        return None
    written, here = _numbers(version), _numbers(installed)
    if understood == layout and written <= here < (written[0] + 1,):
        _LOG.info("This converted model runs the code of the installed package approx-attention %s.", installed)
        return model
    wanted = f"format {layout} and at least {version}, below {written[0] + 1}.0"
    _LOG.warning(
        "%s: approx-attention %s with format %s is installed, and this folder needs %s. To get the speed: pip install "
        "'approx-attention>=%s,<%s'",
        *(_PLAIN, installed, understood, wanted, version, written[0] + 1),
    )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
