"""The passes of a run: the bytes that layers keep and need in each kind of micro-batch, measured on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from planning.machines.cards import Card
from planning.memory.generation_memory import GenerationBytes, bytes_of_generation
from planning.memory.layer_bytes import PassBytes
from planning.memory.layer_memory import measure_pass
from planning.memory.meta_pass import pass_on_meta
from planning.memory.row_lengths import RowLengths
from planning.memory.sharded_bytes import add_statistics
from planning.model.planned_model import PlannedModel, layers_and_modes, layers_of, with_checkpointing
from policies.activations.host_pool import chunk_bytes
from policies.loss.summed_loss import some_chunks
from policies.tiling.tiles import some_tiles
from tasks.micro_batch import MicroBatch
from utils.model_parts import vision_layers


@dataclass(frozen=True)
class RunBytes:
    """The bytes that layers keep and need in each kind of micro-batch of a run."""

    widest: PassBytes
    typical: PassBytes
    evaluation: PassBytes | None  # None if the run has none
    generation: GenerationBytes | None  # the same


class RunPasses:
    """The passes of a run under any choice of recomputed and offloaded layers. What choices share is measured once."""

    def __init__(self, planned: PlannedModel, card: Card, rows: RowLengths) -> None:
        """
        Args:
            planned: its tiles are those of every choice; its model gets the buffers of packed weights here, if it has
                not yet.
        """
        add_statistics(planned.adapted.model)
        self._planned, self._card, self._rows = planned, card, rows
        self._measured: dict[str, _TrainingPasses] = {}  # by the mode of all layers

    def of(self, planned: PlannedModel) -> RunBytes:
        """The bytes of the run with this choice, which its layers have afterwards.

        Raises:
            ConfigError: if the inputs of such a model are not known before data is read.
        """
        checkpointing = planned.empty.checkpointing
        alike = {mode: self._alike(mode) for mode in checkpointing.modes}
        with_checkpointing(planned, checkpointing)
        widest, typical = (
            _mixed(planned, {mode: getattr(passes, kind) for mode, passes in alike.items()})
            for kind in _TrainingPasses._fields
        )
        return RunBytes(widest, typical, self._evaluation, self._generation)

    def _alike(self, mode: str) -> _TrainingPasses:
        """The passes of a run whose layers are all in one mode."""
        passes = self._measure(mode)
        if (
            mode == "off"
            or not self._planned.config.train_config.compile
            or self._planned.empty.checkpointing.tile_tokens
        ):
            return passes
        # Backward computes such layers again in its own graph, of which it keeps what compiled layers keep.
        combine = PassBytes.recomputed_as if mode == "full" else PassBytes.selective_as
        return _TrainingPasses(*map(combine, passes, self._measure("off")))

    def _measure(self, mode: str) -> _TrainingPasses:
        if mode not in self._measured:
            planned = with_checkpointing(self._planned, self._planned.empty.checkpointing.alike(mode))
            rows = self._rows
            widest = _measured_pass(planned, self._card, rows.rows, rows.widest, rows)
            is_typical = rows.typical == rows.widest
            typical = widest if is_typical else _measured_pass(planned, self._card, rows.rows, rows.typical, rows)
            self._measured[mode] = _TrainingPasses(widest, typical)
        return self._measured[mode]

    # Without backward nothing is recomputed, so these are the same in every mode.

    @cached_property
    def _evaluation(self) -> PassBytes | None:
        rows = self._rows
        if not self._evaluates:
            return None
        return _measured_pass(self._planned, self._card, rows.eval_rows, rows.widest_evaluated, rows, trains=False)

    @cached_property
    def _generation(self) -> GenerationBytes | None:
        generates = self._evaluates and self._planned.config.train_config.eval_generate
        return bytes_of_generation(self._planned, self._card, self._rows) if generates else None

    @property
    def _evaluates(self) -> bool:
        return self._planned.config.train_config.run_validation is not False


class _TrainingPasses(NamedTuple):
    """Of the kinds of micro-batches in training."""

    widest: PassBytes
    typical: PassBytes


def _mixed(planned: PlannedModel, alike: Mapping[str, PassBytes]) -> PassBytes:
    """A pass of this run, whose layers have different modes, and of which the first may be offloaded.

    Args:
        alike: by mode, the same pass with all layers in that mode.
    """
    checkpointing = planned.empty.checkpointing
    moving = {id(layer) for layer in layers_of(planned)[: planned.empty.num_offloaded]}
    mode_of = {id(layer): mode for layer, mode in layers_and_modes(planned)}
    alone = alike[checkpointing.mode]
    layers = [alike[mode_of[id(layer)]].layers[place] for place, (layer, _) in enumerate(alone.layers)]
    return replace(alone, layers=tuple((a, b.offloaded() if id(a) in moving else b) for a, b in layers))


def _measured_pass(
    planned: PlannedModel, card: Card, num_rows: int, widths: tuple[int, ...], rows: RowLengths, *, trains: bool = True
) -> PassBytes:
    model, train = planned.adapted.model, planned.config.train_config
    compiles = trains and bool(train.compile) and planned.empty.checkpointing.strongest == "off"
    layers = layers_of(planned)
    seeing = vision_layers(planned.adapted.base, layers) if planned.resolved.policies.vision_as_written else []
    as_written = set(map(id, seeing))
    of_card = pass_on_meta(planned, card, num_rows, widths, rows, trains=trains)
    with some_tiles(model), some_chunks(planned.adapted.base), of_card as (batch, loss):
        return measure_pass(
            model,
            layers,
            loss,
            list(_tensors(batch)),
            trains=trains,
            compiled=lambda layer: compiles and id(layer) not in as_written,
            moves=_moves(planned) if trains else "nothing",
            around_tiles=trains and bool(train.compile) and planned.empty.checkpointing.tile_tokens > 0,
        )


def _moves(planned: PlannedModel) -> Literal["all", "input", "nothing"]:
    """What offloading would move of a layer, all of which are checkpointed alike."""
    if not planned.config.train_config.activation_offloading:
        return "nothing"
    return "all" if planned.empty.checkpointing.strongest == "off" else "input"


def copies_on_host(use: PassBytes) -> int:
    """Host memory for the activations of a micro-batch that move there."""
    return chunk_bytes(sum(layer.on_host for _, layer in use.layers))


def _tensors(batch: MicroBatch) -> Iterator[torch.Tensor]:
    for value in vars(batch).values():
        yield from value.values() if isinstance(value, dict) else [value] if torch.is_tensor(value) else []
