"""Location of the cache folder, and when code in it is not trusted."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from approx_kernels.cpu.compile import load
from approx_kernels.runtime.cache_folder import cache_folder, is_private, private_folder


@pytest.fixture
def homeless(monkeypatch):
    """A user without $HOME and without an entry in the list of users."""

    def unknown(_):
        raise KeyError

    for name in ("HOME", "APPROX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(RuntimeError):
        Path.home()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"APPROX_CACHE": "mine", "XDG_CACHE_HOME": "caches", "HOME": "home"}, "mine"),
        ({"XDG_CACHE_HOME": "caches", "HOME": "home"}, "caches/approx"),
        ({"HOME": "home"}, "home/.cache/approx"),
    ],
)
def test_the_most_special_variable_names_the_folder(monkeypatch, variables, expected):
    for name in ("APPROX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


@pytest.mark.usefixtures("homeless")
def test_uses_a_temporary_folder_for_a_user_without_home(monkeypatch, tmp_path):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    load.cache_clear()
    # It raises nothing, with or without a compiler.
    load("int answer(void) { return 43; }")
    load.cache_clear()
    assert private_folder("compiled") == tmp_path / "compiled"


@pytest.mark.usefixtures("homeless")
def test_uses_a_temporary_folder_without_home_or_variable(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert private_folder("compiled") == tmp_path / f"approx-{os.getuid()}" / "compiled"


def test_a_folder_is_made_for_its_user_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path / "new"))
    assert private_folder("compiled").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(monkeypatch, tmp_path, mode):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled").chmod(mode)
    with pytest.raises(PermissionError, match=r"can be written by other users.*Remove it"):
        private_folder("compiled")


def test_a_folder_of_another_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    private_folder("compiled")
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(PermissionError, match=f"belongs to user {other - 1}, not to {other}"):
        private_folder("compiled")


def test_a_folder_that_anybody_can_replace_is_refused(monkeypatch, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("APPROX_CACHE", str(shared))
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod o-w"):
        private_folder("compiled")
    shared.chmod(0o1777)
    assert private_folder("compiled") == shared / "compiled"


def test_behind_a_link_the_folder_itself_counts(monkeypatch, tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    (tmp_path / "compiled").symlink_to(real)
    assert private_folder("compiled") == real
    real.chmod(0o777)
    with pytest.raises(PermissionError, match="real can be written by other users"):
        private_folder("compiled")


def test_a_file_is_private_if_it_is_no_link_and_only_its_owner_writes(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch(mode=0o700)
    link.symlink_to(file)
    assert is_private(file)
    assert not is_private(link)
    assert not is_private(tmp_path)
    file.chmod(0o720)
    assert not is_private(file)
