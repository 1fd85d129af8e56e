"""A plan's memory from the run's own step, traced: the real model, policies, loss, optimizer and collectives.

Tensors are fake (torch.\\_subclasses.fake_tensor) and the other ranks are, too (torch's fake process group), so nothing
computes and nothing is allocated. torch's own memory tracker (torch.distributed._tools) counts what is alive and whose.
The trace runs on a CPU mesh, where `fully_shard` takes the same steps as on a GPU. What it cannot see is taken from the
closed form: host memory, checkpoints, evaluation, and what CUDA keeps beside torch's allocator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from data.batches.fullest import BatchShape
from planning.cards import Card
from planning.memory.device_kernels import kernels_of_card
from planning.memory.memory_plan import MemoryPlan, Parts
from planning.memory.meta_batch import meta_batch
from planning.memory.meta_pass import DEFAULT_CAPABILITY
from planning.memory.row_lengths import RowLengths
from planning.planned_model import PlannedModel
from policies.attention.choice import BY_OFFSETS
from policies.loss_scaling import LossScaler
from policies.optimizers.build import build_optimizer
from policies.optimizers.kind import kind_of
from policies.sharding import shard
from policies.weights.tensor_names import shared_names
from utils.errors import in_one_line
from utils.units import GIB

CPU = torch.device("cpu")
MOST_MICRO_BATCHES = 2  # of a step; from the second on, all find the same

_IN_SLICES = ("anyprecision", "Adafactor")

TrainStep = Callable[..., Any]
"""`finetuning.train_step`."""


class NotTracedError(Exception):
    """The message says why the step cannot be traced, as a clause."""


def trace_memory(
    plan: MemoryPlan, planned: PlannedModel, card: Card, rows: RowLengths, train_step: TrainStep
) -> MemoryPlan:
    """The plan with the phases of a step as they were traced. The planned model is used up.

    Args:
        plan: of the closed form; what the trace cannot see stays as it is there.
        train_step: of the run.

    Raises:
        NotTracedError: if the trace cannot go through this run.
    """
    if obstacle := what_hinders_trace(planned):
        raise NotTracedError(obstacle)
    try:
        moments = _trace(planned, card, rows, train_step)
    except Exception as error:  # a model's own code may do anything, such as asking for a value
        raise NotTracedError(f"{planned.empty.architecture} cannot be traced ({in_one_line(error)})") from error
    return replace(
        plan,
        phases={**plan.phases, **{phase: moments[phase] for phase in ("forward", "backward", "optimizer_step")}},
        # The trace has the fullest micro-batch; that moment is planned for usual ones.
        after_forward_gib=moments["after_forward"].total if rows.is_alike else plan.after_forward_gib,
        made_by="trace",
    )


def what_hinders_trace(planned: PlannedModel) -> str | None:
    """Why the step cannot be traced; None if it may be."""
    config, policies = planned.config, planned.resolved.policies
    if policies.quantization is not None:
        return "the kernels of quantized weights need values"
    if policies.float8 is not None:
        return "layers in float8 are planned from their shapes alone"
    if config.train_config.compile:
        return "compiled layers keep other tensors than their code says"
    if config.fsdp_config.compile_optimizer:
        return "a compiled optimizer cannot step on tensors without values"
    if policies.layout.kind == "ddp":
        return "DistributedDataParallel reduces below what can be traced"
    offloads = policies.layout.cpu_offload or config.fsdp_config.optimizer_cpu_offload
    if offloads or config.train_config.activation_offloading:
        return "a trace cannot tell host memory from a device's"
    if kind_of(config.fsdp_config.optimizer).eight_bit:
        return "the kernels of 8-bit optimizers need values"
    if config.fsdp_config.optimizer in _IN_SLICES:
        return f"{config.fsdp_config.optimizer} updates in so many small slices that a trace takes minutes"
    return None


@dataclass
class _Tracked:
    """The fullest moments of each part of a step, by the names of torch's trackers, in bytes."""

    tracker: Any  # of torch

    def now(self) -> dict[str, int]:
        return self._of_cpu(self.tracker.get_tracker_snapshot("current"))

    def fullest(self) -> dict[str, int]:
        """Of the time since the last call."""
        found = self._of_cpu(self.tracker.get_tracker_snapshot("peak"))
        # The tracker has one peak for all that it sees.
        current = self.tracker.get_tracker_snapshot("current")
        self.tracker._peak_mem_snap = current
        self.tracker._peak_mem = {device: snapshot["Total"] for device, snapshot in current.items()}
        return found

    @staticmethod
    def _of_cpu(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
        return {getattr(name, "value", name): size for name, size in snapshot.get(CPU, {}).items()}


def _trace(planned: PlannedModel, card: Card, rows: RowLengths, train_step: TrainStep) -> dict[str, Parts]:
    """The parts at the fullest moment of each phase, and right after the first micro-batch's forward."""
    resolved, model, train = planned.resolved, planned.adapted.model, planned.config.train_config
    layout, precision = resolved.policies.layout, resolved.policies.precision
    num_micro_batches = min(MOST_MICRO_BATCHES, resolved.batches.gradient_accumulation_steps)
    with ExitStack() as stack:
        stack.enter_context(_fake_ranks(planned.env.world_size))
        shard(model, planned.adapted.units, layout, precision, CPU)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _to_cpu(model)
        model.train()
        optimizer = build_optimizer(model, train, planned.config.fsdp_config)
        batch = _fake_batch(planned, rows, rows.fullest)

        def step(on_phase: Callable[[str], None], batch: Any = batch) -> None:
            trainable = SimpleNamespace(  # as `preparation.building.Trainable`
                model=model,
                optimizer=optimizer,
                scaler=LossScaler(active=precision.scales_loss),
                summed_loss=resolved.task.summed_loss,
                accumulation=planned.accumulation,
                max_norm=train.gradient_clipping_threshold if train.gradient_clipping else None,
            )
            batches = [batch] * num_micro_batches
            train_step(trainable, batches, 1.0, CPU, planned.env.world_size, on_phase)

        stack.enter_context(_Answers())
        if "selective" not in planned.empty.checkpointing.modes:  # which looks for torch's own attention, by its name
            capability = card.compute_capability or DEFAULT_CAPABILITY
            stack.enter_context(kernels_of_card(capability, answer=rows.packed))
        # A first step makes the optimizer's states. Tracked, its temporaries would count as states. And sharded
        # parameters learn the shapes of an operator's results from whole tensors, once: so a second update.
        step(lambda phase: None)
        _update_again(optimizer)
        tracked = _Tracked(_tracker(model, optimizer))
        stack.enter_context(tracked.tracker)
        moments = _record(tracked, step)
        for shape in rows.first:
            of_first = _record(tracked, partial(step, batch=_fake_batch(planned, rows, shape)))
            for phase in ("forward", "backward"):  # the optimizer makes its states behind them
                moment = replace(of_first[phase], optimizer=0.0)
                moments[phase] = max(moments[phase], moment, key=lambda parts: parts.total)
        return moments


def _to_cpu(model: nn.Module) -> None:
    """Move a model from the meta device; tied weights stay tied, which `to_empty` gives a tensor each."""
    shared = [names for names in shared_names(model) if len(names) > 1]
    model.to_empty(device=CPU)
    for first, *others in shared:
        for name in others:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, model.get_parameter(first))


