"""The doctor, then runs with the same flags in two layouts, all in the ranks of one launch: each start takes long.

torchrun [...] -m tests.helpers.step_times FOLDER FLAGS; writes FOLDER/full and FOLDER/hybrid.
"""

from __future__ import annotations

import sys

import finetuning
from tools import doctor


def main() -> None:
    folder, *flags = sys.argv[1:]
    doctor.check_ranks(flags)
    for name, more in (("full", []), ("hybrid", ["--hsdp"])):
        status = finetuning.main([*flags, *more, "--output_dir", f"{folder}/{name}"])
        assert status == 0, status


if __name__ == "__main__":
    main()
