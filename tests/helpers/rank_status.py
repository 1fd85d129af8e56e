"""Runs finetuning.py as a child of each rank that torchrun starts, and writes what it ended with.

torchrun's report names ranks that failed, and none of the others; only its parent learns a process's status.

    torchrun ... tests/helpers/rank_status.py FOLDER [flags of finetuning.py]     writes FOLDER/status-RANK
"""

import os
import runpy
import signal
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "finetuning.py"

# torchrun signals the rank's whole process group, so the child gets it, too.
signal.signal(signal.SIGTERM, lambda *_: None)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder = sys.argv.pop(1)
    sys.argv[0], sys.path[0] = str(SCRIPT), str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
else:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (Path(sys.argv[1]) / f"status-{os.environ['RANK']}").write_text(str(status))
    sys.exit(status)
