"""Opens images: files, or bytes that a dataset holds. Pillow is imported if an image is asked for, and not before."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from data.images.shapes import Size
from data.tokens.spans import BadExample
from utils.errors import in_one_line
from utils.git_lfs import PULL, is_pointer
from utils.optional_packages import import_optional


class FilePart(NamedTuple):
    """Some bytes of a file, such as a member of a tar archive."""

    path: Path
    offset: int  # bytes
    size: int  # bytes


ImageSource = Path | bytes | FilePart
"""A file, its contents, or a part of a file."""

DECODING = 2
"""Raised when `open_image` makes other pixels of a file: what was computed from the former ones is computed again."""

_TURNED = range(5, 9)  # values of EXIF's orientation with which width and height change places
_ORIENTATION = 0x0112
_PNG_NOTES = ("exif", "Raw profile type exif", "XML:com.adobe.xmp")  # of an image's `info` that may hold it
_PNG_MARKS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")  # of the same in the file
_TAIL_BYTES = 2**16  # of a file, in which notes behind its pixels are looked for
_IMAGE_WIDTH, _IMAGE_LENGTH, _BITS_PER_SAMPLE = 256, 257, 258  # tags of TIFF
_LONGEST_NAMED = 300  # characters of a path in a message
_HELD_BYTES = re.compile(r"<_io\.BytesIO object at \w+>|'BytesIO'")  # in Pillow's messages


def import_pillow() -> ModuleType:
    """`PIL.Image`.

    Raises:
        ConfigError: if Pillow is not installed, or cannot be imported.
    """
    return import_optional(
        "PIL.Image", "--dataset: images are opened by Pillow", "pip install -r requirements-images.txt"
    )


def image_source(value: Any, what: str, folder: Path | None) -> ImageSource:
    """Where an image is: a value names its file, or holds `bytes` or `path` as the datasets library does.

    Args:
        what: the value is, for messages: "column image".
        folder: that relative paths start from; None if the data is not in files of one folder.

    Raises:
        BadExample: if it names no file, or one that is not there.
    """
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return value["bytes"]
        path, offset, size = (value.get(name) for name in FilePart._fields)
        if isinstance(path, str) and isinstance(offset, int) and isinstance(size, int):
            return FilePart(Path(path), offset, size)
        value = path
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value.strip():
        kind = "empty" if value is None or value == "" else type(value).__name__
        raise BadExample(f"{what} is no image and no path of one but {kind}")
    if value.startswith("data:"):
        return _decoded(value, what)
    if value.startswith("file://"):
        value = _path_of_uri(value.removeprefix("file://"), folder)
    if "://" in value:
        raise BadExample(f"{what}: {value} is a URL, and images are not downloaded; give their files")
    path = Path(os.path.expanduser(value))  # without an error for the home folder of nobody
    if not path.is_absolute():
        if folder is None:
            raise BadExample(
                f"{what}: {value} starts from no folder, since the data is not in files of one; give absolute paths, "
                "or, for conversations, --chat_dataset.image_folder"
            )
        path = folder / path
    named = f"{str(path)[:_LONGEST_NAMED]}..." if len(str(path)) > _LONGEST_NAMED else str(path)
    remedy = "; if this is base64, write data:;base64, before it" if len(value) > _LONGEST_NAMED else ""
    try:
        is_file = path.is_file()
    except OSError as error:  # the name is too long, or a folder is closed to this user
        raise BadExample(f"{what}: {named} cannot be opened ({error.strerror}){remedy}") from error
    if not is_file:
        raise BadExample(f"{what}: there is no file {named}{remedy}")
    return path


def _path_of_uri(written: str, folder: Path | None) -> str:
    """The path in a `file://` address as it stands there, or, if nothing is called so, with its %20 read (RFC 8089)."""
    read = unquote(written)
    if read == written:  # most are; each look at a file takes time
        return written
    with suppress(OSError):
        if not (folder or Path()).joinpath(written).is_file() and (folder or Path()).joinpath(read).is_file():
            return read
    return written


def _decoded(uri: str, what: str) -> bytes:
    """The bytes of a data URI, `data:image/png;base64,...` (RFC 2397)."""
    header, _, data = uri.partition(",")
    try:
        if not header.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise BadExample(f"{what}: its data URI cannot be read ({error})") from error


def read_size(source: ImageSource) -> Size:
    """An image's width and height as its camera was held, by its header.

    Pixels are not decoded: a file that was cut off may still be broken.

    Raises:
        BadExample: if it is none.
    """
    image_module = import_pillow()
    try:
        with image_module.open(_opened(source)) as image:
            _check_numbers(image)
            width, height = image.size
            size: Size = (height, width) if _is_turned(image) else (width, height)
    except Exception as error:  # each format has its own
        raise BadExample(_broken(source, error)) from error
    if min(size) < 1:
        raise BadExample(f"image {name_of(source)} has no pixels")
    return size


def _is_turned(image: Any) -> bool:
    """Whether an image's camera was held so that width and height change places."""
    if image.format == "PNG" and not _may_be_turned(image):
        return False  # Pillow would decode the pixels, to look for it behind them
    if image.format == "TIFF" and image.size != (image.tag_v2[_IMAGE_WIDTH], image.tag_v2[_IMAGE_LENGTH]):
        return False  # newer Pillow has turned the size when it opened the file
    return image.getexif().get(_ORIENTATION) in _TURNED


