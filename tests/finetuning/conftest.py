"""Training data of SST-2 in its official layout, and a text."""

import pytest

from tiny_training import write_sst2


@pytest.fixture
def sst2(tmp_path) -> str:
    return write_sst2(tmp_path)


@pytest.fixture
def corpus(tmp_path) -> str:
    """A text of a dozen words, again and again."""
    file = tmp_path / "corpus.txt"
    file.write_text("the film is not very good the film is bad dull fine long " * 60, encoding="utf-8")
    return str(file)
