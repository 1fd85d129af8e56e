"""Optimizer states in host memory and steps on the CPU, while the weights stay on the device.

After torchao's CPUOffloadOptimizer: each rank keeps a copy of its trained weights in host memory. A step copies the
gradients to the host, updates the copy there, and copies the weights back. The wrapped optimizer does the arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from configs.fsdp import FsdpConfig
from ranks.environment import Environment
from utils.local_tensors import local_tensor, plain_tensor

BUCKET_BYTES = 2**28  # updated at once: large enough for all cores, small enough for copies to overlap with updates


class CPUOffloadOptimizer(Optimizer):
    """Wraps an optimizer: same parameters, same interface, but its states are in host memory.

    `state` maps the model's parameters to the wrapped optimizer's own tensors, which are sharded like the parameter.
    So schedulers, the memory ledger and torch.distributed.checkpoint see nothing unusual.

    The copies have the parameters' dtype. A copy is taken at a parameter's first step, and at its first step after
    `load_state_dict`. So weights may be loaded before or after the states, but must not change between two steps.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], make_optimizer: Callable[[list[dict[str, Any]]], Optimizer]
    ) -> None:
        groups = list(groups)
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._copies = {parameter: _empty_on_host(parameter) for parameter in parameters}
        self._gradients = {parameter: _empty_on_host(parameter) for parameter in parameters}
        self._current: set[nn.Parameter] = set()  # parameters whose copies are up to date
        self._optimizer = make_optimizer(
            [group | {"params": [self._copies[parameter] for parameter in group["params"]]} for group in groups]
        )
        super().__init__(groups, self._optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. The last copies to the device may still run afterwards."""
        self._pass_options(self.param_groups, self._optimizer.param_groups)
        # All copies are started before the first update, so that they overlap with the CPU's work.
        arrivals = [(bucket, self._copy_down(bucket)) for bucket in self._buckets()]
        for bucket, arrival in arrivals:
            # This also ends the last step's copies to the device, which were queued before: `_copies` may change now.
            if arrival is not None:
                arrival.synchronize()
            # The wrapped optimizer skips parameters without a gradient: all but this bucket's.
            for parameter in bucket:
                self._copies[parameter].grad = self._gradients[parameter]
            self._optimizer.step()
            for parameter in bucket:
                copy = self._copies[parameter]
                copy.grad = None
                local_tensor(parameter).copy_(local_tensor(copy), non_blocking=True)
                if copy in self._optimizer.state:
                    self.state[parameter] = self._optimizer.state[copy]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load through the wrapped optimizer, which puts states where its parameters are: in host memory."""
        self._optimizer.load_state_dict(state_dict)
        self._pass_options(self._optimizer.param_groups, self.param_groups)
        states = self._optimizer.state
        self.state.clear()
        self.state.update({parameter: states[copy] for parameter, copy in self._copies.items() if copy in states})
        # Weights may have been loaded meanwhile: the copies are taken anew at the next step.
        self._current.clear()

    @staticmethod
    def _pass_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for ours, theirs in zip(source, target, strict=True):
            theirs.update({name: value for name, value in ours.items() if name != "params"})

    def _copy_down(self, bucket: list[nn.Parameter]) -> torch.cuda.Event | None:
        """Start to copy a bucket to the host; returns an event to wait for, or None if the copy is done."""
        for parameter in bucket:
            local_tensor(self._gradients[parameter]).copy_(local_tensor(parameter.grad), non_blocking=True)
            if parameter not in self._current:
                local_tensor(self._copies[parameter]).copy_(local_tensor(parameter), non_blocking=True)
                self._current.add(parameter)
        device = local_tensor(bucket[0]).device
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """The parameters that have a gradient, about BUCKET_BYTES at a time."""
        bucket: list[nn.Parameter] = []
        num_bytes = 0
        for parameter in self._copies:
            if parameter.grad is None:
                continue
            bucket.append(parameter)
            num_bytes += local_tensor(parameter).nbytes
            if num_bytes >= BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
        if bucket:
            yield bucket


@torch.no_grad()
def _empty_on_host(parameter: nn.Parameter) -> torch.Tensor:
    """An empty tensor like `parameter` in host memory, sharded alike; pinned if the parameter is on a GPU."""
    pins = local_tensor(parameter).device.type == "cuda"
    return torch.empty_like(plain_tensor(parameter), device="cpu", pin_memory=pins)


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
