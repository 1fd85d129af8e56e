"""How many layers' activations wait in host memory, by the plan of the run's memory (`--activation_offloading auto`).

None if the run fits without. Else the fewest first layers with which it fits, or all: the first layers' activations are
needed last, so their way back is hidden longest. Recomputing comes first (planning/chosen_checkpointing.py).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from planning.machines.cards import Card
from planning.memory.memory_plan import MemoryPlan
from planning.memory.row_lengths import RowLengths
from planning.memory.run_memory import memory_of
from planning.memory.run_passes import RunPasses, copies_on_host
from planning.model.planned_model import PlannedModel, layers_of
from utils.units import GIB


def choose_offloading(planned: PlannedModel, card: Card, rows: RowLengths) -> tuple[PlannedModel, MemoryPlan, str]:
    """The model with its offloading chosen, the plan of its memory, and a line to print.

    Args:
        planned: its checkpointing is chosen.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    most = len(layers_of(planned)) - 1
    passes, plans = RunPasses(planned, card, rows), dict[int, MemoryPlan]()

    def memory(num_layers: int) -> MemoryPlan:
        if num_layers not in plans:
            moving = with_offloading(planned, num_layers)
            plans[num_layers] = memory_of(moving, card, passes.of(moving))
        return plans[num_layers]

    number = 0
    if card.is_gpu:
        # Bisection: moving more layers never takes more memory of the device.
        number = bisect_left(range(most), True, key=lambda number: memory(number).device_verdict == "fits")
    chosen, plan = with_offloading(planned, number), memory(number)
    peak = f"a planned peak of {plan.peak_gib:.1f} GiB of {plan.capacity_gib:.1f}"
    if not number:
        reason = f"the run fits without, with {peak}" if card.is_gpu else "there is no memory of a GPU to fit"
        return chosen, plan, f"activation_offloading: auto moves nothing, since {reason}"
    on_host = copies_on_host(passes.of(chosen).widest) / GIB
    line = f"activation_offloading: auto moves the first {number} of {most + 1} layers' activations to host memory"
    return chosen, plan, f"{line} ({on_host:.1f} GiB), with {peak} ({memory(0).peak_gib:.1f} without)"


def with_offloading(planned: PlannedModel, num_layers: int) -> PlannedModel:
    """The same model with the activations of the first layers in host memory."""
    return replace(planned, empty=replace(planned.empty, num_offloaded=num_layers))
