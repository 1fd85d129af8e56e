"""Tar archives in WebDataset's form: rows, the places of their images, and archives that cannot be read."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from data.files.row_files import read_row_files
from data.files.row_stream import RowStream
from data.files.tar_files import TarReader, tar_rows
from utils.errors import ConfigError


def save(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file


def many(file: Path, number: int) -> Path:
    members: dict[str, bytes] = {}
    for row in range(number):
        members |= {f"d/{row:05}.jpg": b"x" * (row % 700), f"d/{row:05}.json": json.dumps({"row": row}).encode()}
    return save(file, members)


def contents(place: Any) -> bytes:
    return Path(place["path"]).read_bytes()[place["offset"] : place["offset"] + place["size"]]


def test_a_row_has_its_json_its_text_and_where_its_images_are(tmp_path: Path) -> None:
    members = {"a.json": b'{"caption": "red", "n": 1}', "a.jpg": b"one", "a.seg.png": b"two"}
    members |= {"b.txt": b"blue", "b.jpg": b"3"}
    first, second = (row.value or {} for row in tar_rows(save(tmp_path / "a.tar", members)))
    assert (first["caption"], first["n"], first["__key__"]) == ("red", 1, "a")
    assert [contents(place) for place in first["images"]] == [b"one", b"two"]
    assert (second["text"], contents(second["image"])) == ("blue", b"3")


@pytest.mark.parametrize("word", ["", "view"])
def test_numbered_images_come_in_the_order_of_their_numbers(word: str, tmp_path: Path) -> None:
    """An archive sorted by name, which the message below asks for, has `a.10.jpg` before `a.2.jpg` and `a.jpg`."""
    kinds = ["jpg", *(f"{word}{number}.jpg" for number in range(1, 12))]
    members = {f"a.{kind}": kind.encode() for kind in sorted(kinds)} | {"a.json": b"{}"}
    (row,) = (row.value or {} for row in tar_rows(save(tmp_path / "a.tar", members)))
    assert [contents(place).decode() for place in row["images"]] == kinds


@pytest.mark.parametrize("ending", ["json", "txt"])
def test_names_with_further_dots_are_not_taken_for_one_row(ending: str, tmp_path: Path) -> None:
    members = {f"v1.{row}.{kind}": b"{}" for row in (1, 2) for kind in ("jpg", ending)}
    (row,) = tar_rows(save(tmp_path / "a.tar", members))
    assert row.value is None
    assert f"v1.1.{ending}: it is of one row with v1.2.{ending}, as the name of a row ends" in (row.problem or "")


def test_names_in_the_json_are_those_of_members(tmp_path: Path) -> None:
    row = {"messages": [], "images": ["a.1.jpg", "0.jpg", "/else/where.jpg"]}
    members = {"a.0.jpg": b"zero", "a.1.jpg": b"one", "a.json": json.dumps(row).encode()}
    (found,) = (row.value or {} for row in tar_rows(save(tmp_path / "a.tar", members)))
    assert [contents(place) for place in found["images"][:2]] == [b"one", b"zero"]
    assert found["images"][2] == "/else/where.jpg"


def test_other_members_are_named(tmp_path: Path) -> None:
    members = {"a.json": b"[]", "a.mp4": b"video", "a.wav": b"sound", "a.npy": b"123"}
    (row,) = (row.value or {} for row in tar_rows(save(tmp_path / "a.tar", members)))
    assert (row["videos"], row["audios"], row["npy"]) == (["a.mp4"], ["a.wav"], "3 bytes")


def test_a_stream_begins_anywhere(tmp_path: Path) -> None:
    """So a resumed run reads on where it was; all rows are those of a whole reading."""
    file = many(tmp_path / "a.tar", 600)
    whole = [row.value for row in tar_rows(file)]
    reader = TarReader(file)
    chunk = reader.chunk(0, 0)
    assert chunk is not None
    again = TarReader(file).chunk(*chunk.next)
    assert again is not None
    assert [*chunk.read(0, len(chunk)), *again.read(0, len(again))] == whole[: len(chunk) + len(again)]
    last = reader.chunk(*again.next)
    assert last is not None
    assert reader.chunk(*last.next) is None
    assert [row["row"] for row in RowStream.of_files([file])] == list(range(600))  # type: ignore[index]
    assert len(read_row_files([file], ())) == 600


@pytest.mark.parametrize(("data", "problem"), [(b"{", "a.json: "), (b"7", "not a JSON object but int")])
def test_a_broken_row_is_named(data: bytes, problem: str, tmp_path: Path) -> None:
    rows = [*tar_rows(save(tmp_path / "a.tar", {"a.json": data, "b.json": b"{}"}))]
    assert problem in (rows[0].problem or "")
    assert rows[1].value == {"__key__": "b"}


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(b"no archive" * 100)
    with pytest.raises(ConfigError, match=r"a.tar is no tar archive that can be read"):
        list(tar_rows(file))
    whole = many(tmp_path / "b.tar", 9).read_bytes()
    # In a row's contents, in the header after it, and between two members.
    for size in (2 * 512 + 100, 3 * 512 + 1, 3 * 512 + 400, 3 * 512):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"a.tar is no tar archive that can be read"):
            list(tar_rows(file))


def test_what_follows_an_archive_is_not_passed_over(tmp_path: Path) -> None:
    """`cat a.tar b.tar` is no archive of all rows: tar itself reads the first one only."""
    one = many(tmp_path / "one.tar", 3).read_bytes()
    file = tmp_path / "both.tar"
    file.write_bytes(one + one)
    with pytest.raises(ConfigError, match=r"both.tar: more follows where the archive ends, .*tar --concatenate"):
        list(tar_rows(file))


@pytest.mark.parametrize("names", [("a.json", "b.json", "a.jpg", "b.jpg"), ("a.jpg", "b.jpg", "a.txt", "b.txt")])
def test_images_apart_from_their_text_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    """As `tar cf a.tar *.json *.jpg` writes them: a row would lose its images."""
    file = save(tmp_path / "a.tar", dict.fromkeys(names, b"{}"))
    with pytest.raises(ConfigError, match=r"the text of a and its images do not stand next to each other; .*--sort"):
        list(tar_rows(file))
    with pytest.raises(ConfigError, match="next to each other"):
        TarReader(file).chunk(0, 0)


def test_keys_that_come_again_with_all_of_their_files_are_further_rows(tmp_path: Path) -> None:
    first, second = (save(tmp_path / name, {"a.jpg": b"1", "a.json": b"{}", "b.json": b"{}"}) for name in "xy")
    both = tmp_path / "both.tar"
    with tarfile.open(both, "w") as archive:
        for file in (first, second):
            with tarfile.open(file) as part:
                for info in part:
                    archive.addfile(info, part.extractfile(info))
    assert [(row.value or {})["__key__"] for row in tar_rows(both)] == ["a", "b", "a", "b"]
