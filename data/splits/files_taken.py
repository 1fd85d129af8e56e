"""The line on the files that are read for a split, with their rows: left-over copies among them are seen."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from utils.printing import print_line
from utils.progress import shows_progress
from utils.units import readable
from utils.wording import plural

_NUM_LISTED = 20
_LEFT_OVER = re.compile(r"(?<![A-Za-z])(copy|bak|backup|old|orig|tmp|temp)(?![A-Za-z])|\(\d+\)|~", re.IGNORECASE)


def say_files(flag: str, split: str, files: Sequence[Path], num_rows: Sequence[int] | None) -> None:
    """Print the files of a split if there are several.

    Args:
        flag: the dataset's name on the command line.
        num_rows: of each file; None: not known before they are read, so their sizes are said.
    """
    if len(files) < 2 or not shows_progress():
        return
    top = os.path.commonpath([file.parent for file in files])
    names = [os.path.relpath(file, top) for file in files]
    sizes = [f"{n:,}" for n in num_rows] if num_rows is not None else [readable(file.stat().st_size) for file in files]
    listed = [f"{name} {size}" for name, size in zip(names[:_NUM_LISTED], sizes[:_NUM_LISTED], strict=True)]
    more = [f"{len(files) - _NUM_LISTED:,} more files"] if len(files) > _NUM_LISTED else []
    rows = "" if num_rows is None else f", {plural(sum(num_rows), 'row')}"
    print_line(
        f"--{flag}.data_path: {split}: {plural(len(files), 'file')} in {top}{rows}: {', '.join([*listed, *more])}"
    )
    if left_over := [name for name in names if _LEFT_OVER.search(Path(name).name)]:
        what = ", which looks like a copy" if len(left_over) == 1 else ", which look like copies"
        print_line(
            f"--{flag}.data_path: {split}: rows are read from {', '.join(left_over[:_NUM_LISTED])}{what}; to leave "
            "such a file out, name the others or a glob"
        )
