"""A copy of the project to add files to, and runs of it: a fork forgets our modules and imports the copy's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.helpers.processes import ROOT, run_forked

# The fork has imported everything. Third-party modules stay; ours are imported again from the copy.
_RUN_COPY = """
import pathlib, runpy, sys
copy, root = map(pathlib.Path, sys.argv[1:3])
ours = {path.stem if path.is_file() else path.name for path in root.iterdir() if path.is_dir() or path.suffix == ".py"}
for name in [name for name in sys.modules if name.partition(".")[0] in ours - {"datasets"} and name != "__main__"]:
    del sys.modules[name]
sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(root)))]
sys.argv = [str(copy / "finetuning.py"), *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def copy_project(folder: Path) -> Path:
    """Copy what a run imports into `folder`: all rooms but tests."""
    rooms = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in ("tests", "benchmarks", "docs")]
    for room in rooms:
        if list(room.glob("*.py")):
            shutil.copytree(room, folder / room.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "finetuning.py", folder)
    return folder


def add_line(file: Path, after: str, line: str) -> None:
    """Write `line` after the one line of `file` that reads `after`."""
    text = file.read_text()
    assert text.count(f"{after}\n") == 1, f"{file} has no single line {after!r}"
    file.write_text(text.replace(f"{after}\n", f"{after}\n{line}\n"))


def run_copy(copy: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`python finetuning.py FLAGS` of the copy."""
    return run_forked(["-c", _RUN_COPY, str(copy), str(ROOT), *flags], cwd=copy)
