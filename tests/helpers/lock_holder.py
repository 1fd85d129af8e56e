"""Takes the lock of a run folder as a run does, says so, and waits to be ended.

python tests/helpers/lock_holder.py [--worker] FOLDER...      --worker: fork a process, as a data loader does; its
                                                              process id is said, too
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from run_folder.lock import RunLock
from utils.errors import ConfigError

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts in the background ignores it
forks = sys.argv[1] == "--worker"
with RunLock(beat_seconds=0.1, stale_seconds=1) as lock:
    try:
        for folder in sys.argv[1 + forks :]:
            lock.take("--output_dir", Path(folder))
        # The fork says so itself: only then has it let go of what it inherited.
        if not forks or os.fork() == 0:
            print("held", *([os.getpid()] if forks else []), flush=True)
    except ConfigError as error:
        print(error, flush=True)
        sys.exit(2)
    time.sleep(600)
