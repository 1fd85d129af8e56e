"""How many layers' frozen weights stay whole on each GPU, by the plan of the run (`--num_replicated_layers auto`).

Whole weights are not gathered, and take memory that could hold activations. Of three runs the fastest by the plan is
taken, of those that leave as much memory free as `--activation_checkpointing auto` does:

| run | replicated layers             | checkpointing, tiles and offloading            |
|-----|-------------------------------|------------------------------------------------|
| 1   | none                          | chosen, or as the flags say                    |
| 2   | as many as there is room for  | those of run 1                                 |
| 3   | all                           | chosen for that, which may recompute more      |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from planning.chosen_checkpointing import Seconds, has_room, slowness
from planning.cost.traffic import find_traffic
from planning.machines.cards import Card
from planning.memory.memory_plan import MemoryPlan
from planning.memory.row_lengths import RowLengths
from planning.memory.run_memory import memory_of
from planning.memory.run_passes import RunPasses
from planning.model.planned_model import PlannedModel, layers_of, replicated_in, with_checkpointing, with_replicated
from utils.units import readable

Chosen = tuple[PlannedModel, MemoryPlan, tuple[str, ...]]
"""A model, the plan of its memory, and lines to print."""

LEAST_SHARE = 0.01
"""Of all weights must be frozen: a few families train all but the biases of their routers (ERNIE 4.5, AFMoE)."""


def choose_replication(
    planned: PlannedModel, card: Card, rows: RowLengths, choose: Callable[[PlannedModel], Chosen], seconds: Seconds
) -> Chosen:
    """The model with its replicated layers and all else chosen, the plan of its memory, and lines to print.

    Args:
        planned: not to be used afterwards; its layers get other checkpointing.
        choose: all else, for so many replicated layers.
        seconds: of a step, as in `choose_checkpointing`.

    Raises:
        ConfigError: if more layers were asked for than there are, or the inputs of such a model are not known.
    """
    asked = planned.resolved.policies.layout.num_replicated
    if asked is not None:
        model, memory, lines = choose(planned)
        return model, memory, (*lines, *_lines(model, "")) if asked else lines
    none = choose(with_replicated(planned, 0))
    if not card.is_gpu or _frozen_share(planned) < LEAST_SHARE:
        return none
    found = [none]
    if has_room(none[0], none[1]):
        found.append(_most_replicated(none, card, rows))
    if _number(found[-1]) < len(layers_of(planned)):
        whole = choose(with_replicated(planned, len(layers_of(planned))))
        found += [whole] if has_room(whole[0], whole[1]) else []
    model, memory, lines = min(found, key=lambda one: (*slowness(one[0], one[1], seconds), -_number(one)))
    model = with_checkpointing(model, model.empty.checkpointing)  # the runs share their layers
    return model, memory, (*lines, *_lines(model, "auto is "))


def _most_replicated(chosen: Chosen, card: Card, rows: RowLengths) -> Chosen:
    """The same run with as many layers replicated as there is room for."""
    model, _, lines = chosen
    num_layers, run = len(layers_of(model)), RunPasses(model, card, rows).of(model)

    def plan(number: int) -> MemoryPlan:
        return memory_of(with_replicated(model, number), card, run)

    def lacks_room(number: int) -> bool:
        return not has_room(model, plan(number))

    number = num_layers
    # Bisection: more of them never take less memory, but under SHARD_GRAD_OP, where all fit if none do.
    if lacks_room(number):
        number = bisect_left(range(1, num_layers), True, key=lacks_room)
    return (with_replicated(model, number), plan(number), lines) if number else chosen


def _frozen_share(planned: PlannedModel) -> float:
    """Of the bytes of all weights."""
    parameters = list(planned.adapted.model.parameters())
    frozen = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
    return frozen / max(1, sum(parameter.nbytes for parameter in parameters))


def _number(chosen: Chosen) -> int:
    return chosen[0].resolved.policies.layout.num_replicated or 0


def _lines(planned: PlannedModel, auto: str) -> tuple[str, ...]:
    """What is replicated, and what that saves; nothing if nothing is."""
    number, layout = planned.resolved.policies.layout.num_replicated, planned.resolved.policies.layout
    if not number:
        return ()
    held = sum(parameter.nbytes for parameter in replicated_in(planned))
    before, after = find_traffic(with_replicated(planned, 0)), find_traffic(planned)
    units, root = before.units_bytes - after.units_bytes, before.root_bytes - after.root_bytes
    saved = (2 if layout.reshard_after_forward else 1) * units + root
    each = "micro-batch" if layout.reshard_after_forward else "step"
    return (
        f"num_replicated_layers: {auto}{number} of {len(layers_of(planned))}: {readable(held)} of frozen weights stay "
        f"whole on each rank, and a {each} gathers {readable(saved)} less",
    )
