"""YAML as people write it: a key given twice is found, and 1e-6 is a number (PyYAML on its own wants 1.0e-6)."""

import re
from typing import Any

import yaml

_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$")


def load(text: str) -> tuple[Any, list[str]]:
    """Read YAML or JSON.

    Returns:
        The data, and one sentence for each key that stands twice in its mapping; the later one would silently win.

    Raises:
        yaml.YAMLError: if the text is neither.
    """
    repeated: list[str] = []

    class Loader(yaml.SafeLoader):
        pass

    def unique(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            repeated.append(f"line {node.start_mark.line + 1}: the key '{key}' is given twice. Keep one of them.")
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, unique)
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return yaml.load(text, Loader=Loader), repeated
