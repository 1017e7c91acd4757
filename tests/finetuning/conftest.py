"""Training data of SST-2 in its official layout."""

import pytest

from tiny_training import write_sst2


@pytest.fixture
def sst2(tmp_path) -> str:
    return write_sst2(tmp_path)
