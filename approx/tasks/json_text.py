"""Read JSON of data files; what Python reads but no tokenizer takes is refused too."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str) -> Any:
    """The content of a JSON text.

    Raises:
        ValueError: if it is not JSON, is nested too deeply, or holds half of a surrogate pair.
    """
    try:
        data = json.loads(text)
        # Half a pair can only be written as an escape.
        if "\\ud" in text.lower():
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return data
