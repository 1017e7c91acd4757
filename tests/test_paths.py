"""Names that files state stay inside their folder, whatever they are."""

import pytest

from approx.errors import ApproxError, Exit
from approx.paths import inside, is_inside, refuse_leaving

OUTSIDE = [
    *("..", "../secret", "a/../../secret", "a/..", "/etc/hostname", "//server/share/a", "~/../../secret\0"),
    *("", ".", "./a", "a/", "a//b", "a/./b", "a\0b", "a\nb", "a\\b", "..\\a", "C:\\a", "C:a", "C:/a", "c:", "\ud800"),
    *(None, 3, b"a", ["a"], {"a": 1}, True),
]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_refuses_names_that_are_not_normalised_and_relative(name, tmp_path):
    assert not is_inside(name)
    with pytest.raises(ApproxError, match="the manifest names") as caught:
        inside(tmp_path, name, "the manifest")
    assert caught.value.exit_code == (Exit.REFUSED if isinstance(name, str) else Exit.UNAVAILABLE)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["a", "a.json", "1_Pooling/config.json", "..a", "a..b/c", "é ü", "~", "-x", "a:b.json"]
)
def test_accepts_names_inside(name, tmp_path):
    allowed = name != "a:b.json"  # a drive of Windows
    assert is_inside(name) == allowed
    if allowed:
        assert inside(tmp_path, name, "the manifest") == tmp_path / name


def test_refuses_links_that_leave_the_folder(tmp_path):
    secret, folder = tmp_path / "secret", tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    secret.write_text("secret")
    (folder / "file").write_text("own")
    links = {"up": "../secret", "absolute": secret, "dangling": "../nothing", "chain": "up", "loop": "loop"}
    for name, target in {
        **links,
        "sub/deep": "../../secret",
        "out": "..",
        "good": "file",
        "sub/good": "../file",
    }.items():
        (folder / name).symlink_to(target)
    for name in (*links, "sub/deep", "out", "out/secret"):
        with pytest.raises(ApproxError, match="symbolic link") as caught:
            inside(folder, name, "the manifest")
        assert caught.value.exit_code == Exit.REFUSED
        assert str(folder / name) in str(caught.value)
    for name in ("file", "good", "sub/good", "absent"):
        assert inside(folder, name, "the manifest") == folder / name
    # The folder itself may be reached through a link.
    (tmp_path / "alias").symlink_to("folder")
    assert inside(tmp_path / "alias", "good", "the manifest").read_text() == "own"


def test_accepts_the_links_of_the_hubs_cache(tmp_path):
    repo = tmp_path / "models--owner--name"
    snapshot = repo / "snapshots" / "0123abcd"
    (snapshot / "1_Pooling").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "aa").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/aa")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/aa")
    for name in ("config.json", "1_Pooling/config.json"):
        assert inside(snapshot, name, "the index").read_text() == "{}"
    (snapshot / "evil.json").symlink_to("../../refs")
    with pytest.raises(ApproxError, match=r"evil\.json"):
        refuse_leaving(snapshot, snapshot / "evil.json")
