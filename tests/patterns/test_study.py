"""Small patterns are drawn unchanged, large ones also at a shorter length; progress is reported."""

import functools

import pytest

from approx.errors import ApproxError, Exit
from approx.patterns import find_pattern
from approx.patterns import study as patterns


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw a pattern and return the input of both pictures."""
    seen = {}
    for name in ("steps_picture", "flow_picture"):
        real = getattr(patterns, name)

        def noted(*arguments, name=name, real=real, **more):
            seen[name] = (arguments, more)
            return real(*arguments, **more)

        monkeypatch.setattr(patterns, name, noted)

    def draw(length, /, **asked):
        files = patterns.draw(
            find_pattern("strided", length, False, {"stride": 4}), tmp_path, suffixes=[".svg"], **asked
        )
        assert [path.name for path in files] == ["steps.svg", "flow.svg"]
        return seen["steps_picture"], seen["flow_picture"]

    return draw


def test_a_small_pattern_is_drawn_as_it_is(drawn):
    for length in (1, 48):
        ((title, note, views), _), ((of_flow, figures, steps), _) = drawn(length)
        assert title == of_flow.removesuffix(": information flow")
        assert title.startswith(f"strided: {length} token{'s' if length > 1 else ''}, ")
        assert (note, figures) == ("", "")
        assert [view.shape[-1] for view in views] == [length]
        assert steps.shape[-1] == length
    with pytest.raises(ApproxError, match="drawn over 48 tokens, 0 to 47"):
        drawn(48, node=48)
    assert drawn(48, node=47)[1][1]["node"] == 47


@pytest.mark.slow
def test_a_large_pattern_is_drawn_in_full_and_shrunk(drawn):
    ((title, note, views), _), ((_, figures, steps), _) = drawn(49)
    assert title.startswith("strided: 49 tokens, ")
    assert note.startswith("drawn with 16 tokens, ")
    assert note.endswith(", and at full length: a point stands for many pairs, paler if few are seen")
    assert figures == note.partition(", and at full length")[0]
    assert [view.shape[-1] for view in views] == [16, 49]
    assert steps.shape[-1] == 16
    assert drawn(49, length=48)[1][0][2].shape[-1] == 48


@pytest.mark.parametrize("length", [0, 49])
def test_draws_no_single_pairs_beyond_the_legible_size(drawn, length):
    with pytest.raises(ApproxError, match=f"The length for drawing is {length} tokens; allowed is 1 to 48"):
        drawn(200, length=length)


def test_reports_progress_of_every_stage(monkeypatch):
    monkeypatch.setattr(patterns, "BenchStage", functools.partial(patterns.BenchStage, rounds=3, seconds=0.0))
    shown = []
    result = patterns.report(
        find_pattern("block", 8, False, {}), block=4, device="cpu", progress=lambda *where: shown.append(where)
    )
    assert shown[:2] == [("count block", 0, 1), ("count block", 1, 1)]
    assert {what for what, _, _ in shown[2:]} == {"time batch 1, 8 tokens"}
    assert [done for _, done, _ in shown[3:]] == list(range(len(shown) - 3))
    assert [(row.length, row.batch, row.dtype) for row in result.speed] == [(8, 1, "float32")]
    shown.clear()
    untimed = patterns.report(find_pattern("block", 8, False, {}), progress=lambda *where: shown.append(where))
    assert "speed" in result.to_data()
    assert "speed" not in untimed.to_data()
    assert len(shown) == 2


def test_pictures_replace_files_only_with_force(tmp_path):
    for folder in (tmp_path / "new", tmp_path):
        patterns.refuse_existing(folder, force=False)
    (tmp_path / "mine.txt").touch()
    patterns.refuse_existing(tmp_path, force=True)
    for place, words in ((tmp_path, "exists already"), (tmp_path / "mine.txt", "is a file")):
        with pytest.raises(ApproxError, match=words) as caught:
            patterns.refuse_existing(place, force=False)
        assert caught.value.exit_code == Exit.REFUSED
