"""Runs finetuning.py as on a disk whose locks do not reach all hosts: a run must touch its lock.json.

python tests/helpers/without_locks.py FLAGS...
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import run_folder.lock

run_folder.lock.is_on_local_disk = lambda folder: False

if __name__ == "__main__":
    sys.argv[0] = str(Path(sys.path[0]) / "finetuning.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
