"""`approx verify`: its table, its exit codes and its JSON."""

import shutil

from approx.errors import Exit

from .conftest import call


def test_a_folder_is_verified_edited_and_accepted(converted, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "mine")
    answer = call("verify", folder, "--json")
    assert answer.code == Exit.OK
    assert all(check["passed"] is not False for check in answer.json["checks"])
    with (folder / "config.json").open("a") as config:
        config.write("\n")
    answer = call("verify", folder)
    assert answer.code == Exit.VERIFICATION
    assert "FAILED" in answer.out
    assert answer.err.splitlines()[-1].endswith("did not pass: files are those of the manifest.")
    answer = call("verify", folder, "--accept", "-q")
    assert (answer.code, "Accepted: config.json" in answer.out) == (Exit.OK, True)


def test_a_stock_checkpoint_has_nothing_to_verify(base):
    answer = call("verify", base)
    assert answer.code == Exit.REFUSED
    assert "not a converted checkpoint" in answer.err
