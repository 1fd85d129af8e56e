"""Optimizer states in host memory, and the step on the CPU, while the weights stay on the device.

After torchao's CPUOffloadOptimizer: each rank has a copy of the weights that it trains in host memory. A step copies
the gradients down, steps there, and copies the weights up. The arithmetic is the wrapped optimizer's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from configs.run import RunConfig
from utils.distributed import local_tensor
from utils.environment import Environment

BUCKET_BYTES = 2**28  # stepped on at once: large enough for all cores, small enough for copies to run beside steps


class CPUOffloadOptimizer(Optimizer):
    """Looks like the optimizer that it wraps, over the same parameters; only its states are elsewhere.

    `state` holds the wrapped optimizer's own tensors (in host memory, sharded where the parameter is) by the model's
    parameters, so that schedulers, the memory ledger and torch.distributed.checkpoint see nothing unusual.

    The copies have the parameters' dtype. They are taken at a parameter's first step, and its first after
    `load_state_dict`: weights may be loaded before or after the states, but not changed between two steps.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], make_optimizer: Callable[[list[dict[str, Any]]], Optimizer]
    ) -> None:
        groups = list(groups)
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._copies = {parameter: _empty_on_host(parameter) for parameter in parameters}
        self._gradients = {parameter: _empty_on_host(parameter) for parameter in parameters}
        self._current: set[nn.Parameter] = set()  # whose copies are what the parameter is
        self._optimizer = make_optimizer(
            [group | {"params": [self._copies[parameter] for parameter in group["params"]]} for group in groups]
        )
        super().__init__(groups, self._optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step on all parameters that have a gradient; the last weights may still be on their way up afterwards."""
        self._pass_options(self.param_groups, self._optimizer.param_groups)
        # All of it is on its way before the first bucket is stepped on: the device copies beside the CPU's work.
        arrivals = [(bucket, self._copy_down(bucket)) for bucket in self._buckets()]
        for bucket, arrival in arrivals:
            if arrival is not None:
                arrival.synchronize()
            # What has no gradient is left out by the wrapped optimizer: all but this bucket.
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
        """As that of the wrapped optimizer, which puts states where its own parameters are: in host memory."""
        self._optimizer.load_state_dict(state_dict)
        self._pass_options(self._optimizer.param_groups, self.param_groups)
        states = self._optimizer.state
        self.state.clear()
        self.state.update({parameter: states[copy] for parameter, copy in self._copies.items() if copy in states})
        self._current.clear()

    @staticmethod
    def _pass_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for ours, theirs in zip(source, target, strict=True):
            theirs.update({name: value for name, value in ours.items() if name != "params"})

    def _copy_down(self, bucket: list[nn.Parameter]) -> torch.cuda.Event | None:
        """Start to copy a bucket to the host; returns what tells that it is there (None: it is)."""
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
    """Room in host memory for such a tensor, sharded as it is; pinned where a GPU copies to it and from it."""
    return torch.empty_like(parameter, device="cpu", pin_memory=local_tensor(parameter).device.type == "cuda")


def share_out_cores(config: RunConfig, env: Environment) -> list[str]:
    """Let steps on the CPU use this process's share of the cores: torchrun gives a process one thread.

    Returns:
        Lines to print.
    """
    steps_on_cpu = config.fsdp_config.fsdp_cpu_offload or config.fsdp_config.optimizer_cpu_offload
    if not steps_on_cpu or env.device.type == "cpu" or torch.get_num_threads() > 1:
        return []  # a number other than torchrun's was asked for, or all that runs is on the CPU anyway
    num_threads = max(1, len(os.sched_getaffinity(0)) // env.local_world_size)
    torch.set_num_threads(num_threads)
    return [f"OMP_NUM_THREADS: {num_threads} per process instead of 1, for optimizer steps on the CPU"]
