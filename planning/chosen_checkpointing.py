"""Which layers of a run are recomputed, by the plan of its memory.

`--activation_checkpointing auto` takes the fastest that fits the device:

| tried                                                    | taken                              |
|----------------------------------------------------------|------------------------------------|
| every layer `off`                                        | if it fits                         |
| the first k layers `selective`, the others `off`         | else, of those with the smallest k |
| the first k layers `full`, the others `selective`, `off` | that fits, the fastest             |
| `full`, as below                                         | else                               |

If nothing fits, the same is tried with MLPs in tiles (chosen_tiles.py). With --activation_offloading what these layers
keep is moved, and so costs time instead of memory.

It fits if the plan's verdict says so: as much memory stays free as a plan may be wrong by. Plans of mixtures are wrong
by more (MIXTURES_SHARE).

`full` does not recompute the last layers, as long as keeping their activations does not raise the peak. Backward begins
with them, and their activations are freed before gradients take that room. So the peak of the step, which is at its
end, stays as it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from planning.cost.step_work import RECOMPUTED
from planning.machines.cards import Card
from planning.memory.memory_plan import MemoryPlan
from planning.memory.row_lengths import RowLengths
from planning.memory.run_memory import memory_of
from planning.memory.run_passes import RunPasses
from planning.model.planned_model import PlannedModel, layers_and_modes, with_checkpointing
from policies.activations.checkpointing import Checkpointing, why_not_checkpointed
from tasks.flops import shares_of_experts

MIXED = (("selective", "off"), ("full", "selective"), ("full", "off"))
"""Pairs of modes: that of the first layers, and that of the others."""

SPARED = 0.85
"""Of the layers that cost nothing by the plan, the fraction that is not recomputed: the plan may be wrong."""

MIXTURES_SHARE = 0.1
"""Of a mixture this share of the memory stays free: gpt-oss-20b, cut to 12 layers, took 6 % more than its plan."""

NOTHING = 1.002
"""A peak counts as the same up to this factor: with two kinds of layers it holds one more hidden state."""

Seconds = Callable[[PlannedModel, MemoryPlan], float | None]
"""Seconds of a step of such a run; None if that is not known."""


def is_to_be_chosen(planned: PlannedModel) -> bool:
    """Whether `auto` was given, nothing has been chosen, and there is a choice."""
    train = planned.config.train_config
    return (
        train.activation_checkpointing == "auto"
        and planned.resolved.policies.checkpointing is None
        and why_not_checkpointed(planned.empty.model, train) is None
    )


def choose_checkpointing(
    planned: PlannedModel, card: Card, rows: RowLengths, seconds: Seconds
) -> tuple[PlannedModel, MemoryPlan, str]:
    """The model with its checkpointing chosen, the plan of its memory, and a line to print.

    Args:
        planned: not to be used afterwards; its layers get other checkpointing.
        seconds: without them fewer recomputed products are faster.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    plans = _Plans(planned, card, rows)
    if not card.is_gpu:
        default = planned.empty.checkpointing
        line = f"activation_checkpointing: auto is {default}, this run's default: there is no memory of a GPU to fit"
        return planned, plans.memory(default), line
    off = plans.alike("off")
    # Layers that recompute nothing are the fastest, unless all that they keep has to move.
    found = [off] if plans.fits(off) else []
    if not found or planned.empty.num_offloaded:
        mixes = (plans.fewest(*pair, plans.fits) for pair in MIXED)
        found += [*(plans.alike("selective") for _ in found), *(mix for mix in mixes if mix is not None)]

    def order(one: Checkpointing) -> tuple[float, float]:
        return slowness(plans.model(one), plans.memory(one), seconds)

    choice = min(found, key=order, default=plans.full_where_it_saves())
    peak, capacity = plans.memory(choice).peak_gib, card.memory_gib
    line = f"activation_checkpointing: auto is {choice}, with a planned peak of {peak:.1f} GiB of {capacity:.1f}"
    if choice != off:
        line += f" ({plans.memory(off).peak_gib:.1f} with off)"
    return plans.model(choice), plans.memory(choice), line


