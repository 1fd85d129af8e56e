"""Reads small files that anybody may have written: regular files of a credible size, as text, JSON or YAML.

A pipe would be waited for without an end, /dev/zero never ends, and JSON may be nested deeper than Python can follow.
Every function raises an OSError if the file cannot be read and a ValueError if its contents cannot, and nothing else.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

SMALL_BYTES = 2**26
_PART_BYTES = 2**20
_MOST_NESTED = 100
_MOST_TABLES = 10**6  # and lists: a YAML file of a kilobyte may name one of its lists a billion times
_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # how JSON writes half of a surrogate pair


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file of any size, to be read.

    Raises:
        OSError: if it cannot be opened, or is a pipe, a device or a folder.
        ValueError: if the path holds a NUL.
    """
    _check_regular(os.stat(path), path)  # before it is opened: opening a device may do something
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        _check_regular(os.fstat(file.fileno()), path)  # a pipe may have taken its place since
    except OSError:
        file.close()
        raise
    return file


def is_there(path: Path) -> bool | None:
    """Whether a file or folder is there; None if that cannot be found out, as of a file server that is gone."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    return True


def read_bytes(path: Path, *, most_bytes: int = SMALL_BYTES) -> bytes:
    """The contents of a regular file.

    Raises:
        OSError: if it cannot be read, is a pipe, a device or a folder, or is larger than `most_bytes`.
        ValueError: if the path holds a NUL.
    """
    data = bytearray()
    with open_regular(path) as file:
        # In parts: `read(n)` takes n bytes of memory for a file of any size, and an account of memory that has run out
        # needs files, too. Whatever size the file system tells, no more is read than is allowed.
        while len(data) <= most_bytes and (part := file.read(_PART_BYTES)):
            data += part
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes / 2**20:,.0f} MiB", str(path))
    return bytes(data)


def read_text(path: Path, *, encoding: str = "utf-8", most_bytes: int = SMALL_BYTES) -> str:
    """The text of a regular file. Its lines end in line feeds.

    Raises:
        OSError: as `read_bytes`.
        ValueError: if it is not in this encoding.
    """
    text = read_bytes(path, most_bytes=most_bytes).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, *, most_bytes: int = SMALL_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: as `read_bytes`.
        ValueError: as `parse_json`.
    """
    return parse_json(read_bytes(path, most_bytes=most_bytes))


def parse_json(data: bytes) -> Any:
    """The value of JSON text. Its numbers may be infinite, or have thousands of digits.

    Raises:
        ValueError: if it is no JSON, is nested too deeply, or has texts that UTF-8 cannot write.
    """
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    _check_nesting(value)
    if _HALF_A_PAIR.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text holds half of a surrogate pair") from error
    return value


def parse_yaml(text: str, loader: Any) -> Any:
    """The value of YAML text.

    Args:
        loader: a loader of PyYAML that makes plain values alone.

    Raises:
        ValueError: if it is no YAML, is nested too deeply, or has a tag that its value contradicts.
    """
    import yaml

    try:
        value = yaml.load(text, Loader=loader)
    # PyYAML lets any error of parsing a tagged value through: `!!bool x`, `!!int ""`, `!!timestamp x`.
    except (yaml.YAMLError, LookupError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    _check_nesting(value)
    return value


def _check_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _check_nesting(value: Any) -> None:
    """Raise ValueError for a value that functions which call themselves could not walk through."""
    level, num_tables = [value], 0
    for _ in range(_MOST_NESTED):
        deeper: list[Any] = []
        for table in level:
            parts = table.values() if isinstance(table, dict) else table if isinstance(table, list) else ()
            deeper += [part for part in parts if isinstance(part, dict | list)]
            if num_tables + len(deeper) > _MOST_TABLES:
                raise ValueError("too many lists in lists")
        if not deeper:
            return
        level, num_tables = deeper, num_tables + len(deeper)
    raise ValueError("nested too deeply")
