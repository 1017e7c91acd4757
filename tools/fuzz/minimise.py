"""Make a failing case smaller: fewer values of its tree, fewer bytes."""

import json
from collections.abc import Callable, Iterator
from typing import Any

Fails = Callable[[bytes], bool]


def minimised(content: bytes, fails: Fails, tries: int = 300) -> bytes:
    """A smaller content that still fails, found with at most so many tries.

    Args:
        content: It fails.
        fails: Whether another content fails in the same way.
        tries: How often it may be asked.
    """
    left = [tries]

    def asked(other: bytes) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(other)

    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return _fewer(content, asked)
    if asked(json.dumps(tree).encode()):
        return json.dumps(_smaller(tree, asked)).encode()
    return _fewer(content, asked)


def _fewer(content: bytes, fails: Fails) -> bytes:
    """Without blocks of bytes, first large ones."""
    size = max(len(content) // 2, 1)
    while size:
        at = 0
        while at < len(content):
            shorter = content[:at] + content[at + size :]
            if fails(shorter):
                content = shorter
            else:
                at += size
        size //= 2
    return content


def _smaller(tree: Any, fails: Fails) -> Any:
    """Without keys and items, as long as that is found."""
    found = True
    while found:
        found = False
        for candidate in _without(tree):
            if fails(json.dumps(candidate).encode()):
                tree, found = candidate, True
                break
    return tree


def _without(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        # Half of the keys at once where there are many.
        keys = list(tree)
        for half in (keys[: len(keys) // 2], keys[len(keys) // 2 :]) if len(keys) > 3 else ():
            yield {key: value for key, value in tree.items() if key not in half}
        for key in keys:
            yield {name: value for name, value in tree.items() if name != key}
        for key in keys:
            yield from ({**tree, key: smaller} for smaller in _without(tree[key]))
    elif isinstance(tree, list):
        for half in (tree[: len(tree) // 2], tree[len(tree) // 2 :]) if len(tree) > 3 else ():
            yield half
        for at in range(len(tree)):
            yield tree[:at] + tree[at + 1 :]
        for at in range(len(tree)):
            yield from ([*tree[:at], smaller, *tree[at + 1 :]] for smaller in _without(tree[at]))
    elif isinstance(tree, str) and len(tree) > 20:
        yield tree[: len(tree) // 2]
