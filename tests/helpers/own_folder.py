"""Runs a script that finds another folder under a path than everyone else, as on a machine with a disk of its own.

    python tests/helpers/own_folder.py FOLDER SOURCE SCRIPT [ARGUMENTS]      SOURCE is what the script finds at FOLDER

For processes that are forked: mounting needs a process of one thread.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from tests.helpers.own_disk import enter_own_mounts

if __name__ == "__main__":
    folder, source, *words = sys.argv[1:]
    enter_own_mounts()
    subprocess.run(["mount", "--bind", source, folder], check=True)
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
