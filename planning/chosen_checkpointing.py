"""--activation_checkpointing auto: the fastest checkpointing of a run's layers that fits the device, by its plan.

| tried                                                    | taken                              |
|----------------------------------------------------------|------------------------------------|
| every layer `off`                                        | if it fits                         |
| the first k layers `selective`, the others `off`         | else, of those with the smallest k |
| the first k layers `full`, the others `selective`, `off` | that fits, the fastest             |
| every layer `full`                                       | else                               |

It fits if the plan's verdict says so: a share of the memory stays free, as much as a plan may be wrong by.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from planning.cards import Card
from planning.cost.step_work import RECOMPUTED
from planning.memory.closed_form import RunUse, memory_of, mixed_use, use_of_run
from planning.memory.memory_plan import MemoryPlan
from planning.memory.row_lengths import RowLengths
from planning.planned_model import PlannedModel, with_checkpointing
from policies.activation_checkpointing import Checkpointing, why_not_checkpointed

MIXED = (("selective", "off"), ("full", "selective"), ("full", "off"))
"""Pairs of modes: that of the first layers, and that of the others."""


def is_to_be_chosen(planned: PlannedModel) -> bool:
    """Whether `auto` was given, nothing has been chosen, and there is a choice."""
    train = planned.config.train_config
    return (
        train.activation_checkpointing == "auto"
        and planned.resolved.policies.checkpointing is None
        and why_not_checkpointed(planned.empty.model, train) is None
    )


def choose_checkpointing(
    planned: PlannedModel, card: Card, rows: RowLengths, seconds: Callable[[PlannedModel], float | None]
) -> tuple[PlannedModel, MemoryPlan, str]:
    """The model with its layers checkpointed as they are to be, the plan of its memory, and a line to print.

    Args:
        planned: it is used up.
        seconds: of a step of such a run; None if that is not known. Then fewer recomputed products are faster.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    plans = _Plans(planned, card, rows)
    if not card.is_gpu:
        default = planned.empty.checkpointing
        line = f"activation_checkpointing: auto is {default}, this run's default: there is no memory of a GPU to fit"
        return planned, plans.memory(default), line
    off, full = Checkpointing("off"), Checkpointing("full")
    found = [off] if plans.fits(off) else [mix for pair in MIXED if (mix := plans.fewest(*pair)) is not None]
    choice = min(found, key=lambda one: _slowness(plans.model(one), seconds), default=full)
    peak, capacity = plans.memory(choice).peak_gib, card.memory_gib
    line = f"activation_checkpointing: auto is {choice}, with a planned peak of {peak:.1f} GiB of {capacity:.1f}"
    if choice != off:
        line += f" ({plans.memory(off).peak_gib:.1f} with off)"
    return plans.model(choice), plans.memory(choice), line


class _Plans:
    """The memory of a run with other checkpointing. Each mode is measured once, and each mix walked through once."""

    def __init__(self, planned: PlannedModel, card: Card, rows: RowLengths) -> None:
        self._planned, self._card, self._rows = planned, card, rows
        self._uses: dict[str, RunUse] = {}
        self._memory: dict[Checkpointing, MemoryPlan] = {}
        self._num_layers = len(list(planned.empty.checkpointing.of_layers(planned.adapted.base)))

    def model(self, checkpointing: Checkpointing) -> PlannedModel:
        return with_checkpointing(self._planned, checkpointing)

    def memory(self, checkpointing: Checkpointing) -> MemoryPlan:
        if checkpointing not in self._memory:
            for mode in checkpointing.modes:
                if mode not in self._uses:
                    self._uses[mode] = use_of_run(self.model(Checkpointing(mode)), self._card, self._rows)
            uses = {mode: self._uses[mode] for mode in checkpointing.modes}
            model = self.model(checkpointing)
            self._memory[checkpointing] = memory_of(model, self._card, mixed_use(model, uses))
        return self._memory[checkpointing]

    def fits(self, checkpointing: Checkpointing) -> bool:
        return self.memory(checkpointing).verdict == "fits"

    def fewest(self, first: str, others: str) -> Checkpointing | None:
        """The fewest first layers in one mode, the others in the other mode, that fit; None if not even all do."""
        if not self.fits(Checkpointing(first)):
            return None

        def mix(number: int) -> Checkpointing:
            return Checkpointing(others, first, number) if number < self._num_layers else Checkpointing(first)

        number = bisect_left(range(1, self._num_layers), True, key=lambda number: self.fits(mix(number))) + 1
        return mix(number)


def _slowness(planned: PlannedModel, seconds: Callable[[PlannedModel], float | None]) -> tuple[float, float]:
    """What orders candidates: seconds of a step, and layers recomputed, in part or whole."""
    recomputed = sum(RECOMPUTED[mode] for _, mode in planned.empty.checkpointing.of_layers(planned.adapted.base))
    return seconds(planned) or 0.0, recomputed
