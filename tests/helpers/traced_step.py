"""An oracle for plans: the memory of a run's own step, traced; it shares no code with the closed form.

The step is real: model, policies, loss, optimizer, collectives and `finetuning.train_step`. Tensors are fake
(torch.\\_subclasses.fake_tensor) and so are the other ranks (torch's fake process group): nothing computes, nothing is
allocated. torch's own memory tracker (torch.distributed._tools) counts the bytes alive, by owner. The trace runs on a
CPU mesh, where `fully_shard` takes the same steps as on a GPU.

It cannot follow kernels that need values (packed weights, 8-bit optimizers), compiled code, DistributedDataParallel,
which reduces in C++, or offloading: host and device memory look alike here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from finetuning import train_step
from planning.memory.device_kernels import KernelsOfCard
from planning.memory.memory_plan import Parts
from planning.memory.meta_batch import meta_batch
from planning.memory.meta_pass import kernels_of
from planning.planned_run import Plan
from policies.attention.choice import BY_OFFSETS
from policies.direct_transfers import send_directly
from policies.embedding_noise import EmbeddingNoise
from policies.loss_scaling import LossScaler
from policies.optimizers.build import build_optimizer
from policies.sharding import shard
from policies.weights.tensor_names import shared_names
from preparation.building import Trainable
from tasks.micro_batch import BatchShape
from utils.units import GIB

CPU = torch.device("cpu")
MOST_MICRO_BATCHES = 2  # of a step; later ones find the same memory as the second


@dataclass(frozen=True)
class TracedStep:
    """One optimizer step, after a first one that made the optimizer's states."""

    phases: dict[str, Parts]  # the fullest moment of "forward", "backward" and "optimizer_step"
    after_forward_gib: float  # right after the first micro-batch's forward

    @property
    def peak_gib(self) -> float:
        return max(parts.total for parts in self.phases.values())

    def most(self, part: str) -> float:
        """The most that a part holds at the fullest moment of any phase."""
        return max(getattr(parts, part) for parts in self.phases.values())


def trace_step(plan: Plan) -> TracedStep:
    """The memory of a step of the planned run with its widest micro-batch. It uses up the plan's model."""
    planned, card, rows = plan.model, plan.hardware.card, plan.rows
    resolved, model = planned.resolved, planned.adapted.model
    with ExitStack() as stack:
        stack.enter_context(_fake_ranks(planned.env.world_size))
        shard(model, planned.adapted.units, resolved.policies.layout, resolved.policies.precision, CPU)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _to_cpu(model)
        if resolved.policies.layout.is_direct:
            send_directly(model)
        model.train()
        trainable = _trainable(plan)
        optimizer = trainable.optimizer
        num_micro_batches = min(MOST_MICRO_BATCHES, resolved.batches.gradient_accumulation_steps)
        micro_batches = [_fake_batch(plan)] * num_micro_batches
        stack.enter_context(_Answers())
        if "selective" not in planned.empty.checkpointing.modes:  # which looks for torch's own attention, by its name
            stack.enter_context(KernelsOfCard(kernels_of(card), answer=rows.packed))
        # A first step makes the optimizer's states. Tracked, its temporaries would count as states. Sharded parameters
        # learn the shapes of an operator's results from whole tensors, once: so a second update.
        step = partial(train_step, trainable, micro_batches, 1.0, CPU, planned.env.world_size)
        step()
        _update_again(optimizer)
        tracked = _Tracked(_tracker(model, optimizer))
        stack.enter_context(tracked.tracker)
        return _record(tracked, step)


def _trainable(plan: Plan) -> Trainable:
    """What updates the plan's model, which is sharded and on the CPU."""
    planned, train = plan.model, plan.model.config.train_config
    optimizer = build_optimizer(planned.adapted.model, train, planned.config.fsdp_config)
    embedding = planned.adapted.base.get_input_embeddings()
    noise = EmbeddingNoise(embedding, train.neftune_noise_alpha, seed=0, steps_taken=lambda: 0)
    return Trainable(
        planned.adapted.model,
        optimizer,
        ConstantLR(optimizer, factor=1.0),
        LossScaler(active=planned.resolved.policies.precision.scales_loss),
        summed_loss=noise.adding(planned.resolved.task.summed_loss),
        eval_sums=planned.resolved.task.eval_sums,
        accumulation=planned.accumulation,
        max_norm=train.gradient_clipping_threshold if train.gradient_clipping else None,
    )


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


def _to_cpu(model: nn.Module) -> None:
    """Move a model from the meta device; tied weights stay tied, which `to_empty` gives a tensor each."""
    shared = [names for names in shared_names(model) if len(names) > 1]
    model.to_empty(device=CPU)
    for first, *others in shared:
        for name in others:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, model.get_parameter(first))


def _fake_batch(plan: Plan) -> Any:
    """The run's widest micro-batch, of fake tensors."""
    rows = plan.rows
    by_offsets = plan.model.empty.attention == BY_OFFSETS
    shape = BatchShape(rows.rows, rows.widest, rows.label_share, packed=rows.packed, by_offsets=by_offsets)
    batch = meta_batch(plan.model.resolved, shape, teacher_size=rows.teacher_size)

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
    """Stands in for torch's tracking of single modules.

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


def _record(tracked: _Tracked, step: Callable[..., Any]) -> TracedStep:
    """The parts of one step. Temporaries are what exceeds the bytes that stay, seen before and after."""
    fullest: dict[str, dict[str, int]] = {}
    now: dict[str, dict[str, int]] = {}

    def on_phase(phase: str) -> None:
        now[phase], fullest[phase] = tracked.now(), tracked.fullest()
        tracked.tracker._mod_tracker.is_bw = phase == "after_forward"

    step(on_phase=on_phase)
    states = now["before_forward"].get("OptState", 0) or now["before_forward"].get("Optstate", 0)
    kept = now["after_forward"].get("Activation", 0)

    def parts(found: dict[str, int]) -> Parts:
        sizes = {part: sum(found.get(name, 0) for name in names) for part, names in _NAMES.items()}
        for part, most in (("optimizer", states), ("activations", kept)):
            sizes["temporaries"] += max(0, sizes[part] - most)
            sizes[part] = min(sizes[part], most)
        return Parts(**{part: size / GIB for part, size in sizes.items()})

    phases = ("forward", "backward", "optimizer_step")
    return TracedStep({phase: parts(fullest[f"after_{phase}"]) for phase in phases}, parts(now["after_forward"]).total)


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
    """A process group of this rank and others that do nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
