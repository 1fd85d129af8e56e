"""The end of a process group that DistributedDataParallel used in a test's own process."""

from __future__ import annotations

import gc

import torch.distributed as dist


def stop_group_after_replicas() -> None:
    """End the process group after the last DistributedDataParallel, to which the caller holds no reference any more.

    Its reducer, if it goes last, waits for gloo's threads with the GIL held. In torch 2.13 one of them may wait for the
    GIL to let go of what it reduced: both wait for good. A replica is part of a cycle; only a collection ends it.
    """
    gc.collect()
    dist.destroy_process_group()
