"""C that is compiled where it runs: kept, announced, and never a wall."""

import logging
import os

import pytest
import torch

from approx.pipeline import health
from approx_kernels import c_language
from approx_kernels.c_language import library, obstacle

SOURCE = "int answer(void) {{ return {}; }}"


def test_what_is_compiled_once_is_read_again(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO)
    source = SOURCE.format(41)
    if isinstance(found := library(source), str):
        pytest.skip(found)
    assert found.answer() == 41
    kept = sorted((tmp_path / "compiled").iterdir())
    assert len(kept) == 2, "this, and the line that compilers are tried with"
    assert "once on this machine" in caplog.text
    library.cache_clear()
    monkeypatch.setattr(c_language, "_compile", lambda *_: pytest.fail("compiled again"))
    again = library(source)
    assert not isinstance(again, str)
    assert again.answer() == 41
    assert kept == sorted((tmp_path / "compiled").iterdir()), "nothing half-made is left"


@pytest.mark.parametrize(
    ("compiler", "source", "words"),
    [
        ("no-such-compiler", SOURCE.format(1), "is not a program"),
        (None, "this is not C", "failed"),
    ],
)
def test_without_a_compiler_that_works_it_is_said_once_why(monkeypatch, tmp_path, caplog, compiler, source, words):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    if compiler:
        monkeypatch.setenv("CC", compiler)
    elif isinstance(found := library(SOURCE.format(2)), str):
        pytest.skip(found)
    library.cache_clear()
    for _ in range(2):
        assert words in (obstacle(source, torch.ones(1)) or "")
    assert sum("Slower code" in message for message in caplog.messages) == 1
    library.cache_clear()


@pytest.mark.parametrize(
    ("value", "words", "warnings"), [("0", "so no C is compiled", 0), ("no", "expected 1, or 0", 1)]
)
def test_a_switch_turns_compiling_off(monkeypatch, tmp_path, caplog, value, words, warnings):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    monkeypatch.setenv("APPROX_COMPILE_C", value)
    library.cache_clear()
    said = obstacle(SOURCE.format(6), torch.ones(1)) or ""
    assert "APPROX_COMPILE_C" in said
    assert words in said
    assert not list(tmp_path.iterdir())
    # Whoever turned it off need not be told.
    assert len(caplog.messages) == warnings
    library.cache_clear()


@pytest.mark.skipif(os.name != "posix", reason="a script stands in for the compiler")
def test_a_compiler_that_fails_is_tried_and_told_of_once_and_the_doctor_names_it(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho called >> $0.log\necho 'error: no licence' >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    library.cache_clear()
    for number in (7, 8, 9):
        assert "no licence" in str(library(SOURCE.format(number)))
    # With OpenMP and without.
    assert (tmp_path / "broken.log").read_text().count("called") == 2
    assert sum("Slower code" in message for message in caplog.messages) == 1
    (found,) = (each for each in health.examine(offline=True) if each.what == "c compiler")
    assert found.state == "missing"
    assert "no licence" in found.found
    library.cache_clear()


def test_a_compiler_that_hangs_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(c_language, "_SECONDS", 0.2)
    assert "took more than" in str(library(SOURCE.format(3)))
    library.cache_clear()


def test_a_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("APPROX_CACHE", str(file))
    assert "APPROX_CACHE" in str(library(SOURCE.format(4)))
    library.cache_clear()


def test_other_dtypes_are_refused_with_the_remedy():
    assert "float64" in (obstacle(SOURCE.format(5), torch.ones(1, dtype=torch.float64)) or "")
