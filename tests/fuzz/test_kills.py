"""A short version of `make kills`."""

import pytest

from fuzz.kills import killed


@pytest.mark.slow
def test_runs_that_are_killed_go_on_to_the_same_record(tmp_path, own_cache, monkeypatch):
    # The checkout may be edited meanwhile, and records name its commit.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    figures = killed(3, 0, tmp_path)
    assert (figures["kills"], figures["completed"] > 0, sum(figures["reached"].values())) == (3, True, 3)
