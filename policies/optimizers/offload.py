"""Optimizer states in host memory and steps on the CPU, while the weights stay on the device.

After torchao's CPUOffloadOptimizer: each rank keeps a copy of its trained weights in host memory. A step copies the
gradients to the host, updates the copy there, and copies the weights back. The wrapped optimizer does the arithmetic.

| when                               | the device                     | a stream of copies       | a thread         |
|------------------------------------|--------------------------------|--------------------------|------------------|
| a gradient is final, in the last   | goes on with backward          | brings it to the host    | updates the copy |
| micro-batch's backward             |                                |                          |                  |
| step(), once the loss was read     | gets updated weights as the    | brings gradients that    | updates the rest |
|                                    | thread has them                | did not come before      |                  |

The first row needs gradients that nothing changes after backward. So with clipping, under fp16's loss scale and under
DistributedDataParallel, which reduces later, a step begins with the second row. Weights on the device change in step()
alone: if a loss or norm is not finite, they are those of the step before. The states and copies in host memory may be
those of the step by then, so the run ends, and saves neither.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from configs.fsdp import FsdpConfig
from policies.pinned_memory import Region, num_threads, region_maker
from ranks.environment import Environment
from utils.local_tensors import local_tensor, plain_tensor

BUCKET_BYTES = 2**28  # updated at once: large enough for all cores, small enough for copies to overlap with updates

REGION_BYTES = 2**30
"""Of host memory that is pinned at once, by one of several threads."""

ALIGNED = 64  # tensors start at multiples of this, as torch's own do


class CPUOffloadOptimizer(Optimizer):
    """Wraps an optimizer: same parameters, same interface, but its states are in host memory.

    `state` maps the model's parameters to the wrapped optimizer's own tensors, which are sharded like the parameter.
    So schedulers, the memory ledger and torch.distributed.checkpoint see nothing unusual.

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
        copies = TensorsOnHost(2 * parameters, self._device)
        self._copies = dict(zip(parameters, copies.tensors[: len(parameters)], strict=True))
        self._gradients = dict(zip(parameters, copies.tensors[len(parameters) :], strict=True))
        self._current: set[nn.Parameter] = set()  # parameters whose copies are up to date
        self._optimizer = make_optimizer(
            [group | {"params": [self._copies[parameter] for parameter in group["params"]]} for group in groups]
        )
        self._on_host = copies  # owns the memory
        self._arriving = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer")
        self._takes_gradients = False  # as backward makes them
        self._begun: dict[nn.Parameter, None] = {}  # in this step, in the order in which their gradients came
        self._bucket: list[nn.Parameter] = []  # the last of them, not given to the thread yet
        self._bucket_bytes = 0
        self._updates: list[tuple[list[nn.Parameter], Future[None]]] = []
        super().__init__(groups, self._optimizer.defaults)
        if begins_early:
            me = weakref.ref(self)  # a parameter must not own its optimizer
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(lambda parameter: _arrived(me(), parameter))

    @contextmanager
    def last_gradients(self) -> Iterator[None]:
        """A context for the backward pass after which the step's gradients are complete."""
        self._takes_gradients = True
        try:
            yield
        finally:
            self._takes_gradients = False

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Begin the update of a parameter whose gradient is final, together with others."""
        if self._takes_gradients and parameter.grad is not None:
            self._take(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. The last copies to the device may still run afterwards."""
        for parameter in self._copies:
            if parameter.grad is not None and parameter not in self._begun:
                self._take(parameter)
        self._begin_updates()
        updates, self._updates, self._begun = self._updates, [], {}
        for bucket, update in updates:
            update.result()
            for parameter in bucket:
                copy = self._copies[parameter]
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

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """Start to copy a gradient to the host, and begin to update its bucket once that is full."""
        if not self._begun:  # the thread is idle: every step waits for its updates
            self._pass_options(self.param_groups, self._optimizer.param_groups)
        self._begun[parameter] = None
        self._bucket.append(parameter)
        self._bucket_bytes += local_tensor(parameter).nbytes
        if self._bucket_bytes >= BUCKET_BYTES:
            self._begin_updates()

    def _begin_updates(self) -> None:
        if self._bucket:
            bucket, self._bucket, self._bucket_bytes = self._bucket, [], 0
            update = self._thread.submit(self._update, bucket, self._copy_down(bucket))
            self._updates.append((bucket, update))

    def _copy_down(self, bucket: list[nn.Parameter]) -> torch.cuda.Event | None:
        """Start to copy a bucket to the host; returns an event to wait for, or None if the copy is done."""
        if self._arriving is None:
            self._copy_tensors(bucket)
            return None
        # The current stream has made the gradients. It also did the last step's copies to the device, so once these
        # copies are there, `_copies` may change.
        self._arriving.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._arriving):
            self._copy_tensors(bucket)
        # step() waits for this, so gradients are not freed before.
        return self._arriving.record_event()

    def _copy_tensors(self, bucket: list[nn.Parameter]) -> None:
        for parameter in bucket:
            local_tensor(self._gradients[parameter]).copy_(local_tensor(parameter.grad), non_blocking=True)
            if parameter not in self._current:
                local_tensor(self._copies[parameter]).copy_(local_tensor(parameter), non_blocking=True)
                self._current.add(parameter)

    @torch.no_grad()
    def _update(self, bucket: list[nn.Parameter], arrival: torch.cuda.Event | None) -> None:
        """Step on the copies of a bucket. One thread does all, in order."""
        if arrival is not None:
            arrival.synchronize()
        # The wrapped optimizer skips parameters without a gradient: all but this bucket's.
        for parameter in bucket:
            self._copies[parameter].grad = self._gradients[parameter]
        self._optimizer.step()
        for parameter in bucket:
            self._copies[parameter].grad = None


def last_gradients(optimizer: Optimizer, *, is_last: bool) -> AbstractContextManager[None]:
    """A context for one micro-batch's backward, after which an optimizer on the CPU may have begun its step.

    Args:
        is_last: of its step.
    """
    return optimizer.last_gradients() if is_last and isinstance(optimizer, CPUOffloadOptimizer) else nullcontext()


def _arrived(optimizer: CPUOffloadOptimizer | None, parameter: nn.Parameter) -> None:
    if optimizer is not None:
        optimizer.gradient_arrived(parameter)


class TensorsOnHost:
    """Empty tensors like some parameters in host memory, sharded alike; pinned if these are on a GPU.

    They lie side by side in a few regions, so none is rounded up.
    """

    @torch.no_grad()
    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.tensors = [torch.empty_like(plain_tensor(parameter), device="cpu") for parameter in parameters]
        places, sizes = list[tuple[int, int]](), [0]
        for local in map(local_tensor, self.tensors):
            if sizes[-1] >= REGION_BYTES:
                sizes.append(0)
            places.append((len(sizes) - 1, sizes[-1]))
            sizes[-1] += -(-local.nbytes // ALIGNED) * ALIGNED
        with ThreadPoolExecutor(num_threads()) as executor:
            self._regions = [*executor.map(region_maker(device), (max(size, ALIGNED) for size in sizes))]
        weakref.finalize(self, _release, self._regions).atexit = False
        for tensor, (region, start) in zip(self.tensors, places, strict=True):
            local = local_tensor(tensor)
            storage = self._regions[region].memory.untyped_storage()
            local.set_(storage, start // local.element_size(), local.size(), local.stride())


def _release(regions: list[Region]) -> None:
    for region in regions:
        region.release()


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
