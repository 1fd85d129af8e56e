"""How a DataLoader's worker sends a tensor to its rank: through a pipe, or in memory that both share.

A pipe takes a small tensor sooner than torch hands over a file descriptor. But it holds 64 KiB: for the pixels of a
micro-batch (168 MB, say) the rank's thread would wait for the GIL at each of thousands of reads, and then hold it while
it makes a tensor of them. The thread that queues kernels would wait as often.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

_LARGE_BYTES = 2**20
_SHARED_MEMORY = Path("/dev/shm")
_LEFT_FREE_BYTES = 2**30  # for NCCL and other workers. Containers have 64 MiB unless they ask for more.
_LONGEST_FOLDER = 70  # bytes; of the 108 in a Unix socket's path, multiprocessing adds 33


def to_send(value: Any) -> Any:
    """What to pickle in place of a value: a tensor moved to shared memory, or an array, which goes by value."""
    if isinstance(value, dict):
        return {name: to_send(inner) for name, inner in value.items()}
    if not torch.is_tensor(value):
        return value
    if value.nbytes < _LARGE_BYTES or not _can_share(value.nbytes):
        return value.numpy()
    try:
        return value.share_memory_()
    except RuntimeError:  # other workers were faster
        return value.numpy()


def received(value: Any) -> Any:
    """The value in whose place `to_send` pickled this."""
    if isinstance(value, dict):
        return {name: received(inner) for name, inner in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _can_share(num_bytes: int) -> bool:
    """Whether there is room, and for the socket through which torch hands over the file descriptor."""
    if not _SHARED_MEMORY.is_dir() or len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
        return False
    return shutil.disk_usage(_SHARED_MEMORY).free >= num_bytes + _LEFT_FREE_BYTES
