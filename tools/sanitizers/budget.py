"""Of many tests those that there is time for: some of each file first."""

import os
import time
from collections import defaultdict
from hashlib import sha256

import pytest

_UNTIL = float(os.environ["APPROX_SANITIZE_UNTIL"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    by_file = defaultdict(list)
    for item in sorted(items, key=lambda item: sha256(item.nodeid.encode()).digest()):
        by_file[item.path].append(item)
    turns = {item.nodeid: turn for own in by_file.values() for turn, item in enumerate(own)}
    items.sort(key=lambda item: (turns[item.nodeid], item.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > _UNTIL:
        pytest.skip("the time is up")
