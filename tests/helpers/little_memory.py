"""A run in a process that may take only a little more memory than it has, as under `ulimit -v`."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from functools import partial

import psutil

import finetuning


def with_little_memory(argv: Sequence[str], more_mib: int) -> Callable[[], int]:
    """What `ProcessGroup.train` runs instead of the flags."""
    return partial(_train, tuple(argv), more_mib)


def _train(argv: Sequence[str], more_mib: int) -> int:
    limit = psutil.Process().memory_info().vms + more_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    return finetuning.main(argv)
