"""The files that a pattern matches, each once, whatever links lead to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from glob import escape, glob
from pathlib import Path


def files_of_glob(pattern: Path) -> list[Path]:
    """The files that a pattern matches, sorted; none may match."""
    return sorted(file for file in set(_expand(pattern)) if file.is_file())


def _expand(pattern: Path) -> Iterator[Path]:
    """The paths that a pattern matches. Python's own `**` follows a link to a folder above it round and round."""
    if "**" not in pattern.parts:
        yield from map(Path, glob(str(pattern)))
        return
    place = pattern.parts.index("**")
    for top in _expand(Path(*pattern.parts[:place])) if place else [Path()]:
        for folder in _folders(top):
            yield from _expand(Path(escape(str(folder)), *(pattern.parts[place + 1 :] or ("*",))))


def _folders(top: Path) -> Iterator[Path]:
    """A folder and those below it, links followed, each once; hidden ones are left out, as by Python's `**`."""
    entered, waiting = set(), [top]
    while waiting:
        folder = waiting.pop(0)
        with suppress(OSError):  # as for a folder that cannot be read
            if (identity := folder.resolve()) not in entered:
                entered.add(identity)
                below = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != "."]
                waiting += below
                yield folder


def each_once(files: list[Path]) -> list[Path]:
    """Each file by its shortest path, whatever links lead to it."""
    shortest: dict[Path, Path] = {}
    for file in sorted(files, key=lambda file: len(file.parts)):
        shortest.setdefault(file.resolve(), file)
    kept = set(shortest.values())
    return [file for file in files if file in kept]
