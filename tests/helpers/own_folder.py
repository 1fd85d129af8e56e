"""Runs a script that finds other folders or files under some paths than everyone else, as on a machine of its own.

    python tests/helpers/own_folder.py PATH=SOURCE [PATH=SOURCE ...] SCRIPT [ARGUMENTS]

The script finds SOURCE at PATH. For processes that are forked: mounting needs a process of one thread.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from tests.helpers.own_disk import enter_own_mounts

if __name__ == "__main__":
    words = sys.argv[1:]
    enter_own_mounts()
    while "=" in words[0]:
        path, _, source = words.pop(0).partition("=")
        subprocess.run(["mount", "--bind", source, path], check=True)
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