def is_to_be_spared(planned: PlannedModel) -> bool:
    """Whether every layer is to be recomputed, nothing has been chosen, and some might cost no memory."""
    return (
        planned.empty.checkpointing == Checkpointing("full")
        and planned.resolved.policies.checkpointing is None
        and _may_spare(planned)
    )


def spare_layers(
    planned: PlannedModel, card: Card, rows: RowLengths
) -> tuple[PlannedModel, MemoryPlan, tuple[str, ...]]:
    """The model with as many layers spared as cost nothing, the plan of its memory, and lines to print.

    Args:
        planned: not to be used afterwards; its layers get other checkpointing.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    plans = _Plans(planned, card, rows)
    choice = plans.full_where_it_saves()
    line = (
        f"activation_checkpointing: {choice}, since keeping the activations of the last layers does not raise the peak"
    )
    lines = () if choice == Checkpointing("full") else (line,)
    return plans.model(choice), plans.memory(choice), lines


def _may_spare(planned: PlannedModel) -> bool:
    """Whether layers may be spared at all: backward has to add gradients that are no small part of the memory."""
    train = planned.config.train_config
    is_alone = planned.resolved.batches.gradient_accumulation_steps == 1  # the micro-batch of its step
    return is_alone and train.spare_layers and not (train.use_peft or train.activation_offloading)


class _Plans:
    """The memory of a run with other checkpointing. Each mode is measured once, and each mix walked through once."""

    def __init__(self, planned: PlannedModel, card: Card, rows: RowLengths) -> None:
        self._planned, self._card, self._passes = planned, card, RunPasses(planned, card, rows)
        self._memory: dict[Checkpointing, MemoryPlan] = {}
        self.alike = planned.empty.checkpointing.alike  # the same tiles in every choice
        self.num_layers = len(planned.adapted.layers)

    def model(self, checkpointing: Checkpointing) -> PlannedModel:
        return with_checkpointing(self._planned, checkpointing)

    def memory(self, checkpointing: Checkpointing) -> MemoryPlan:
        if checkpointing not in self._memory:
            model = self.model(checkpointing)
            self._memory[checkpointing] = memory_of(model, self._card, self._passes.of(model))
        return self._memory[checkpointing]

    def fits(self, checkpointing: Checkpointing) -> bool:
        return has_room(self._planned, self.memory(checkpointing))

    def fewest(self, first: str, others: str, accepts: Callable[[Checkpointing], bool]) -> Checkpointing | None:
        """The fewest first layers in one mode, the others in the other, that are accepted; None if not even all are."""
        if not accepts(self.alike(first)):
            return None

        def mix(number: int) -> Checkpointing:
            if number == self.num_layers:
                return self.alike(first)
            return replace(self.alike(others), first=first, num_first=number)

        # Bisection: recomputing more layers never takes more memory, so a few plans do for a deep model.
        number = bisect_left(range(1, self.num_layers), True, key=lambda number: accepts(mix(number))) + 1
        return mix(number)

    def full_where_it_saves(self) -> Checkpointing:
        """Every layer in mode `full`, but those that cost no memory with all activations kept."""
        full = self.alike("full")
        if full.tile_tokens or not _may_spare(self._planned):
            return full
        limit_gib = NOTHING * self.memory(full).peak_gib
        most = self.fewest("full", "off", lambda choice: self.memory(choice).peak_gib <= limit_gib)
        num_spared = int(SPARED * (self.num_layers - most.num_first)) if most is not None and most != full else 0
        return Checkpointing("off", "full", self.num_layers - num_spared) if num_spared else full


def has_room(planned: PlannedModel, memory: MemoryPlan) -> bool:
    """Whether as much memory stays free as a plan of such a model may be wrong by."""
    if memory.moved_gib and memory.host_verdict == "does_not_fit":
        return False
    if shares_of_experts(planned.adapted.base):
        return memory.margin_gib >= MIXTURES_SHARE * memory.capacity_gib
    return memory.device_verdict == "fits"


def slowness(planned: PlannedModel, memory: MemoryPlan, seconds: Seconds) -> tuple[float, float]:
    """Sort key of candidates: seconds of a step, then the number of recomputed layers, parts of layers included."""
    recomputed = sum(RECOMPUTED[mode] for _, mode in layers_and_modes(planned))
    return seconds(planned, memory) or 0.0, recomputed
