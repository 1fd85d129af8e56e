"""plan.json in the run folder: the plan of the run that wrote it, and the choices made by it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpointing.earlier_choice import EarlierChoice
from configs.run import RunConfig
from planning.cost.network_waits import RunNetwork
from planning.cost.traffic import find_traffic
from planning.larger_micro_batch import larger_micro_batch
from planning.machines.cards import CONTEXT_GIB
from planning.machines.hardware import Hardware
from planning.machines.planned_environment import own_hardware
from planning.planned_run import Plan, plan_of
from policies.activations.checkpointing import Checkpointing
from policies.activations.offloading import Offloaded
from ranks.collectives import gather_to_all, on_rank_zero
from ranks.environment import Environment
from resolving.data_facts import DataFacts
from resolving.resolved import Resolved
from run_folder.entries import PLAN
from utils.atomic_write import write_atomically
from utils.errors import ConfigError, in_one_line
from utils.units import GIB


class PlanAtStart(NamedTuple):
    """The plan of the run that starts on these ranks."""

    values: dict[str, Any] | None  # for plan.json; None, like the next three, if the run could not be planned
    checkpointing: Checkpointing | None  # of its layers
    offloaded: Offloaded | None  # of them
    network: RunNetwork | None  # its traffic and its hardware
    notes: tuple[str, ...]  # lines to print
    too_short: str | None = None  # why it is planned uncompiled although its settings compile it, as a clause
    num_replicated: int | None = None  # layers whose frozen weights stay whole; None if it could not be planned

    @property
    def card(self) -> str | None:
        """The name of the devices; None if the run could not be planned."""
        return None if self.network is None else self.network.hardware.card.name

    def check_host(self, config: RunConfig) -> None:
        """Refuse a run that moves more to host memory than there is: the kernel would end it without a word.

        Raises:
            ConfigError: naming the flags that move it.
        """
        train, fsdp = config.train_config, config.fsdp_config
        moves = {
            "--activation_offloading": train.activation_offloading,
            "--optimizer_cpu_offload": fsdp.optimizer_cpu_offload,
            "--fsdp_cpu_offload": fsdp.fsdp_cpu_offload,
        }
        given = ", ".join(name for name, is_on in moves.items() if is_on)
        capacity = None if self.values is None else self.values["host_capacity_gib"]
        if self.values is None or self.network is None or not self.network.hardware.card.is_gpu or capacity is None:
            return
        needed, moved = self.values["host_gib"], self.values["moved_gib"]
        if given and needed > capacity:
            of_them = f", {moved:.1f} of them for activations," if moved else ""
            remedy = "fewer --num_offloaded_layers, or shorter rows" if moved else "fewer trained weights"
            raise ConfigError(
                f"{given}: by its plan each rank needs {needed:.1f} GiB of host memory{of_them} and there are "
                f"{capacity:.1f}; give {remedy}, or share the model among more machines"
            )


def plan_for_all(
    resolved: Resolved,
    env: Environment,
    data: Callable[[], DataFacts],
    earlier: EarlierChoice | None = None,
    *,
    begins: bool = True,
    num_replicated: int | None = None,
) -> PlanAtStart:
    """Rank 0's plan, for the rank with the least memory. Every rank must call this.

    Args:
        data: what is known of the data; called on rank 0.
        earlier, begins, num_replicated: as in `plan_at_start`.
    """
    # Every rank must allow the same checkpointing, so the one with the least memory decides.
    memory_gib = min(gather_to_all(_own_memory_gib(env)))
    return on_rank_zero(
        lambda: plan_at_start(
            resolved,
            env,
            data(),
            memory_gib=memory_gib,
            earlier=earlier,
            begins=begins,
            num_replicated=num_replicated,
        )
    )


def plan_at_start(
    resolved: Resolved,
    env: Environment,
    data: DataFacts,
    *,
    memory_gib: float = math.inf,
    earlier: EarlierChoice | None = None,
    begins: bool = True,
    num_replicated: int | None = None,
) -> PlanAtStart:
    """The plan of the run that starts on these ranks, in closed form.

    It draws no random numbers that the run would miss: a run is seeded after it.

    Args:
        memory_gib: memory that the run may use of each device, if less than its driver gives.
        earlier: the checkpointing that the run had before it was resumed. It stays on the same cards, with the same
            ranks and settings, as long as it fits.
        begins: it goes on from no checkpoint, so it may turn out too short to be compiled.
        num_replicated: layers whose frozen weights are whole already; None: to be chosen.
    """
    config = resolved.config
    auto = config.train_config.activation_checkpointing == "auto"
    notes: tuple[str, ...]
    try:
        hardware = own_hardware(config.train_config, config.planning_config, env)
        card = replace(hardware.card, memory_gib=min(hardware.card.memory_gib, memory_gib))
        hardware_of_all = replace(hardware, card=card)
        plan = _plan_with(resolved, hardware_of_all, data, earlier, begins=begins, num_replicated=num_replicated)
        network = RunNetwork(plan.resolved.policies.layout, find_traffic(plan.model), hardware)
        notes = (*plan.choices, *filter(None, [larger_micro_batch(plan, data, begins=begins)]))
    except Exception as error:  # the run is worth more than its plan: it goes on without one
        why = f"this run could not be planned ({in_one_line(error)})"
        notes = (f"activation_checkpointing: auto is this run's default, since {why}",) if auto else ()
        if config.train_config.activation_offloading == "auto":
            notes = (*notes, f"activation_offloading: auto moves all activations, since {why}")
        if config.train_config.use_peft and resolved.policies.layout.num_replicated is None:
            notes = (*notes, f"num_replicated_layers: auto is none, since {why}")
        return PlanAtStart(None, None, None, None, (f"{PLAN}: not written, since {why}", *notes))
    empty = plan.model.empty
    offloaded = Offloaded(empty.num_offloaded, int(plan.memory.pinned_gib * GIB))
    replicated = plan.resolved.policies.layout.num_replicated
    return PlanAtStart(plan.to_dict(), empty.checkpointing, offloaded, network, notes, plan.too_short, replicated)


def _plan_with(
    resolved: Resolved,
    hardware: Hardware,
    data: DataFacts,
    earlier: EarlierChoice | None,
    *,
    begins: bool,
    num_replicated: int | None,
) -> Plan:
    """The plan with the earlier checkpointing if that holds here, else with one that is chosen anew."""
    config = resolved.config
    # The global batch is that of the checkpoint, if it goes on from one.
    plan_anew = partial(
        plan_of,
        config,
        hardware,
        data,
        num_replicated=num_replicated,
        resumed_size=resolved.batches.global_batch_size,
    )
    if earlier is None:
        return plan_anew(may_be_too_short=begins and resolved.chose_to_compile)
    obstacle = earlier.obstacle
    if earlier.card != hardware.card.name:
        obstacle = f"it was made for {earlier.card}"
    if obstacle is None:
        plan = plan_anew(checkpointing=earlier.checkpointing)
        if plan.memory.device_verdict != "does_not_fit":
            line = f"activation_checkpointing: {plan.model.empty.checkpointing}, as in the checkpoint"
            return (
                replace(plan, choices=(line, *plan.choices))
                if config.train_config.activation_checkpointing == "auto"
                else plan
            )
        obstacle = "it does not fit any more"
    plan = plan_anew()
    if plan.chose_checkpointing and plan.model.empty.checkpointing != earlier.checkpointing:
        before = f"activation_checkpointing: {earlier.checkpointing} in the checkpoint; chosen anew, since {obstacle}"
        return replace(plan, choices=(before, *plan.choices))
    return plan


def write_plan(folder: Path, plan: dict[str, Any] | None) -> None:
    """Write the plan into the run folder; without one, nothing is there.

    Raises:
        FileWriteError: if the disk refuses.
    """
    if plan is not None:
        write_atomically(folder / PLAN, json.dumps(plan, indent=2) + "\n")


def _own_memory_gib(env: Environment) -> float:
    """Memory of this rank's GPU that no other process has taken; infinite without a GPU."""
    if env.device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(env.device)
    # This process's own context and tensors are not free any more, and plans count them themselves.
    return min(total / GIB, (free + torch.cuda.memory_reserved(env.device)) / GIB + CONTEXT_GIB)
