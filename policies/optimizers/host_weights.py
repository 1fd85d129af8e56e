"""Steps in backward on weights that live in host memory themselves (`--fsdp_cpu_offload`).

| when                              | the device              | `fully_shard`'s streams  | a thread                   |
|-----------------------------------|-------------------------|--------------------------|----------------------------|
| a unit's gradients are summed, in | goes on with backward   | bring them to the host   | measures them, updates the |
| the last micro-batch's backward   |                         |                          | weights, keeps old ones    |
| step(), once the loss was read,   | begins the next forward | gather a unit once its   | updates the rest, by the   |
| and after it                      |                         | weights are updated      | order of forward           |

A unit's weights may change once its gradients have come: backward is through with them. Until the loss is known to be
finite the weights of the step before must not be lost. They are written over their gradients, which are not needed
after the update. So the norms of gradients are taken first, and no memory is needed beyond that of one bucket.

Under clipping and fp16's loss scale the step begins after backward, and `step()` still ends before its updates do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from policies.optimizers.host_optimizer import HostOptimizer
from policies.optimizers.host_updates import Bucket
from utils.local_tensors import local_tensor, plain_tensor
from utils.torch_internals import all_parameter_groups, call_after_reduction


class HostWeightsOptimizer(HostOptimizer):
    """A `HostOptimizer` of parameters in host memory. The wrapped optimizer updates them in place.

    Attributes:
        grad_scale: what the next step divides gradients by (`policies.clipping`); None: nothing.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], make_optimizer: Callable[[list[dict[str, Any]]], Optimizer]
    ) -> None:
        groups = list(groups)
        parameters = [parameter for group in groups for parameter in group["params"]]
        self.grad_scale: torch.Tensor | None = None
        self._before = torch.empty(0, dtype=torch.uint8)  # the weights of one bucket before their update
        self._event: torch.cuda.Event | None = None  # the arrival of the gradients that are taken now
        self._begins_early = False
        super().__init__(groups, make_optimizer, {parameter: _same_memory(parameter) for parameter in parameters})

    def begin_early(self, model: nn.Module) -> None:
        """Step on each unit of `fully_shard` as its gradients come: nothing changes them after backward."""
        self._begins_early = True
        arrived = partial(_arrived, weakref.ref(self))
        for group in all_parameter_groups(model):
            call_after_reduction(group, arrived)

    def gradients_arrive(self, parameters: list[nn.Parameter], event: torch.cuda.Event | None) -> None:
        """Begin the update of a unit's parameters; after the event their gradients are in host memory."""
        if not self._takes_gradients:
            return
        self._event = event
        for parameter in parameters:
            if parameter.grad is not None and parameter in self._copies:
                self.take(parameter)
        self._begin_update()
        self._event = None

    def gradient_norms(self) -> list[torch.Tensor] | None:
        """The 2-norms of this rank's parts of all gradients, in fp32, after backward; None if steps do not begin in it.

        Gradients may be overwritten by then. All are measured before the next update.
        """
        if not self._begins_early:
            return None
        for parameter in self._copies:
            if parameter.grad is not None:
                self.take(parameter)
        self._begin_update()
        self._updates.measure_first()
        norms = dict[nn.Parameter, torch.Tensor]()
        for bucket in {id(bucket): bucket for bucket in self._pending.values()}.values():
            norms.update(zip(bucket.parameters, bucket.norms.result(), strict=True))
        return [norms[parameter] for parameter in self._copies if parameter in norms]

    def arrival(self, parameters: list[nn.Parameter]) -> torch.cuda.Event | None:
        return self._event

    @torch.no_grad()
    def measure(self, bucket: Bucket) -> None:
        if self._begins_early and not bucket.norms.done():
            bucket.wait_for_gradients()
            gradients = [local_tensor(gradient) for gradient in bucket.gradients]
            # As policies.clipping takes them.
            bucket.norms.set_result(list(torch._foreach_norm(gradients, 2, dtype=torch.float32)))

    @torch.no_grad()
    def update(self, bucket: Bucket) -> None:
        self.measure(bucket)
        before = None if self._updates.is_decided else self._kept(bucket.parameters)
        self._divide(bucket.gradients)
        for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
            _refer(self._copies[parameter], parameter)  # `fully_shard` may have pinned the weights elsewhere
            self._copies[parameter].grad = gradient
        self._optimizer.step()
        for parameter in bucket.parameters:
            self._copies[parameter].grad = None
        for gradient, weights in zip(bucket.gradients, before or (), strict=before is not None):
            local_tensor(gradient).copy_(weights)
        if before is None:
            bucket.gradients.clear()

    @torch.no_grad()
    def restore(self, bucket: Bucket) -> None:
        for parameter, before in zip(bucket.parameters, bucket.gradients, strict=True):
            local_tensor(parameter).copy_(local_tensor(before))

    def give_back(self, bucket: Bucket) -> None:
        bucket.gradients.clear()

    def _kept(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """Copies of the weights, in memory that is used again for the next bucket."""
        weights = [local_tensor(parameter) for parameter in parameters]
        sizes = [-(-tensor.nbytes // 64) * 64 for tensor in weights]
        if sum(sizes) > len(self._before):
            self._before = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = self._before[: sum(sizes)].split(sizes)
        kept = [part[: w.nbytes].view(w.dtype).view(w.shape) for part, w in zip(parts, weights, strict=True)]
        for copy, tensor in zip(kept, weights, strict=True):
            copy.copy_(tensor)
        return kept

    def _divide(self, gradients: list[torch.Tensor]) -> None:
        if getattr(self._optimizer, "_step_supports_amp_scaling", False):  # in its own pass over them
            self._optimizer.grad_scale = self.grad_scale  # type: ignore[attr-defined]
        elif self.grad_scale is not None:
            torch._foreach_div_([local_tensor(gradient) for gradient in gradients], self.grad_scale)


@torch.no_grad()
def _same_memory(parameter: nn.Parameter) -> torch.Tensor:
    """A tensor that shares the parameter's memory and sharding, but has a gradient of its own."""
    copy = torch.empty_like(plain_tensor(parameter))
    _refer(copy, parameter)
    return copy


def _refer(copy: torch.Tensor, parameter: nn.Parameter) -> None:
    own, local = local_tensor(copy), local_tensor(parameter).detach()
    own.set_(local.untyped_storage(), local.storage_offset(), local.size(), local.stride())


def _arrived(
    optimizer: weakref.ref[HostWeightsOptimizer], parameters: list[nn.Parameter], event: torch.cuda.Event | None
) -> None:
    if (alive := optimizer()) is not None:
        alive.gradients_arrive(parameters, event)
