"""C is compiled at run time: it is cached, announced, and optional."""

import logging
import multiprocessing
import os
import shutil
import sys
from itertools import pairwise

import pytest
import torch

from approx.doctor import health
from approx_kernels.cpu import compile
from approx_kernels.cpu.compile import load, obstacle
from approx_kernels.runtime.cache_folder import is_private
from c_sources import compiled, needs_compiler

SOURCE = "int answer(void) {{ return {}; }}"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder."""
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path / "cache"))
    load.cache_clear()
    yield tmp_path / "cache"
    load.cache_clear()
    compile._version.cache_clear()


@needs_compiler
def test_compiled_code_is_loaded_from_the_cache(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO)
    load.cache_clear()
    source = SOURCE.format(41)
    assert compiled(source).answer() == 41
    in_cache = sorted((tmp_path / "compiled").iterdir())
    assert len(in_cache) == 2, "this, and the line that compilers are tried with"
    assert "once on this machine" in caplog.text
    load.cache_clear()
    monkeypatch.setattr(compile, "_compile", lambda *_: pytest.fail("compiled again"))
    again = load(source)
    assert not isinstance(again, str)
    assert again.answer() == 41
    assert in_cache == sorted((tmp_path / "compiled").iterdir()), "nothing half-made is left"


@needs_compiler
def test_a_truncated_library_is_compiled_again(monkeypatch, cache, tmp_path):
    source = SOURCE.format(44)
    compiled(source)
    # This process would not load the library a second time.
    shutil.copytree(cache, tmp_path / "other")
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path / "other"))
    whole = {path: path.read_bytes() for path in (tmp_path / "other" / "compiled").iterdir()}
    for path, contents in whole.items():
        path.write_bytes(contents[: len(contents) // 2])
    load.cache_clear()
    again = load(source)
    assert not isinstance(again, str), again
    assert again.answer() == 44
    assert {path: path.read_bytes() for path in (tmp_path / "other" / "compiled").iterdir()} == whole


@needs_compiler
def test_refuses_a_library_that_others_can_write(cache, tmp_path):
    source = SOURCE.format(45)
    compiled(source)
    (cache / "compiled").chmod(0o777)
    load.cache_clear()
    assert "can be written by other users, so code in it cannot be trusted" in str(load(source))
    (cache / "compiled").chmod(0o700)
    (theirs,) = (path for path in (cache / "compiled").iterdir() if b"answer" in path.read_bytes())
    theirs.rename(tmp_path / "theirs.so")
    theirs.symlink_to(tmp_path / "theirs.so")
    load.cache_clear()
    assert not isinstance(load(source), str)
    assert is_private(theirs), "the link was replaced"


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="a script stands in for the compiler")
def test_another_version_or_other_flags_make_another_library(monkeypatch, cache, tmp_path):
    source = SOURCE.format(46)
    compiled(source)
    compiler, wrapper = compile.find_compiler()[0], tmp_path / "wrapper"
    monkeypatch.setenv("CC", str(wrapper))
    made = []
    for version, flags in (("12.1", ""), ("12.2", ""), ("12.2", "-O1 -g"), ("12.2", "-O1 -g")):
        script = f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nexec {compiler} "$@"\n'
        wrapper.write_text(script, encoding="utf-8")
        wrapper.chmod(0o755)
        monkeypatch.setenv("APPROX_C_FLAGS", flags)
        load.cache_clear()
        compile._version.cache_clear()
        assert not isinstance(load(source), str)
        made.append(len(list((cache / "compiled").iterdir())))
    assert [after - before for before, after in pairwise(made)] == [2, 2, 0]


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and a script stands in for the compiler")
def test_of_two_processes_one_compiles_and_the_other_waits(monkeypatch, cache, tmp_path):
    compiler, wrapper = compile.find_compiler()[0], tmp_path / "wrapper"
    script = f'#!/bin/sh\n[ "$1" != --version ] && echo called >> $0.log && sleep 0.5\nexec {compiler} "$@"\n'
    wrapper.write_text(script, encoding="utf-8")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", str(wrapper))
    forked = multiprocessing.get_context("fork")
    both = [forked.Process(target=compiled, args=(SOURCE.format(47),)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert [each.exitcode for each in both] == [0, 0]
    # The trial program of the compiler, and the source.
    assert (tmp_path / "wrapper.log").read_text().count("called") == 2


@needs_compiler
@pytest.mark.parametrize(
    ("compiler", "source", "words"),
    [
        ("no-such-compiler", SOURCE.format(1), "is not a program"),
        (None, "this is not C", "failed"),
    ],
)
def test_warns_once_without_a_working_compiler(monkeypatch, tmp_path, caplog, compiler, source, words):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    if compiler:
        monkeypatch.setenv("CC", compiler)
    else:
        compiled(SOURCE.format(2))
    load.cache_clear()
    for _ in range(2):
        assert words in str(load(source))
    assert sum("Slower code" in message for message in caplog.messages) == 1
    load.cache_clear()


@pytest.mark.parametrize(
    ("value", "words", "warnings"), [("0", "so no C is compiled", 0), ("no", "expected 1, or 0", 1)]
)
def test_a_switch_turns_compiling_off(monkeypatch, tmp_path, caplog, value, words, warnings):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    monkeypatch.setenv("APPROX_COMPILE_C", value)
    load.cache_clear()
    said = str(load(SOURCE.format(6)))
    assert "APPROX_COMPILE_C" in said
    assert words in said
    assert not list(tmp_path.iterdir())
    # No warning if the user turned C off.
    assert len(caplog.messages) == warnings
    load.cache_clear()


@pytest.mark.skipif(os.name != "posix", reason="a script stands in for the compiler")
def test_a_failing_compiler_is_tried_once_and_named_by_the_doctor(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho called >> $0.log\necho 'error: no licence' >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    load.cache_clear()
    for number in (7, 8, 9):
        assert "no licence" in str(load(SOURCE.format(number)))
    # One call for the version, one with OpenMP and one without.
    assert (tmp_path / "broken.log").read_text().count("called") == 3
    assert sum("Slower code" in message for message in caplog.messages) == 1
    (finding,) = (each for each in health.examine(offline=True) if each.what == "c compiler")
    assert finding.state == "missing"
    assert "no licence" in finding.found
    load.cache_clear()


def test_a_compiler_that_hangs_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(compile, "_SECONDS", 0.2)
    assert "took more than" in str(load(SOURCE.format(3)))
    load.cache_clear()


def test_names_a_folder_that_cannot_be_made(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("APPROX_CACHE", str(file))
    assert "APPROX_CACHE" in str(load(SOURCE.format(4)))
    load.cache_clear()


def test_other_dtypes_are_refused_with_the_remedy():
    assert "float64" in (obstacle("topk/forward.c", torch.ones(1, dtype=torch.float64)) or "")
