"""Opens images: files, or bytes that a dataset holds. Pillow is imported if an image is asked for, and not before."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from data.images.shapes import Size
from data.tokens.spans import BadExample
from utils.errors import in_one_line
from utils.git_lfs import PULL, is_pointer
from utils.optional_packages import import_optional

ImageSource = Path | bytes
"""A file, or its contents."""


def import_pillow() -> ModuleType:
    """`PIL.Image`.

    Raises:
        ConfigError: if Pillow is not installed, or cannot be imported.
    """
    return import_optional(
        "PIL.Image", "--dataset: images are opened by Pillow", "pip install -r requirements-images.txt"
    )


def image_source(value: Any, column: str, folder: Path | None) -> ImageSource:
    """Where an image is: a cell of a table names its file, or holds `bytes` or `path` as the datasets library does.

    Args:
        folder: that relative paths start from; None if the data is not in files of one folder.

    Raises:
        BadExample: if the cell names no file, or one that is not there.
    """
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return value["bytes"]
        value = value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value.strip():
        kind = "empty" if value is None or value == "" else type(value).__name__
        raise BadExample(f"column {column} is no image and no path of one but {kind}")
    if "://" in value:
        raise BadExample(f"column {column}: {value} is a URL, and images are not downloaded; give their files")
    path = Path(value).expanduser()
    if not path.is_absolute():
        if folder is None:
            raise BadExample(f"column {column}: {value} starts from no folder; give absolute paths")
        path = folder / path
    if not path.is_file():
        raise BadExample(f"column {column}: there is no file {path}")
    return path


def read_size(source: ImageSource) -> Size:
    """An image's width and height, by its header. Pixels are not decoded: a file that was cut off may still be broken.

    Raises:
        BadExample: if it is none.
    """
    image_module = import_pillow()
    try:
        with image_module.open(_opened(source)) as image:
            size: Size = image.size
    except Exception as error:  # each format has its own
        raise BadExample(_broken(source, error)) from error
    if min(size) < 1:
        raise BadExample(f"image {name_of(source)} has no pixels")
    return size


def open_image(source: ImageSource) -> Any:
    """The image, decoded: three channels of 8 bits, turned as its camera says.

    Raises:
        BadExample: if it cannot be decoded.
    """
    image_module = import_pillow()
    from PIL import ImageOps

    try:
        with image_module.open(_opened(source)) as image:
            return _in_8_bits(ImageOps.exif_transpose(image)).convert("RGB")
    except Exception as error:
        raise BadExample(_broken(source, error)) from error


def _in_8_bits(image: Any) -> Any:
    """An image of 16 bits per pixel (I;16, and I as PGM files give it) with its upper 8: `convert` makes white of all
    above 255."""
    if not image.mode.startswith("I") or (image.mode == "I" and image.getextrema()[1] <= 255):
        return image
    return import_pillow().fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))


def _opened(source: ImageSource) -> Any:
    return io.BytesIO(source) if isinstance(source, bytes) else source


def name_of(source: ImageSource) -> str:
    return f"of {len(source):,} bytes" if isinstance(source, bytes) else str(source)


def _broken(source: ImageSource, error: Exception) -> str:
    reason = in_one_line(error)
    if isinstance(source, Path) and is_pointer(source):
        reason = PULL
    if isinstance(source, bytes):
        reason = reason.replace(f"'{io.BytesIO.__name__}'", "them")
    return f"image {name_of(source)} cannot be read ({reason})"
