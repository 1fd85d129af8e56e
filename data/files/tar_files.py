"""Rows of tar archives in WebDataset's form: members with the same name up to its first dot are one sample.

`0001.json` is the row, `0001.txt` its text, `0001.jpg` and `0001.1.png` are its images: not their bytes, but where in
the archive they are. So a row is small, and an image is read when a batch is made of it. Images that are numbered come
in the order of their numbers: archives sorted by name have 10 before 2, and 1.jpg before jpg.
https://github.com/webdataset/webdataset#the-webdataset-format
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from data.files.json_values import decode_row
from data.files.row_chunks import ItemChunk, RowChunk, RowReader
from data.files.row_text import RowText, row_of_value
from utils.errors import ConfigError, in_one_line

_SAMPLES_AT_A_TIME = 256
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")
_OTHER_MEDIA = {
    **dict.fromkeys(("mp4", "webm", "mov", "avi", "mkv"), "videos"),
    **dict.fromkeys(("mp3", "wav", "flac", "ogg", "m4a"), "audios"),
}
_TEXTS = ("txt", "text", "caption")
_NUMBERED = re.compile(r"(?:(\D*)(\d+)\.)?[^.]+")  # kinds of images: `jpg`, `1.jpg`, `view1.jpg`
_NAMED = ("image", "images")  # keys of a row that may name its members
_MOST_REMEMBERED = 100_000  # samples
_BLOCK = 512  # bytes: members begin at multiples of it
_READ_BYTES = 1 << 20


class _Member(NamedTuple):
    name: str
    key: str
    kind: str  # all after the first dot, in small letters
    header: int  # where it begins, bytes
    offset: int  # where its contents begin, bytes
    size: int  # of its contents, bytes


def tar_rows(file: Path) -> Iterator[RowText]:
    """The rows of an archive.

    Raises:
        ConfigError: if it cannot be read.
    """
    with file.open("rb") as stream:
        for sample in _samples(file, stream, 0):
            yield _row(file, stream, sample)


class TarReader(RowReader):
    """The rows of an archive, from any sample on: a position is the first byte of one."""

    def __init__(self, file: Path) -> None:
        self.file, self._stream = file, file.open("rb")
        self._samples: Iterator[list[_Member]] = iter(())
        self._next = -1

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        if position != self._next:
            self._samples = _samples(self.file, self._stream, position)
        samples = list(islice(self._samples, _SAMPLES_AT_A_TIME))
        if not samples:
            return None
        last = samples[-1][-1]
        self._next = last.offset + -(-last.size // _BLOCK) * _BLOCK
        rows = [_row(self.file, self._stream, sample) for sample in samples]
        return ItemChunk([row.problem or "" if row.value is None else row.value for row in rows], (self._next, 0))

    def close(self) -> None:
        self._stream.close()


def _samples(file: Path, stream: IO[bytes], position: int) -> Iterator[list[_Member]]:
    sample: list[_Member] = []
    halves = _Halves(file)
    for member in _members(file, stream, position):
        if sample and member.key != sample[0].key:
            halves.check(sample)
            yield sample
            sample = []
        sample.append(member)
    if sample:
        halves.check(sample)
        yield sample


class _Halves:
    """Finds samples whose images stand apart from their text, as `tar cf shard.tar *.json *.jpg` writes them."""

    def __init__(self, file: Path) -> None:
        self.file, self._are_images = file, dict[str, bool]()  # by key: either images alone, or none

    def check(self, sample: Sequence[_Member]) -> None:
        """
        Raises:
            ConfigError: if its other half came before.
        """
        are_images = {member.kind.rpartition(".")[2] in _IMAGES for member in sample}
        if len(are_images) == 2:
            return
        key, has_images = sample[0].key, are_images.pop()
        if self._are_images.get(key) is (not has_images):
            raise ConfigError(
                f"{self.file}: the text of {key} and its images do not stand next to each other; write the archive "
                "again, sorted by name (tar --sort=name)"
            )
        if len(self._are_images) < _MOST_REMEMBERED:
            self._are_images[key] = has_images


def _members(file: Path, stream: IO[bytes], position: int) -> Iterator[_Member]:
    stream.seek(position)
    end = position
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            while (info := archive.next()) is not None:
                path, end = PurePosixPath(info.name), info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                stem, _, kind = path.name.partition(".")
                if info.isfile() and stem and kind:
                    key = str(path.parent / stem)
                    yield _Member(info.name, key, kind.lower(), info.offset, info.offset_data, info.size)
                vars(archive)["members"] = []  # it keeps each, and there may be millions
        _check_end(file, stream, end)
    except tarfile.TarError as error:
        raise ConfigError(
            f"{file} is no tar archive that can be read ({in_one_line(error)}); unpack compressed ones, and write "
            "others again"
        ) from error


def _check_end(file: Path, stream: IO[bytes], end: int) -> None:
    """Look for the zeros that end an archive: tarfile also takes half a header, or no more bytes, for its end.

    Args:
        end: the first byte behind the last member.

    Raises:
        tarfile.ReadError: if they are missing. ConfigError: if something follows them.
    """
    stream.seek(end)
    block = stream.read(_BLOCK)
    if not block or block.strip(b"\0"):
        raise tarfile.ReadError("it was cut off")
    while block := stream.read(_READ_BYTES):
        if block.strip(b"\0"):
            raise ConfigError(
                f"{file}: more follows where the archive ends, as where cat joined archives; give them one by one, "
                "or join them by tar --concatenate"
            )


def _row(file: Path, stream: IO[bytes], sample: list[_Member]) -> RowText:
    """The row of a sample; of its images where they are."""
    if problem := _several_rows(sample):
        return RowText(None, None, f"{file}, {problem}")
    place = stream.tell()
    row: dict[str, Any] = {"__key__": sample[0].key}
    images, names = list[dict[str, Any]](), dict[str, dict[str, Any]]()
    try:
        for member in _by_number(sample):
            last = member.kind.rpartition(".")[2]
            if last in _IMAGES:
                image = {"path": str(file.absolute()), "offset": member.offset, "size": member.size}
                images.append(image)
                names |= {member.name: image, PurePosixPath(member.name).name: image, member.kind: image}
            elif last == "json":
                row |= _json(_contents(stream, member))
            elif last in _TEXTS:
                row.setdefault("text", _contents(stream, member).decode())
            elif last in _OTHER_MEDIA:
                row.setdefault(_OTHER_MEDIA[last], []).append(member.name)
            else:
                row[member.kind] = f"{member.size} bytes"
    except ValueError as error:
        return RowText(None, None, f"{file}, {member.name}: {in_one_line(error)}")
    finally:
        stream.seek(place)
    named = next((key for key in _NAMED if row.get(key)), None)
    if named is not None:
        row[named] = _resolved(row[named], names)
    elif images:
        row["images" if len(images) > 1 else "image"] = images if len(images) > 1 else images[0]
    return row_of_value(f"{file}, {sample[0].name}", json.dumps(row, ensure_ascii=False), row)


def _several_rows(sample: Sequence[_Member]) -> str | None:
    """Why a sample is more than one row: `v1.0001.json` and `v1.0002.json` are both of a sample `v1`."""
    for ending in ("json", *_TEXTS):
        members = [member for member in sample if member.kind.rpartition(".")[2] == ending]
        if len(members) > 1 and not any(member.kind == ending for member in members):
            return (
                f"{members[0].name}: it is of one row with {members[1].name}, as the name of a row ends at its first "
                "dot; write the archive again, with names that have no other dots"
            )
    return None


def _by_number(sample: list[_Member]) -> list[_Member]:
    """The members of a sample, images by their numbers if each has one, all behind the same word; else as they stand.

    One without a number is the first.
    """
    images = [member for member in sample if member.kind.rpartition(".")[2] in _IMAGES]
    found = [_NUMBERED.fullmatch(image.kind) for image in images]
    if not all(found) or len({match[1] for match in found if match and match[2]}) > 1:
        return sample
    numbers = {image: int(match[2] or -1) for image, match in zip(images, found, strict=True) if match}
    return [member for member in sample if member not in numbers] + sorted(images, key=lambda image: numbers[image])


def _json(data: bytes) -> Mapping[str, Any]:
    value = decode_row(data.decode())
    if isinstance(value, list):  # turns alone
        return {"messages": value}
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {type(value).__name__}")
    return value


def _contents(stream: IO[bytes], member: _Member) -> bytes:
    stream.seek(member.offset)
    return stream.read(member.size)


def _resolved(value: Any, names: Mapping[str, Any]) -> Any:
    """Names of the sample's members as the places where they are; others may be files elsewhere."""
    if isinstance(value, list):
        return [_resolved(part, names) for part in value]
    return names.get(value, value) if isinstance(value, str) else value
