"""Whether the machines of a run can compile at all: each rank compiles a trivial function, and runs it.

It finds a missing C compiler or Triton, a GPU that Triton does not serve, a cache folder that cannot be written. If the
function is in torch's caches, it needs none of these; the run's own code is mostly there then, too.
"""

from __future__ import annotations

import socket

import torch

from policies.compilation.layers import reason_of
from ranks.collectives import gather_to_all


def why_ranks_cannot_compile(device: torch.device) -> str | None:
    """Which rank cannot compile and why, as a clause about the first of them; None if all can.

    Every rank must call this; all get the same answer.

    Args:
        device: that this rank computes on.
    """
    # Gathered even if this rank can compile: all ranks compile, or none (docs/decisions.md, Compute).
    told = gather_to_all((socket.gethostname(), _why_not(device)))
    failed = [(rank, host, reason) for rank, (host, reason) in enumerate(told) if reason is not None]
    if not failed:
        return None
    (rank, host, reason), *others = failed
    more = f", nor can {len(others)} more of {len(told)}" if others else ""
    return f"rank {rank} on {host} cannot compile{more} ({reason})"


def _why_not(device: torch.device) -> str | None:
    try:
        torch.compile(_doubled)(torch.ones(2, device=device)).cpu()  # which waits for the kernel
    except Exception as error:  # any of the compiler's, of its tools and of the file system
        return reason_of(error)
    return None


def _doubled(numbers: torch.Tensor) -> torch.Tensor:
    return 2 * numbers
