import json

import pytest

from approx.pipeline.journal import Journal


@pytest.fixture
def made():
    return []


@pytest.fixture
def once(tmp_path, made):
    def run(key: str = "key", product=None):
        return Journal(tmp_path / "journal", key).once("stage", lambda: made.append(key) or {"x": [1, None]}, product)

    return run


def test_a_finished_stage_is_read_and_not_repeated(once, made):
    assert once() == once() == {"x": [1, None]}
    assert made == ["key"]


def test_a_result_of_other_circumstances_is_made_again(once, made):
    once()
    once("another")
    assert made == ["key", "another"]


def test_a_stage_is_made_again_where_what_it_alone_depends_on_changed(tmp_path):
    journal, made = Journal(tmp_path, "key"), []
    for text in ("old", "old", "new"):
        journal.once("evaluate", lambda text=text: made.append(text), about=[text])
        journal.once("convert", lambda: made.append("converted"))
    assert made == ["old", "converted", "new"]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"[]", b'{"key": 1}'])
def test_a_damaged_entry_is_an_unfinished_stage(once, made, tmp_path, damage):
    once()
    (tmp_path / "journal" / "stage.json").write_bytes(damage)
    assert once() == {"x": [1, None]}
    assert made == ["key", "key"]


def test_a_stage_whose_product_is_gone_is_unfinished(once, made, tmp_path):
    product = tmp_path / "product"
    product.mkdir()
    once(product=product)
    once(product=product)
    product.rmdir()
    once(product=product)
    assert len(made) == 2


def test_what_fails_leaves_no_entry(tmp_path):
    journal = Journal(tmp_path, "key")
    with pytest.raises(ZeroDivisionError):
        journal.once("stage", lambda: 1 // 0)
    with pytest.raises(TypeError):
        journal.once("stage", lambda: object())
    assert not (tmp_path / "stage.json").exists()
    assert journal.once("stage", lambda: 1) == 1
    assert json.loads((tmp_path / "stage.json").read_text("utf-8"))["result"] == 1
