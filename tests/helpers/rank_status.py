"""Runs finetuning.py as a child of each rank that torchrun starts, and writes what it ended with.

torchrun's report names ranks that failed, and none of the others; nobody but its parent learns a process's status.

    torchrun ... tests/helpers/rank_status.py FOLDER [flags of finetuning.py]     writes FOLDER/status-RANK
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "finetuning.py"

# torchrun signals the rank's whole process group, so the child gets it, too. A handler is not inherited; SIG_IGN is.
signal.signal(signal.SIGTERM, lambda *_: None)
child = subprocess.Popen([sys.executable, str(SCRIPT), *sys.argv[2:]])
status = child.wait()
(Path(sys.argv[1]) / f"status-{os.environ['RANK']}").write_text(str(status))
sys.exit(status)
