"""Classification of images, such as by ViT."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from approx.errors import ApproxError, Exit
from approx.tasks.head import IMAGE_CLASSIFICATION, Head
from approx.tasks.labelled import Classification
from approx.tasks.table import Row
from approx.tasks.task import Encoding, Example, Split, Tally

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# The side of a patch in most models, in pixels; only used to count.
_PATCH = 16


@dataclass(frozen=True)
class Picture:
    """An encoded image, decoded for each batch. Pictures are equal if their bytes are equal.

    Args:
        sha256: Hash of its bytes.
        name: Its name in errors.
        source: Its file or its bytes.
    """

    sha256: str
    name: str = field(compare=False, repr=False)
    source: Path | bytes = field(compare=False, repr=False)

    @classmethod
    def of(cls, name: str, source: Path | bytes) -> Picture:
        """Read an image without decoding it.

        Raises:
            ApproxError: if its file cannot be read.
        """
        return cls(hashlib.sha256(_stored(name, source)).hexdigest(), name, source)

    def decoded(self) -> Any:
        """The image of the library Pillow, in RGB: turned upright as its camera says, as the library datasets does.

        Greys of 16 bits are scaled to 8. What is transparent is white, as on a page.

        Raises:
            ApproxError: if it is damaged, has several frames, or its values have no scale.
        """
        from PIL import Image, ImageOps

        try:
            opened = Image.open(io.BytesIO(_stored(self.name, self.source)))
            frames = getattr(opened, "n_frames", 1)
            opened.load()
            image = ImageOps.exif_transpose(opened)
        except Image.DecompressionBombError:
            raise self._refused("has too many pixels") from None
        # Pillow raises several kinds of errors for damaged files.
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            # The whole message names the object in memory that was read.
            reason = str(error).partition(" <_io.")[0]
            raise self._refused(f"is not a readable image ({reason})") from None
        if frames > 1:
            raise self._refused(f"has {frames} frames, of which only one could be read")
        return _in_rgb(image) or self._scaled(image)

    def _scaled(self, image: Any) -> Any:
        """A grey image with values of more than 8 bits, in RGB."""
        from PIL import Image

        values = np.asarray(image)
        low, high = values.min(), values.max()
        # Images of 16 bits are often opened as 32; the range of other values is unknown.
        wide = values.dtype.kind != "f" and (image.mode.startswith("I;16") or high > 255)
        if not (np.isfinite((low, high)).all() and low >= 0 and high <= (65_535 if wide else 1)):
            raise self._refused(f"has values from {low:g} to {high:g}, whose scale is not known")
        scaled = values.astype(np.int64) >> 8 if wide else np.rint(values * 255.0)
        return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")

    def _refused(self, why: str) -> ApproxError:
        return ApproxError(
            f"{self.name} {why}. Replace it by a PNG or JPEG of 8 bits, or a grey PNG of 16.", Exit.UNAVAILABLE
        )


@dataclass(frozen=True)
class _Reader:
    """The image processor of a checkpoint; equal for checkpoints that can be compared."""

    sha256: str
    processor: Any = field(compare=False, repr=False)


class ImageClassification(Classification):
    """The class of an image, by a model such as ViT. Tokens are patches of 16 pixels.

    Args:
        labels: Names of the classes in the data, in the order of the model's outputs, as a list or separated by commas;
            the data may also hold numbers in this order. None uses the names in the checkpoint.

    Raises:
        ApproxError: if there are fewer than two labels, or a label twice.
    """

    name = "image-classification"
    usual: ClassVar[bool] = True
    head: ClassVar[Head] = IMAGE_CLASSIFICATION
    fields = ("image", "label")
    optional_fields = ()
    input_name: ClassVar[str] = "pixel_values"

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Read a folder of images or a table; the default split is `test`.

        Args:
            data: A folder with a folder of images for each class, or with such folders below a folder named after the
                split; a table with the columns image (paths relative to it) and label; or `hub:OWNER/NAME`.
            split: Name of the split.
            limit: Keep the first `limit` images; the classes take turns.
            streaming: Read a hub dataset while it downloads.

        Raises:
            ApproxError: if there are no data, an image cannot be read, a class is unknown, or no image is left.
        """
        wanted = split or "test"
        folder = None if data is None else next((one for one in (data / wanted, data) if any(_pictures(one))), None)
        if folder is None:
            return super().read(data, split, limit, streaming=streaming)
        tally = Tally()
        made = (
            Example(f"{path.parent.name}/{path.name}", {"image": Picture.of(str(path), path)}, label)
            for path in _counted(folder, tally)
            for label in [self.label_of(path.parent.name, str(path))]
        )
        examples = list(islice(self.taking_turns(made, limit), limit))
        name = wanted if folder.name == wanted else folder.absolute().name
        return Split(name, examples, subset=limit == len(examples), tally=tally)

    def from_cells(self, cells: dict[str, Any], row: Row) -> tuple[dict[str, Any], Any]:
        """The image, by its path or its bytes, and its class."""
        picture = Picture.of(f"the image of {row.place}", row.file(cells["image"]))
        return {"image": picture}, self.label_of(cells["label"], row.place)

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """The image, which `collate` decodes; its size in patches is that of the processor."""
        return [{"image": example.inputs["image"], "reader": _reader(processor)}]

    def tokens(self, encoding: Encoding) -> int:
        """Patches of 16 pixels, and the class token."""
        return _patches(encoding["reader"].processor, _PATCH)

    def positions(self, encoding: Encoding, config: Any) -> int:
        """Patches of the model's size, and the class token."""
        return _patches(encoding["reader"].processor, getattr(config, "patch_size", _PATCH))

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int:
        """All images have the same size."""
        return 0

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Decode and resize: `pixel_values` [B, channels, height, width]."""
        return dict(processor(images=[one["image"].decoded() for one in encodings], return_tensors="pt"))


def _in_rgb(image: Any) -> Any:
    """An image of 8 bits in RGB over white; None if its values have more."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        return None
    # A palette or grey may have one transparent colour.
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image.convert("RGB")


def _pictures(folder: Path) -> Iterator[Path]:
    """The images in the folders of a folder, in order."""
    return (path for path in sorted(folder.glob("*/*")) if path.suffix.lower() in _SUFFIXES)


def _counted(folder: Path, tally: Tally) -> Iterator[Path]:
    """The images in the folders of a folder, in order, with a count of them and of other files there."""
    tally.skipped["files that are no images"] += sum(
        path.suffix.lower() not in _SUFFIXES and path.is_file() for path in folder.glob("*/*")
    )
    for path in _pictures(folder):
        tally.read += 1
        yield path


def _stored(name: str, source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise ApproxError(f"{name} cannot be read: {source}: {error.strerror}.", Exit.UNAVAILABLE) from None


def _patches(processor: Any, side: int) -> int:
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    height = size.get("height") or size.get("shortest_edge") or side
    width = size.get("width") or size.get("shortest_edge") or side
    return (height // side) * (width // side) + 1


@functools.lru_cache(maxsize=8)
def _reader(processor: Any) -> _Reader:
    if "pixel_values" not in getattr(processor, "model_input_names", ()):
        raise ApproxError(
            f"The checkpoint has a {type(processor).__name__} instead of an image processor. Put its "
            "preprocessor_config.json beside the weights.",
            Exit.UNAVAILABLE,
        )
    # Two back ends of one processor have different types and the same settings.
    settings = {name: value for name, value in processor.to_dict().items() if not name.endswith("processor_type")}
    return _Reader(hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest(), processor)
