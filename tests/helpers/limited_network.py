"""Runs with the same flags before and after the network of their host is limited, in the ranks of one launch.

torchrun [...] -m tests.helpers.limited_network FOLDER FLAGS; writes FOLDER/free, waits for the file FOLDER/is-limited,
and writes FOLDER/limited and, without sharding, FOLDER/copies.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import finetuning


def main() -> None:
    folder, *flags = sys.argv[1:]
    for name, more in (
        ("free", ["--enable_fsdp", "--max_train_step", "20"]),
        ("limited", ["--enable_fsdp", "--max_train_step", "4"]),
        ("copies", ["--sharding_strategy", "NO_SHARD", "--max_train_step", "4"]),
    ):
        while name != "free" and not (Path(folder) / "is-limited").exists():
            time.sleep(0.05)
        status = finetuning.main([*flags, *more, "--output_dir", f"{folder}/{name}"])
        assert status == 0, status


if __name__ == "__main__":
    main()
