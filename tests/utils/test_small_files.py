"""Small files of any origin: what cannot be read or parsed is an OSError or a ValueError, at once."""

from __future__ import annotations

import os
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from utils.small_files import is_there, open_regular, parse_json, parse_yaml, read_bytes, read_json, read_text


def test_a_regular_file_is_read_and_nothing_else(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"\xef\xbb\xbf{}\r\n")
    os.mkfifo(pipe)
    assert read_text(file, encoding="utf-8-sig") == "{}\n"
    assert read_bytes(file, most_bytes=7) == file.read_bytes()
    for path, said in (
        (pipe, "regular"),
        (Path("/dev/zero"), "regular"),
        (tmp_path, "directory"),
        (file / "x", "Not a"),
    ):
        for read in (read_bytes, read_text, read_json, open_regular):
            with pytest.raises(OSError, match=said) as refused:
                read(path)
            assert refused.value.filename == str(path)
    with pytest.raises(OSError, match="larger than 0 MiB"):
        read_bytes(file, most_bytes=6)
    assert (is_there(file), is_there(tmp_path / "none"), is_there(file / "x")) == (True, False, False)


def test_a_small_file_takes_little_memory_whatever_size_is_allowed(tmp_path: Path) -> None:
    """Where memory has run out, run.yaml is read for the account of it."""
    (tmp_path / "file").write_bytes(b"a" * 5_000)
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "file") == b"a" * 5_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[" * 20_000, b"[" * 20_000 + b"]" * 20_000, b"[" * 200 + b"]" * 200, b'"\\ud800"', b"1" * 5000),
        *(b'{"\\udc00": 1}', b"\xff", b'[{"a": "\\ud83d"}]'),
    ],
    ids=range(10),
)
def test_json_that_no_function_could_use_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(data)


def test_json_of_any_numbers_and_of_whole_pairs_is_read() -> None:
    assert parse_json(b'["\\ud83d\\ude00", 1e999, -Infinity]') == ["\U0001f600", float("inf"), -float("inf")]
    assert parse_json(b"[" * 90 + b"]" * 90) is not None


@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
@pytest.mark.parametrize(
    "text",
    [
        *("[" * 20_000, "[" * 150 + "]" * 150, "&a [*a]", "!!bool x", '!!int ""', "!!timestamp x", "{[1]: 2}"),
        *("!!float x", "!!python/object:os.system x", "\0", "a: &a [1]\nb: [*a, *b]", "? {}", "2001-99-99"),
    ],
    ids=range(13),
)
def test_yaml_that_is_none_is_a_value_error(text: str, loader: type) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_yaml(text, loader)


def test_yaml_that_names_its_lists_a_billion_times_is_refused() -> None:
    names = "abcdefghij"
    lines = ["a: &a [[], [], [], [], [], [], [], [], []]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise(names)]
    with pytest.raises(ValueError, match="too many lists"):
        parse_yaml("\n".join(lines), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