def _may_be_turned(image: Any) -> bool:
    """Whether a PNG has a note that may say how its camera was held: before its pixels, or near the file's end."""
    if any(note in image.info for note in _PNG_NOTES):
        return True
    file, place = image.fp, image.fp.tell()
    file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL_BYTES))
    tail = file.read()
    file.seek(place)
    return any(mark in tail for mark in _PNG_MARKS)


def open_image(source: ImageSource) -> Any:
    """The image, decoded: three channels of 8 bits, turned as its camera says.

    Raises:
        BadExample: if it cannot be decoded.
    """
    image_module = import_pillow()
    from PIL import ImageOps

    try:
        with image_module.open(_opened(source)) as image:
            _check_numbers(image)
            return _in_8_bits(ImageOps.exif_transpose(image), _num_bits(image)).convert("RGB")
    except Exception as error:
        raise BadExample(_broken(source, error)) from error


def _check_numbers(image: Any) -> None:
    """
    Raises:
        ValueError: if pixels are fractions, which `convert` takes for 0 to 255: those from 0 to 1 would be black.
    """
    if image.mode == "F":
        raise ValueError("its pixels are fractions, of an unknown range; save it with 8 or 16 bits per channel")


def _num_bits(image: Any) -> int:
    """The bits of a pixel's grey, if more than 8: 12 in some TIFF files, whose numbers Pillow leaves as they are."""
    return 12 if getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE) == (12,) else 16


def _in_8_bits(image: Any, num_bits: int) -> Any:
    """An image of 12 or 16 bits per pixel (I;16, and I as PGM files give it) with its upper 8: `convert` makes white of
    all above 255.

    Raises:
        ValueError: if pixels are beyond 16 bits, or negative: cut to 16, all may be white or black.
    """
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= 2**16:
        raise ValueError(
            f"its pixels are whole numbers from {low:,} to {high:,}, of an unknown range; save it with 8 or 16 bits "
            "per channel"
        )
    if image.mode == "I" and high <= 255:
        return image
    return import_pillow().fromarray((values >> (num_bits - 8)).astype(np.uint8))


def _opened(source: ImageSource) -> Any:
    if isinstance(source, FilePart):
        with source.path.open("rb") as file:
            file.seek(source.offset)
            return io.BytesIO(file.read(source.size))
    return io.BytesIO(source) if isinstance(source, bytes) else source


def source_bytes(source: ImageSource) -> bytes:
    """The bytes of an image's file.

    Raises:
        BadExample: if it cannot be read.
    """
    try:
        opened = _opened(source)
        return opened.read_bytes() if isinstance(opened, Path) else bytes(opened.getvalue())
    except OSError as error:
        raise BadExample(_broken(source, error)) from error


def name_of(source: ImageSource) -> str:
    if isinstance(source, FilePart):
        return f"at byte {source.offset:,} of {source.path}"
    return f"of {len(source):,} bytes" if isinstance(source, bytes) else str(source)


def _broken(source: ImageSource, error: Exception) -> str:
    reason = in_one_line(error)
    if isinstance(source, Path) and is_pointer(source):
        reason = PULL
    if not isinstance(source, Path):
        reason = _HELD_BYTES.sub("in its bytes", reason)
    return f"image {name_of(source)} cannot be read ({reason})"
