"""Where the sharded gradients of `fully_shard` lie: in memory of the stream that computes.

torch's allocator keeps memory apart for each stream, also once it is free. `fully_shard` allocates the sums of
gradients on the stream that reduces them. They live from backward to the optimizer's step, when what the layers kept
is free again, but that is memory of the stream that computes. So a device holds both at once: for an 8B model in bf16
on two GPUs 7.5 GiB more than is ever used, and where those are not there, the allocator frees its cache in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from utils.compat import reduce_scatter


class ReduceScatterIntoComputing:
    """torch's reduce-scatter of a unit, with its output in memory of the stream that computes."""

    def __init__(self, computing: torch.cuda.Stream) -> None:
        self.computing = computing

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Called on the computing stream for the input, and on the stream that reduces for the output.

        That stream has waited for computing by then, so nothing that was queued before still uses the memory. But under
        --deterministic torch fills new memory with NaN, on the stream that it is allocated for: it waits for that, too.
        When the output is freed, the allocator waits for the stream that reduces before it gives the memory to another
        tensor.
        """
        reducing = torch.cuda.current_stream(device)
        with torch.cuda.stream(self.computing):
            memory = torch.empty(*size, dtype=dtype, device=device)
        if reducing != self.computing:
            reducing.wait_stream(self.computing)
            memory.record_stream(reducing)
        return memory

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return reduce_scatter(output_tensor, input_tensor, group, op=op, async_op=async_op)


def keep_gradients_with_computing(unit: FSDPModule, device: torch.device) -> None:
    """Let a unit's gradients be reduced into memory of the stream that computes, which is the current one.

    Not if copies of the model are summed, too: another stream does that.
    """
    if device.type == "cuda":
        comm: Any = ReduceScatterIntoComputing(torch.cuda.current_stream(device))
        unit.set_custom_reduce_scatter(comm)
