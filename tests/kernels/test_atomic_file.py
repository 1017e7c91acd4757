"""Files are written completely or not at all."""

import os

import pytest

from approx_kernels.runtime.atomic_file import atomic_file, write_whole


def test_writes_a_text_unchanged_into_a_new_folder(tmp_path):
    path = tmp_path / "new" / "a.csv"
    write_whole(path, "ä\r\nb\n")
    assert path.read_bytes() == b"\xc3\xa4\r\nb\n"
    write_whole(path, b"\x00")
    assert path.read_bytes() == b"\x00"
    assert [file.name for file in path.parent.iterdir()] == ["a.csv"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_old_file_survives_any_failed_write(call, tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_whole(path, "old")

    def stopped(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text("utf-8") == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_the_file_has_its_name_only_when_it_is_complete(tmp_path):
    path = tmp_path / "a"
    with atomic_file(path) as temporary:
        temporary.write_text("whole", encoding="utf-8")
        assert temporary.parent == tmp_path
        assert not path.exists()
    assert path.read_text("utf-8") == "whole"


def test_keeps_files_whose_names_look_temporary(tmp_path):
    names = {".a.1.tmp", f".a.{'0' * 32}.tmp", "a.tmp", ".b.1.tmp"}
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    write_whole(tmp_path / "a", "")
    assert {file.name for file in tmp_path.iterdir()} == {"a", *names}


def test_a_temporary_file_is_made_in_another_folder_on_request(tmp_path):
    (tmp_path / "ours").mkdir()
    with atomic_file(tmp_path / "plan.yaml", within=tmp_path / "ours") as temporary:
        temporary.write_text("x")
        assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    assert (tmp_path / "plan.yaml").read_text() == "x"
    assert not any((tmp_path / "ours").iterdir())
