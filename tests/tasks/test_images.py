"""Images from folders and tables are classified by base and converted model, trained on and timed."""

import copy
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessorPil

import approx
from approx.errors import ApproxError, Exit
from approx.evaluation.timing import image_inputs
from approx.tasks import open_task
from approx.tasks.images import Picture
from zoo import tiny

NAMES = {0: "cat", 1: "dog"}


def processor(**changes: Any) -> Any:
    settings: dict[str, Any] = {"size": {"height": 24, "width": 24}, **changes}
    return ViTImageProcessorPil(**settings)


@pytest.fixture
def pictures(tmp_path):
    """Four images of two classes in folders, of different sizes and kinds."""
    for number in range(4):
        folder = tmp_path / "test" / NAMES[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (20 + number, 30, 3), np.uint8)
        made = Image.fromarray(pixels)
        (made.convert("L") if number == 3 else made).save(folder / f"{number}.{'jpg' if number else 'png'}")
    return tmp_path


def test_folders_and_tables_hold_the_same_images(pictures):
    task = open_task("image-classification", labels="cat,dog")
    split = task.load(pictures)
    assert [(one.id, one.label) for one in split.examples] == [
        ("cat/0.png", 0),
        ("dog/1.jpg", 1),
        ("cat/2.jpg", 0),
        ("dog/3.jpg", 1),
    ]
    assert (split.name, task.load(pictures / "test", limit=2).subset) == ("test", True)
    rows = [{"image": f"test/{one.id}", "label": NAMES[one.label]} for one in split.examples]
    (pictures / "list.json").write_text(json.dumps(rows))
    listed = task.load(pictures / "list.json")
    assert [(one.inputs, one.label) for one in listed.examples] == [(one.inputs, one.label) for one in split.examples]
    assert listed.examples[3].inputs["image"].decoded().mode == "RGB"


def test_base_and_converted_are_compared_and_trained(pictures, tmp_path):
    model, reader = tiny("ViTForImageClassification", id2label=NAMES), processor()
    converted = copy.deepcopy(model)
    approx.convert(converted, approx.Plan.of("local", left=2, right=2))
    arguments = {"data": str(pictures), "processor": reader, "batch_size": 3}
    made = approx.evaluate(converted, "image-classification", against=model, **arguments).quality[0]
    assert (made.examples, made.metric, made.variants[0].approximated is not None) == (4, "accuracy", True)
    done = approx.finetune(
        converted,
        tmp_path / "work",
        processor=reader,
        recover=["task"],
        task="image-classification",
        data=str(pictures / "test"),
        steps=2,
        batch_size=2,
        validation=1,
    )
    assert done.phases[0].steps == 2


def test_images_are_counted_in_patches_and_timed(pictures):
    task, model, reader = (
        open_task("image-classification", labels="cat,dog"),
        tiny("ViTForImageClassification"),
        processor(),
    )
    examples = task.examples(pictures)
    encoding = task.encode(examples[0], reader)[0]
    # 24 pixels are one patch of 16 and six of the model's 4.
    assert (task.tokens(encoding), task.positions(encoding, model.config)) == (2, 37)
    assert task.encode(examples[0], processor()) == task.encode(examples[0], reader)
    assert task.encode(examples[0], processor(do_rescale=False)) != task.encode(examples[0], reader)
    batch = image_inputs(task, examples, reader, "cpu", torch.bfloat16)(5, 37)
    assert (batch["pixel_values"].shape, batch["pixel_values"].dtype) == ((5, 3, 24, 24), torch.bfloat16)


def test_names_files_that_are_not_images(pictures, tmp_path):
    task = open_task("image-classification", labels="cat,dog")
    (pictures / "test" / "cat" / "0.png").write_bytes(b"no image")
    picture = task.load(pictures).examples[0].inputs["image"]
    for words, action in [
        ("0.png is not a readable image", picture.decoded),
        ("cannot be read", lambda: Picture.of("x", tmp_path / "none.png")),
        ("instead of an image processor", lambda: task.encode(task.examples(pictures)[0], object())),
    ]:
        with pytest.raises(ApproxError, match=words) as caught:
            action()
        assert caught.value.exit_code == Exit.UNAVAILABLE
    (tmp_path / "list.jsonl").write_text('{"image": 3, "label": "cat"}')
    with pytest.raises(ApproxError, match="line 1: a path or bytes are needed, found 3"):
        task.load(tmp_path / "list.jsonl")
    (pictures / "test" / "cat").rename(pictures / "test" / "cow")
    with pytest.raises(ApproxError, match="unknown label 'cow'"):
        task.load(pictures)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Picture.of("x", file.getvalue())


def grey(kind):
    return Image.fromarray((np.arange(64).reshape(8, 8) * 1000).astype(kind))


def test_pictures_of_every_kind_are_decoded_as_they_look():
    wide = np.asarray(encoded(grey(np.uint16)).decoded())
    assert (wide[..., 0] == (np.arange(64).reshape(8, 8) * 1000) >> 8).all(), "16 bits are scaled, not cut"
    assert (np.asarray(encoded(grey(np.int32), "TIFF").decoded()) == wide).all()
    share = Image.fromarray((np.arange(64).reshape(8, 8) / 64).astype(np.float32))
    assert np.asarray(encoded(share, "TIFF").decoded()).max() == 251
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    palette = Image.new("P", (4, 4))
    palette.putpalette([0, 0, 0] * 256)
    white = [
        encoded(clear),
        encoded(clear.convert("LA")),
        encoded(palette, transparency=0),
        encoded(Image.new("1", (4, 4), 1)),
    ]
    white.append(encoded(Image.new("CMYK", (4, 4), (0, 0, 0, 0)), "JPEG"))
    assert all(np.asarray(one.decoded()).min() == 255 for one in white)
    turned = Image.Exif()
    turned[274] = 6
    assert encoded(Image.new("RGB", (8, 4)), "JPEG", exif=turned).decoded().size == (4, 8)


def test_pictures_without_one_meaning_are_named():
    frames = {"save_all": True, "append_images": [Image.new("RGB", (4, 4), "red")]}
    whole = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)), "JPEG").source
    assert isinstance(whole, bytes)
    for words, picture in [
        ("has 2 frames", encoded(Image.new("RGB", (4, 4)), "GIF", **frames)),
        ("whose scale is not known", encoded(grey(np.float32), "TIFF")),
        ("is not a readable image", Picture.of("x", whole[:500])),
    ]:
        with pytest.raises(ApproxError, match=words) as caught:
            picture.decoded()
        assert caught.value.exit_code == Exit.UNAVAILABLE