def _fake_batch(planned: PlannedModel, rows: RowLengths, shape: BatchShape) -> Any:
    """A micro-batch of the run, of fake tensors."""
    batch = meta_batch(
        planned.resolved,
        *shape,
        label_share=rows.label_share,
        packed=rows.packed,
        by_offsets=planned.empty.attention == BY_OFFSETS,
    )

    def on_cpu(value: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device=CPU), value)

    return replace(batch, **{field.name: on_cpu(getattr(batch, field.name)) for field in fields(batch)})


def _update_again(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _tracker(model: nn.Module, optimizer: Optimizer) -> Any:
    tracker: Any
    if isinstance(model, FSDPModule):
        tracker = FSDPMemTracker(model, optimizer)
    else:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)

        def is_gradient(parameter: torch.Tensor) -> None:
            tracker._update_and_maybe_create_winfos(parameter.grad, _MemRefType.GRAD)

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(is_gradient)
    tracker._mod_tracker = _NoModules()
    return tracker


class _NoModules:
    """Stands in for torch's tracking of single modules, which a plan does not need.

    That one fails at frozen parameters, and at losses whose backward runs inside forward (`policies.loss.summed_loss`).
    """

    def __init__(self) -> None:
        self.parents: set[str] = set()
        self.is_bw = False  # whether what is new belongs to backward

    def get_known_fqn(self, module: nn.Module) -> str:
        return type(module).__name__

    def register_user_hooks(self, *hooks: Any) -> None: ...
    def clear_user_hooks(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *args: Any) -> None: ...


def _record(tracked: _Tracked, step: Callable[[Callable[[str], None]], None]) -> dict[str, Parts]:
    """The parts of one step. What only passes by is told from what stays by looking before and after."""
    fullest: dict[str, dict[str, int]] = {}
    now: dict[str, dict[str, int]] = {}

    def on_phase(phase: str) -> None:
        now[phase], fullest[phase] = tracked.now(), tracked.fullest()
        tracked.tracker._mod_tracker.is_bw = phase == "after_forward"

    step(on_phase)
    states = now["before_forward"].get("OptState", 0) or now["before_forward"].get("Optstate", 0)
    kept = now["after_forward"].get("Activation", 0)

    def parts(found: dict[str, int]) -> Parts:
        sizes = {part: sum(found.get(name, 0) for name in names) for part, names in _NAMES.items()}
        for part, most in (("optimizer", states), ("activations", kept)):
            sizes["temporaries"] += max(0, sizes[part] - most)
            sizes[part] = min(sizes[part], most)
        return Parts(**{part: size / GIB for part, size in sizes.items()})

    return {
        "after_forward": parts(now["after_forward"]),
        "forward": parts(fullest["after_forward"]),
        "backward": parts(fullest["after_backward"]),
        "optimizer_step": parts(fullest["after_optimizer_step"]),
    }


_NAMES = {
    "params": ("Sharded Param", "Parameter", "Buffer"),
    "grads": ("Sharded Grad", "Gradient"),
    "optimizer": ("OptState", "Optstate"),
    "activations": ("Activation", "Inputs"),
    "unsharded": ("Unsharded Param", "Unsharded Grad"),
    "communication": ("All Gather", "Reduce Scatter"),
    "temporaries": ("Temp", "Other"),
}
"""The parts of a plan by the names of torch's two trackers."""


class _Answers(TorchDispatchMode):
    """Answers code that asks for a value: every number is 1, and so finite; every condition holds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **kwargs or {})


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    """A process group whose other ranks are not there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
