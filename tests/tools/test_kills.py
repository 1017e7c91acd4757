"""A short version of `make kills`."""

import pytest

from fuzz.kills import commands, killed
from hub_state import Hub


@pytest.mark.slow
@pytest.mark.parametrize("name", commands(Hub()))
def test_what_is_killed_goes_on_to_the_same_result(name, tmp_path, own_cache, monkeypatch):
    # The checkout may be edited meanwhile, and records name its commit.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    figures = killed(1, 0, tmp_path / "work", only=[name])
    assert (figures["kills"], figures["completed"]) == (1, 1)
    assert sum(figures["commands"][name]["reached"].values()) == 1
