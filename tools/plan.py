"""Plan a run: what would hold each rank's memory, whether it fits, how long it takes and what it costs.

    python -m tools.plan --model_name M --enable_fsdp --dry_run_hardware 4xV100-32GB

FLAGS are those of finetuning.py, which it runs with --dry_run (docs/planning.md). Exit status: 0 whatever the verdict;
2 refused, as the run would be.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "finetuning.py"


def main(argv: Sequence[str] | None = None) -> int:
    flags = list(sys.argv[1:] if argv is None else argv)
    asked = [] if any(word.partition("=")[0].replace("-", "_") == "__dry_run" for word in flags) else ["--dry_run"]
    return subprocess.run([sys.executable, str(SCRIPT), *flags, *asked]).returncode


if __name__ == "__main__":
    sys.exit(main())
