"""A script or a module, run as if each GPU were smaller: torch's allocator may take so much of it.

    python -m benchmarks.runs.with_less_memory GIB finetuning.py FLAGS
    python -m benchmarks.runs.with_less_memory GIB -m MODULE ARGUMENTS
    torchrun --nproc_per_node 4 -m benchmarks.runs.with_less_memory GIB finetuning.py FLAGS

0 GiB is no limit, and without a GPU there is none.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

from utils.units import GIB

if __name__ == "__main__":
    limit_gib, device = float(sys.argv[1]), int(os.environ.get("LOCAL_RANK", "0"))
    if limit_gib and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_gib * GIB / total, device)
    sys.argv = sys.argv[2:]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
