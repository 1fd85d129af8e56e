"""The files that a user's code is made of: its own, those of the modules that it imports, and data that it names."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from configs.datasets import BUILT_IN_FOLDER, FORMATS

_SCHEME = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in _SCHEME)
_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}  # of other places that Python may look in
_PROJECT = Path(__file__).resolve().parents[2]
_BUILT_IN = [BUILT_IN_FOLDER / f"{name}.py" for name in (*FORMATS, "tokenized")]
_ROOMS = ("chat", "configs", "data", "evaluation", "policies", "ranks", "reporting", "resolving", "tasks", "utils")
_LONGEST_NAME = 255  # of a file: a longer text names none


def is_of_users(file: Path) -> bool:
    """Whether a file holds a user's code: no library's, and not that of this project's own functions."""
    file = file.resolve()
    if _LIBRARY_FOLDERS & {*file.parts} or any(file.is_relative_to(folder) for folder in _LIBRARIES):
        return False
    if any(_has_packages(folder) for folder in file.parents):
        return False
    return file not in _BUILT_IN and not any(file.is_relative_to(_PROJECT / room) for room in _ROOMS)


@functools.cache
def _has_packages(folder: Path) -> bool:
    """Whether pip has installed packages into a folder, as `pip install --target` does into any."""
    return next(folder.glob("*.dist-info/RECORD"), None) is not None


def project_sources() -> list[Path]:
    """The project's own code that decides what tokens are: data/, chat/, and the files of the built-in formats."""
    return [*(file for room in ("data", "chat") for file in sorted((_PROJECT / room).rglob("*.py"))), *_BUILT_IN]


def user_sources(files: Iterable[Path]) -> list[Path]:
    """These files of Python, the user's modules that they import, theirs in turn, and data files that they name.

    An import is found wherever it stands, in a function too. A text in the code that is the name of a file, from the
    folder of the code or from here, is one that the code may read.
    """
    found: dict[Path, None] = {}
    waiting = [file.resolve() for file in files if file.is_file()]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = None
        if file.suffix == ".py":
            parts = _parts(file)
            waiting += [path for name in parts.imports for path in _modules(name, file.parent)]
            named = (named_file(text, file.parent) for text in parts.texts)
            waiting += [path for path in named if path is not None and path.suffix != ".py"]
    return sorted(found)


def named_file(text: str, folder: Path | None = None) -> Path | None:
    """The file that a text names, from a folder or from here; None for any other text."""
    if not 0 < len(text) <= _LONGEST_NAME or "\n" in text or "\0" in text:
        return None
    for start in ("", folder or ""):
        with suppress(OSError, ValueError):
            if os.path.isfile(path := os.path.join(start, os.path.expanduser(text))):
                return Path(path).resolve()
    return None


def _modules(name: str, folder: Path) -> Iterator[Path]:
    """The user's files that an import runs: of `a.b.c` a package, one in it, and a module or a name in that.

    Args:
        name: begins with a dot for each folder up, as in Python, if the import is relative.
        folder: of the code that imports it.
    """
    below = name.lstrip(".")
    top, *others = below.split(".")
    level = len(name) - len(below)
    up = [folder, *folder.parents]
    starts = [up[min(level, len(up)) - 1]] if level else [folder, *_places_of(top)]
    for start in starts:
        if not level and not ((start / f"{top}.py").is_file() or (start / top).is_dir()):
            continue
        path = start
        for part in (top, *others):
            path = path / part
            for file in (path.with_name(f"{part}.py"), path / "__init__.py"):
                if file.is_file() and is_of_users(file):
                    yield file.resolve()
        return


def _places_of(top: str) -> list[Path]:
    """The folder in which Python finds a module; none for what is built in or not there."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, AttributeError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(place).parent for place in spec.submodule_search_locations]
    return [Path(spec.origin).parent] if spec.origin else []


class _Parts(NamedTuple):
    """What a file of Python says of other files."""

    imports: Sequence[str]
    texts: Sequence[str]


def _parts(file: Path) -> _Parts:
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):  # what Python cannot read, it does not run
        return _Parts((), ())
    imports = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            dot = "." if node.module else ""
            imports += [start, *(f"{start}{dot}{alias.name}" for alias in node.names)]
    written = {id(node.args[0]) for node in nodes if isinstance(node, ast.Call) and _opens_to_write(node)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in written]
    return _Parts(list(dict.fromkeys(imports)), [text for text in dict.fromkeys(texts) if isinstance(text, str)])


def _opens_to_write(call: ast.Call) -> bool:
    """Whether it is `open(NAME, MODE)` with a mode that writes, as of a log."""
    mode = call.args[1] if len(call.args) > 1 and isinstance(call.func, ast.Name) and call.func.id == "open" else None
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and bool({*"wax"} & {*mode.value})
