"""Optimizer states in host memory and steps on the CPU, while the weights stay on the device.

After torchao's CPUOffloadOptimizer: each rank keeps a copy of its trained weights in host memory. A step copies the
gradients to the host, updates the copy there, and copies the weights back. The wrapped optimizer does the arithmetic.

| when                               | the device                     | streams of copies        | a thread         |
|------------------------------------|--------------------------------|--------------------------|------------------|
| a gradient is final, in the last   | goes on with backward          | bring it to the host     | updates the copy |
| micro-batch's backward             |                                |                          |                  |
| step(), once the loss was read,    | begins the next forward; each  | bring gradients that did | updates the      |
| and after it                       | layer waits for its own        | not come before, and     | rest, by the     |
|                                    | weights                        | updated weights back     | order of forward |

The first row needs gradients that nothing changes after backward. So with clipping, under fp16's loss scale and under
DistributedDataParallel, which reduces later, a step begins with the second row. Weights on the device do not change
before step(): if a loss or norm is not finite, they are those of the step before. The states and copies in host memory
may be those of the step by then, so the run ends, and saves neither.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from configs.fsdp import FsdpConfig
from policies.optimizers.host_optimizer import HostOptimizer
from policies.optimizers.host_updates import Bucket
from policies.pinned_memory import TensorsOnHost, region_maker
from ranks.environment import Environment
from utils.local_tensors import local_tensor


class CPUOffloadOptimizer(HostOptimizer):
    """A `HostOptimizer` of weights on a device.

    The copies have the parameters' dtype. A copy is taken at a parameter's first step, and at its first step after
    `load_state_dict`. So weights may be loaded before or after the states, but must not change between two steps.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        make_optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        begins_early: bool = False,
    ) -> None:
        """
        Args:
            begins_early: gradients are final when backward has made them, so each is stepped on then.
        """
        groups = list(groups)
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._device = local_tensor(parameters[0]).device
        copies = TensorsOnHost(2 * parameters, region_maker(self._device))
        self._gradients = dict(zip(parameters, copies.tensors[len(parameters) :], strict=True))
        self._current: set[nn.Parameter] = set()  # parameters whose copies are up to date
        self._on_host = copies  # owns the memory
        is_cuda = self._device.type == "cuda"
        self._arriving = torch.cuda.Stream(self._device) if is_cuda else None
        self._returning = torch.cuda.Stream(self._device) if is_cuda else None
        super().__init__(groups, make_optimizer, dict(zip(parameters, copies.tensors[: len(parameters)], strict=True)))
        if begins_early:
            me = weakref.ref(self)  # a parameter must not own its optimizer
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(lambda parameter: _arrived(me(), parameter))

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Begin the update of a parameter whose gradient is final, together with others."""
        if self._takes_gradients and parameter.grad is not None:
            self.take(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # Weights may have been loaded meanwhile: the copies are taken anew at the next step.
        self._current.clear()

    def arrival(self, parameters: list[nn.Parameter]) -> torch.cuda.Event | None:
        """Start to copy gradients to the host; returns an event to wait for, or None if the copy is done."""
        if self._arriving is None or self._returning is None:
            self._copy_tensors(parameters)
            return None
        # The current stream has made the gradients, and the other one has read `_copies`, which may change then.
        self._arriving.wait_stream(torch.cuda.current_stream(self._device))
        self._arriving.wait_stream(self._returning)
        with torch.cuda.stream(self._arriving):
            self._copy_tensors(parameters)
        # The bucket holds the gradients until then, so their memory is not used again before.
        return self._arriving.record_event()

    def _copy_tensors(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            local_tensor(self._gradients[parameter]).copy_(local_tensor(parameter.grad), non_blocking=True)
            if parameter not in self._current:
                local_tensor(self._copies[parameter]).copy_(local_tensor(parameter), non_blocking=True)
                self._current.add(parameter)

    @torch.no_grad()
    def update(self, bucket: Bucket) -> None:
        """Step on the copies of a bucket."""
        bucket.wait_for_gradients()
        bucket.gradients.clear()  # on the device
        # The wrapped optimizer skips parameters without a gradient: all but this bucket's.
        for parameter in bucket.parameters:
            self._copies[parameter].grad = self._gradients[parameter]
        self._optimizer.step()
        for parameter in bucket.parameters:
            self._copies[parameter].grad = None

    def before_return(self) -> None:
        if self._returning is not None:  # what reads the weights of the step before is queued
            self._returning.wait_stream(torch.cuda.current_stream(self._device))

    @torch.no_grad()
    def give_back(self, bucket: Bucket) -> torch.cuda.Event | None:
        """Start to copy updated weights to the device."""
        with torch.cuda.stream(self._returning):  # None: no stream
            for parameter in bucket.parameters:
                local_tensor(parameter).copy_(local_tensor(self._copies[parameter]), non_blocking=True)
        return None if self._returning is None else self._returning.record_event()


def _arrived(optimizer: CPUOffloadOptimizer | None, parameter: nn.Parameter) -> None:
    if optimizer is not None:
        optimizer.gradient_arrived(parameter)


def share_out_cores(fsdp: FsdpConfig, env: Environment) -> list[str]:
    """Let steps on the CPU use this process's share of the cores: torchrun gives each process one thread.

    Nothing changes if the user chose a number of threads, or if the whole run is on the CPU.

    Returns:
        Lines to print.
    """
    steps_on_cpu = fsdp.fsdp_cpu_offload or fsdp.optimizer_cpu_offload
    if not steps_on_cpu or env.device.type == "cpu" or torch.get_num_threads() > 1:
        return []
    num_threads = max(1, len(os.sched_getaffinity(0)) // env.local_world_size)
    torch.set_num_threads(num_threads)
    return [f"OMP_NUM_THREADS: {num_threads} per process instead of 1, for optimizer steps on the CPU"]
