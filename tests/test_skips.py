"""Skipped tests are listed with their reasons, unexpected ones fail a run that names the expected ones, and `--sample` leaves cases out."""

import subprocess
import sys

import pytest

from conftest import ROOT, unexpected_skips

TESTS = """
import pytest

def test_one():
    pytest.skip("there is no moon")

@pytest.mark.skipif(True, reason="the sun shines")
def test_two():
    pass

def test_three():
    pass

@pytest.mark.sample(2)
@pytest.mark.parametrize("case", range(5))
def test_many(case):
    pass
"""


def run(tmp_path, expected, *options):
    (tmp_path / "conftest.py").write_text(
        (ROOT / "tests" / "conftest.py").read_text().replace("__file__", repr(__file__))
    )
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "skips.toml").write_text(expected)
    code = f"import os; os.environ['APPROX_EXPECTED_SKIPS'] = {str(tmp_path / 'skips.toml')!r}; import pytest, sys; "
    code += "sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-p", "no:cacheprovider", *options, str(tmp_path)]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("expected", "options", "status", "words"),
    [
        (
            "[skips]\n'no moon' = 1\n'sun' = 1\n",
            ("--sample",),
            0,
            ["1  there is no moon", "3 passed, 2 skipped, 3 deselected"],
        ),
        ("[skips]\n'no moon' = 1\n", (), 1, ["1 skipped, 0 expected: the sun shines", "6 passed, 2 skipped"]),
        pytest.param(
            *("[skips]\n'no moon' = 1\n'sun' = 0\n", ("-n", "1"), 1, ["1 skipped, 0 expected: the sun shines"]),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.sample(1)
def test_a_run_passes_only_with_the_expected_skips(tmp_path, expected, options, status, words):
    done = run(tmp_path, expected, *options)
    assert done.returncode == status, done.stdout + done.stderr
    assert [line for line in words if line not in done.stdout] == []


def test_without_a_list_nothing_is_unexpected():
    assert unexpected_skips({"the sun shines": 3}, None) == []


def test_unlisted_skips_are_unexpected():
    listed = "tests/skips.toml"
    assert unexpected_skips({"could not import 'fast_transformers': No module": 1}, listed) == []
    assert len(unexpected_skips({"could not import 'fast_transformers': No module": 3}, listed)) == 1


@pytest.mark.slow
def test_a_cuda_error_ends_its_worker_and_the_other_tests_pass(tmp_path):
    broken = "def test_broken():\n    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
    (tmp_path / "test_broken.py").write_text(broken + "def test_after():\n    pass\n")
    done = run(tmp_path, "[skips]\n'no moon' = 1\n'sun' = 1\n", "-n", "1")
    assert "1 failed, 2 passed, 2 skipped" in done.stdout, done.stdout
    assert "crashed while running 'test_broken.py::test_broken'" in done.stdout
