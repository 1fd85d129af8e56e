"""Takes the lock of a run folder as a run does, says so, and waits to be ended.

python tests/helpers/lock_holder.py FOLDER...
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from run_folder.lock import RunLock
from utils.errors import ConfigError

with RunLock(beat_seconds=0.1, stale_seconds=1) as lock:
    try:
        for folder in sys.argv[1:]:
            lock.take("--output_dir", Path(folder))
        print("held", flush=True)
    except ConfigError as error:
        print(error, flush=True)
        sys.exit(2)
    time.sleep(600)
