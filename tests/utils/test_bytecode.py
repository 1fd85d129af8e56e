"""Where Python keeps the bytecode of what a run imports."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT
from utils.bytecode import compiles_at_each_start

SCRIPT = """
import sys
from utils.bytecode import keep_bytecode
keep_bytecode("library")
import library
print(library.__cached__, sys.dont_write_bytecode)
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A module without bytecode."""
    file = tmp_path / "site" / "library.py"
    file.parent.mkdir()
    file.write_text("number = 1")
    return file


def imported(library: Path, caches: Path, **variables: str) -> tuple[str, bool]:
    """Where a process that imports it looks for its bytecode, and whether it writes none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": f"{ROOT}:{library.parent}", "XDG_CACHE_HOME": str(caches), **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    place, writes_none = done.stdout.split()
    return place, writes_none == "True"


def test_bytecode_that_may_not_lie_beside_its_source_lies_in_the_users_folder(library: Path, tmp_path: Path) -> None:
    caches = tmp_path / "caches"
    place, writes_none = imported(library, caches, PYTHONDONTWRITEBYTECODE="1")
    assert not writes_none
    assert Path(place).is_relative_to(caches / "finetuning" / "bytecode")
    first = Path(place).stat().st_mtime_ns
    assert not (library.parent / "__pycache__").exists()
    assert imported(library, caches, PYTHONDONTWRITEBYTECODE="1") == (place, False)
    assert Path(place).stat().st_mtime_ns == first  # read, not written again


def test_bytecode_lies_beside_its_source_where_it_may_or_does(library: Path, tmp_path: Path) -> None:
    beside = library.parent / "__pycache__"
    place, _ = imported(library, tmp_path / "caches")
    assert Path(place).parent == beside
    assert Path(place).exists()
    assert imported(library, tmp_path / "caches", PYTHONDONTWRITEBYTECODE="1") == (place, True)
    assert not (tmp_path / "caches").exists()


@pytest.mark.parametrize("why", ["named", "undated", "no folder"])
def test_nothing_changes_where_the_users_folder_does_not_serve(why: str, library: Path, tmp_path: Path) -> None:
    """The user has named another, dates of files are no dates, or a file is in the folder's place."""
    caches, named = tmp_path / "caches", tmp_path / "named"
    if why == "undated":
        os.utime(library, (315532800, 315532800))
    if why == "no folder":
        caches.write_text("")
    variables = {"PYTHONPYCACHEPREFIX": str(named)} if why == "named" else {}
    place, writes_none = imported(library, caches, PYTHONDONTWRITEBYTECODE="1", **variables)
    assert writes_none
    assert Path(place).is_relative_to(named if why == "named" else library.parent)
    assert not Path(place).exists()


def test_a_package_without_bytecode_is_compiled_at_each_start_where_none_is_kept(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(library.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not compiles_at_each_start("library")  # kept at the first import
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compiles_at_each_start("library")
    py_compile.compile(str(library))
    assert not compiles_at_each_start("library")
