"""A converted folder whose config no longer says how it was converted is damaged, and not exact."""

import json
import shutil

import pytest

from approx.checkpoints import checkpoint
from approx.checkpoints.manifest import MANIFEST
from approx.conversion import convert
from approx.errors import ApproxError, Exit
from approx.inspection import inspect
from approx.planning.plan import Plan
from tiny_study import tiny_checkpoint


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    convert.convert(tiny_checkpoint(folder / "base"), folder / "converted", Plan.of("performer"))
    return folder / "converted"


BARE = {"model_type": "bert", "approx": None, "architectures": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"approx": {}}, "'model_type' is approx_bert"),
        ({"approx": "lost"}, "'model_type' is approx_bert"),
        ({"approx": {"format": 1, "sites": {}}}, "'model_type' is approx_bert"),
        ({"model_type": "bert"}, "'approx' lists mechanisms"),
        ({"model_type": "bert", "approx": None}, "'architectures' is Approx"),
        (BARE, f"{MANIFEST} lists its code"),
        (BARE | {"without manifest": True}, "its weights have bert."),
    ],
)
def test_a_config_that_lost_the_mechanisms_is_damaged(converted, tmp_path, change, message):
    folder = shutil.copytree(converted, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text()) | change
    if config.pop("without manifest", False):
        (folder / MANIFEST).unlink()
    (folder / "config.json").write_text(json.dumps(config))
    for use in (inspect, checkpoint.load):
        with pytest.raises(ApproxError, match="is damaged: the folder was converted") as caught:
            use(str(folder))
        assert message in str(caught.value)
        assert caught.value.exit_code == Exit.UNAVAILABLE


def test_an_ordinary_folder_with_a_manifest_is_exact(tmp_path):
    convert.convert(tiny_checkpoint(tmp_path / "base"), tmp_path / "converted", Plan.of("local", left=2, right=2))
    convert.revert(tmp_path / "converted", tmp_path / "reverted")
    assert not inspect(str(tmp_path / "reverted")).converted
    # It comes with a manifest, and is not converted.
    assert not inspect("quickstart").converted
