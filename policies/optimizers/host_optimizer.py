"""The base of optimizers whose states are in host memory and whose steps are made there, beside the device's work."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from policies.optimizers.host_updates import Bucket, HostUpdates
from policies.wrapping import outermost
from utils.local_tensors import local_tensor
from utils.torch_internals import gathering_stream

BUCKET_BYTES = 2**28  # updated at once: large enough for all cores, small enough for copies to overlap with updates


class HostOptimizer(Optimizer, ABC):
    """Wraps an optimizer: same parameters, same interface, but its states are in host memory.

    `state` maps the model's parameters to the wrapped optimizer's own tensors, which are sharded like the parameter.
    So schedulers, the memory ledger and torch.distributed.checkpoint see nothing unusual.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        make_optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        copies: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """
        Args:
            copies: of all parameters, in host memory; the wrapped optimizer updates these.
        """
        self._copies = copies
        self._optimizer = make_optimizer([group | {"params": [copies[p] for p in group["params"]]} for group in groups])
        self._updates = HostUpdates()
        self._takes_gradients = False  # as backward makes them
        self._begun: dict[nn.Parameter, None] = {}  # in this step, in the order in which their gradients came
        self._bucket: list[nn.Parameter] = []  # the last of them, not given to the thread yet
        self._bucket_bytes = 0
        self._pending: dict[nn.Parameter, Bucket] = {}  # parameters that may not be what their last update made them
        self._places: dict[nn.Parameter, int] = {}  # in a forward pass, of the first module that needs them
        self._model: weakref.ref[nn.Module] | None = None  # its modules wait for their weights
        self._has_stepped = False
        super().__init__(groups, self._optimizer.defaults)

    @contextmanager
    def last_gradients(self) -> Iterator[None]:
        """A context for the backward pass after which the step's gradients are complete."""
        self._takes_gradients = True
        try:
            yield
        finally:
            self._takes_gradients = False

    def return_late(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Let steps end while weights are still updated: the next forward pass of each layer waits for its own.

        All other weights are waited for when the model's forward begins. A sharded model's units wait instead of its
        layers, since they gather weights. Readers outside of a forward pass call `settle`.

        Args:
            layers: of the model, sharded or compiled already.
        """
        me, self._model = weakref.ref(self), weakref.ref(model)
        for place, (module, read) in enumerate(_readers(model, layers)):
            if parameters := [parameter for parameter in read if parameter in self._copies]:
                self._places = dict.fromkeys(parameters, place) | self._places
                _before_each_call(module, partial(_wait_for, me, parameters))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. Their updates may still run afterwards (`return_late`)."""
        # In the order in which forward needs them.
        for parameter in sorted(self._copies, key=self._place):
            if parameter.grad is not None:
                self.take(parameter)
        self._begin_update()
        self._begun = {}
        self.before_return()
        self._updates.decide(self)
        # A hook of the step reads weights. Who looks at states after the first step finds all of them.
        if self._model is None or not self._has_stepped or self._optimizer_step_post_hooks:
            self.settle()
        self._has_stepped = True

    def undo_step(self) -> None:
        """Leave out the step that was begun in backward. Weights are those before it; states may not be."""
        self._bucket, self._bucket_bytes, self._begun, self._pending = [], 0, {}, {}
        for bucket in self._updates.drop():
            self.restore(bucket)

    def settle(self) -> None:
        """Wait until all weights are what their last step made them, or will be for what this stream does next."""
        self.wait_for(list(self._pending))

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for these. In backward they are those of the step before, for who reads them needs these."""
        if not (self._pending and self._updates.is_decided):
            return
        buckets = {id(bucket): bucket for p in parameters if (bucket := self._pending.get(p)) is not None}
        for bucket in buckets.values():
            self._let_readers_wait(bucket.returned.result())
            for parameter in bucket.parameters:
                del self._pending[parameter]
                if (copy := self._copies[parameter]) in self._optimizer.state:
                    self.state[parameter] = self._optimizer.state[copy]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load through the wrapped optimizer, which puts states where its parameters are: in host memory."""
        self.settle()
        self._optimizer.load_state_dict(state_dict)
        _pass_options(self._optimizer.param_groups, self.param_groups)
        states = self._optimizer.state
        self.state.clear()
        self.state.update({parameter: states[copy] for parameter, copy in self._copies.items() if copy in states})

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """The parameter's gradient is final: begin its update, once there are enough for a bucket."""
        if parameter in self._begun:
            return
        if not self._begun:
            self.settle()  # weights that no forward pass has waited for
            self._updates.begin_step()
            _pass_options(self.param_groups, self._optimizer.param_groups)  # the thread is idle
        self._begun[parameter] = None
        self._bucket.append(parameter)
        self._bucket_bytes += local_tensor(parameter).nbytes
        if self._bucket_bytes >= BUCKET_BYTES:
            self._begin_update()

    @abstractmethod
    def arrival(self, parameters: list[nn.Parameter]) -> torch.cuda.Event | None:
        """Bring gradients to the host; returns the end of that, or None if they are there."""

    def measure(self, bucket: Bucket) -> None:
        """As of `host_updates.HostWork`."""

    @abstractmethod
    def update(self, bucket: Bucket) -> None:
        """As of `host_updates.HostWork`."""

    def before_return(self) -> None:
        """Called before the first weights of a step return."""

    def give_back(self, bucket: Bucket) -> torch.cuda.Event | None:
        """As of `host_updates.HostWork`."""
        return None

    def restore(self, bucket: Bucket) -> None:
        """Weights, as far as they were changed before the step was decided, become what they were."""

    def _place(self, parameter: nn.Parameter) -> int:
        return self._places.get(parameter, 0)

    def _begin_update(self) -> None:
        if self._bucket:
            parameters, self._bucket, self._bucket_bytes = self._bucket, [], 0
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            place = min(map(self._place, parameters))
            bucket = Bucket(parameters, gradients, place, self.arrival(parameters))
            self._pending |= dict.fromkeys(parameters, bucket)
            self._updates.add(bucket, self)

    def _let_readers_wait(self, event: torch.cuda.Event | None) -> None:
        if event is None:
            return
        model = self._model() if self._model is not None else None
        # `fully_shard` reads a layer's weights on a stream of its own.
        device = local_tensor(next(iter(self._copies))).device
        streams = [torch.cuda.current_stream(device), None if model is None else gathering_stream(model)]
        for stream in streams:
            if stream is not None:
                stream.wait_event(event)


def last_gradients(optimizer: Optimizer, *, is_last: bool) -> AbstractContextManager[None]:
    """A context for one micro-batch's backward, after which an optimizer on the CPU may have begun its step.

    Args:
        is_last: of its step.
    """
    return optimizer.last_gradients() if is_last and isinstance(optimizer, HostOptimizer) else nullcontext()


def undo_step(optimizer: Optimizer) -> None:
    """Leave out a step that an optimizer on the CPU may have begun: weights are those before it."""
    if isinstance(optimizer, HostOptimizer):
        optimizer.undo_step()


def wait_for_weights(optimizer: Optimizer) -> None:
    """Call this before weights or states are read by anything but a forward pass of the model."""
    if isinstance(optimizer, HostOptimizer):
        optimizer.settle()


def _pass_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(source, target, strict=True):
        theirs.update({name: value for name, value in ours.items() if name != "params"})


def _readers(model: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The modules whose forward passes read parameters first, in their order, each with the parameters it reads."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if units:  # a parameter is in the innermost one, which comes last
        unit_of = {parameter: unit for unit in units for parameter in unit.parameters()}
        return [(unit, [parameter for parameter in unit_of if unit_of[parameter] is unit]) for unit in units]
    whole = outermost(layers)
    inside = {id(module) for layer in whole for module in layer.modules()}
    outside = [p for module in model.modules() if id(module) not in inside for p in module.parameters(recurse=False)]
    return [(model, outside), *((layer, list(layer.parameters())) for layer in whole)]


def _wait_for(optimizer: weakref.ref[HostOptimizer], parameters: Sequence[nn.Parameter]) -> None:
    if (alive := optimizer()) is not None:
        alive.wait_for(parameters)


def _before_each_call(module: nn.Module, act: Callable[[], None]) -> None:
    """Do this before each forward pass, and before `fully_shard` gathers the module's weights for it."""
    compiled: Any = module._compiled_call_impl
    if compiled is None:
        module.register_forward_pre_hook(lambda *_: act(), prepend=True)
        return

    def call(*args: Any, **kwargs: Any) -> Any:  # a hook would be compiled, too
        act()
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call
