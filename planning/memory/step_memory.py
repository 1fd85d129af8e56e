"""A rank's memory through a step: a walk over the layers in the order in which they run, in closed form.

| held                  | by                      | when                                                             |
|-----------------------|-------------------------|------------------------------------------------------------------|
| parameters            | every layout            | always                                                           |
| optimizer states      | every layout            | always                                                           |
| gradients             | DistributedDataParallel | always: they are views of its buckets                            |
|                       | other layouts           | from a layer's backward to the end of the step                   |
| gathered weights      | `fully_shard`           | of a unit, while it computes; of the root, from forward to the   |
|                       |                         | end of backward; of all units, if forward does not reshard, and  |
|                       |                         | then until the end of the step's last backward                   |
| all-gather buffer     | `fully_shard`           | in forward, of the unit that computes (freed after the next one  |
|                       |                         | arrives); in backward, of the unit that is prefetched. Sent      |
|                       |                         | directly: whole weights, in forward of the unit before           |
| whole gradients       | `fully_shard`           | of a unit, until they are reduced; of the root, until the end    |
| reduce-scatter buffer | `fully_shard`           | of one unit, until the next one's gradients are there; or, sent  |
|                       |                         | directly, the gradients themselves                               |
| all-reduce buffers    | copies of `fully_shard` | of all units until the end of backward, unless gradients are     |
|                       |                         | stored in the dtype in which they are reduced                    |

Source for `fully_shard`: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from torch import nn

from planning.memory.generation_memory import GenerationBytes
from planning.memory.held_bytes import HeldBytes, Scheme
from planning.memory.layer_bytes import LayerBytes, PassBytes
from planning.memory.memory_plan import Parts
from planning.memory.sharded_bytes import UnitBytes
from utils.units import GIB


@dataclass
class Bytes:
    """The parts of memory at one moment, by the names of `Parts`."""

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    activations: int = 0
    unsharded: int = 0
    communication: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def in_gib(self) -> Parts:
        return Parts(**{part.name: getattr(self, part.name) / GIB for part in fields(self)})


class StepMemory:
    """A rank's memory in each pass of a run.

    Each method begins its walk with the memory held between steps, so they can be called in any order.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], scheme: Scheme) -> None:
        """
        Args:
            model: adapted, on the meta device, in the dtypes in which it is stored.
            units: the modules that are gathered one at a time, inner ones first.
        """
        self._held = HeldBytes(model, units, scheme)

    @property
    def params(self) -> int:
        """This rank's part of the parameters, with buffers and scales of quantized weights."""
        return self._held.params

    def step(self, use: PassBytes) -> dict[str, Bytes]:
        """The fullest moments of "forward", "backward" and "optimizer_step"."""
        walk = _Walk(self._held)
        if self._held.scheme.holds_grads:
            self._first_forward(walk, use)
            walk = _Walk(self._held, walk.peaks)
        walk.micro_batches(use)
        walk.note("optimizer_step", temporaries=self._held.scheme.optimizer.temporaries)
        return walk.peaks

    def after_forward(self, use: PassBytes, *, first: bool = True) -> Bytes:
        """Right after the forward pass of a micro-batch.

        Args:
            first: of its step; else gradients of earlier ones are there.
        """
        walk = _Walk(self._held)
        if first:
            self._first_forward(walk, use)
        else:
            walk.grads_stay()
            walk.forward(use)
        return walk.now

    def evaluation(self, use: PassBytes) -> Bytes:
        """The fullest moment of an evaluation's forward pass."""
        walk = _Walk(self._held)
        walk.forward(use)
        return walk.peaks["forward"]

    def generation(self, use: GenerationBytes, free_bytes: int) -> Bytes:
        """The fullest moment of an evaluation's generation.

        Sharded weights are gathered once if they take at most half of the free memory, else layer by layer
        (`policies.generating`).

        Args:
            free_bytes: memory of the device that tensors may take.
        """
        held, walk = self._held, _Walk(self._held)
        unsharded = communication = 0
        if held.scheme.shards:
            largest = max((unit.whole for unit in held.units.values()), default=0)
            communication = held.buffer(largest)
            unsharded = sum(unit.whole for unit in held.everything)
            if 2 * unsharded > free_bytes - walk.now.total:
                unsharded = held.root.whole + largest
        temporaries = use.peak - use.cache
        walk.note(
            "generation",
            activations=use.cache,
            temporaries=temporaries,
            unsharded=unsharded,
            communication=communication,
        )
        return walk.peaks["generation"]

    @staticmethod
    def _first_forward(walk: _Walk, use: PassBytes) -> None:
        """Forward of a step's first micro-batch."""
        if walk.scheme.holds_grads and not walk.grads_wait:
            walk.now.grads += walk.held.grads
        walk.forward(use)


class _Walk:
    """Adds and frees bytes in the order of a pass. `peaks` are the fullest moments so far, by phase."""

    def __init__(self, held: HeldBytes, peaks: Mapping[str, Bytes] | None = None) -> None:
        self.held, self.scheme = held, held.scheme
        self.peaks = dict(peaks or {})
        self._begin()

    def _begin(self) -> None:
        """Go back to the memory held between steps."""
        scheme, grads = self.scheme, self.held.grads
        self.now = Bytes(params=self.held.params, optimizer=scheme.optimizer.states)
        if scheme.kind == "ddp" and scheme.bucket_views:
            self.now.grads = grads
        elif scheme.kind == "ddp":
            self.now.communication = grads
        self.grads_wait = scheme.kind == "ddp" and scheme.bucket_views  # backward makes no new ones
        self._keeps_weights = False  # gathered ones, after backward

    def micro_batches(self, use: PassBytes) -> None:
        """The last one of a step, and one before it if weights stay gathered after that one's backward."""
        if self.scheme.keeps_weights and self.scheme.num_micro_batches > 1:
            self._keeps_weights = True
            self._whole_micro_batch(use)
            self._begin()
        self._whole_micro_batch(use)

    def _whole_micro_batch(self, use: PassBytes) -> None:
        if self.scheme.num_micro_batches > 1:
            self.grads_stay()
        self.forward(use)
        self._backward(use)

    def grads_stay(self) -> None:
        """Gradients of earlier micro-batches of the step are there."""
        if self.grads_wait:
            return
        if self.scheme.shards and self.scheme.accumulates_unsharded:
            self.now.unsharded += sum(map(self.held.reduce_bytes, self.held.everything))
        else:
            self.grads_wait = True
            self.now.grads += self.held.grads

    def forward(self, use: PassBytes) -> None:
        now, scheme, held = self.now, self.scheme, self.held
        now.activations += use.between
        if scheme.shards:
            now.unsharded += held.root.whole
            if not scheme.reshards_after_forward:
                now.unsharded += sum(unit.whole for unit in held.outside(use))
        seen: set[int] = set()
        buffer = held.buffer(
            sum(unit.whole for unit in held.outside(use)) if held.gathers_directly else held.root.whole
        )
        leaving = 0  # of the layer before, on its way to host memory
        for layer, of_layer in use.layers:
            whole = sum(unit.whole for unit in held.units_of(layer) if id(unit) not in seen)
            now.unsharded += whole
            # The last buffer stays until the next unit's has arrived; a layer gathered before needs none. Gathered
            # directly, there is none; the weights of the layer before are freed after this one's forward.
            before, buffer = buffer, held.buffer(whole) or buffer
            communication = held.freed_late(before) if held.gathers_directly else buffer
            self.note("forward", temporaries=of_layer.forward + leaving, communication=communication)
            now.activations += of_layer.kept
            leaving = of_layer.moved
            if scheme.reshards_after_forward:
                now.unsharded -= whole
            else:
                seen.update(id(unit) for unit in held.units_of(layer))
        now.activations += leaving
        communication = held.freed_late(buffer) if held.gathers_directly else buffer
        self.note("forward", temporaries=use.loss.forward, communication=communication)
        now.activations += use.loss.kept

    def _backward(self, use: PassBytes) -> None:
        now, scheme, held = self.now, self.scheme, self.held
        reduced, communication = 0, now.communication
        comes = not self.grads_wait and not scheme.grads_on_host  # whether backward adds gradients that stay
        # While the loss has its backward, the last layer is gathered already.
        self._backward_of(use.loss, communication=held.prefetched(use, len(use.layers)))
        now.activations -= use.layers[-1][1].moved if use.layers else 0  # it counts with its layer's backward
        if scheme.shards:
            now.unsharded += held.root.whole_grads - sum(map(held.root_grads, _distinct(use)))
        elif comes:  # those of the head; the embedding's come last
            outside = held.grads - sum(map(_grad_bytes, _distinct(use)))
            now.grads += outside - min(outside, use.embedding_backward)
        # Some models call a layer several times: its gradients are complete after the backward of its first call.
        left = {id(layer): sum(layer is other for other, _ in use.layers) for layer, _ in use.layers}
        for index in range(len(use.layers) - 1, -1, -1):
            layer, of_layer = use.layers[index]
            left[id(layer)] -= 1
            units = held.units_of(layer)
            if scheme.reshards_after_forward:
                now.unsharded += sum(unit.whole for unit in units)
            buffer = held.prefetched(use, index)
            arriving = use.layers[index - 1][1].moved if index else 0
            self._backward_of(of_layer, communication=buffer + reduced, arriving=arriving)
            if not left[id(layer)]:
                now.unsharded += held.root_grads(layer)
                now.grads += _grad_bytes(layer) if comes and not scheme.shards else 0
            for unit in units:
                reduced = self._reduce(unit, buffer)
        if scheme.shards:
            for unit in (*held.outside(use), held.root):
                now.unsharded += 0 if unit is held.root else unit.whole_grads
                now.unsharded += 0 if unit is held.root or not scheme.reshards_after_forward else unit.whole
                self.note("backward", communication=reduced)
                now.unsharded += 0 if unit is held.root else -unit.whole_grads
                reduced = self._reduce(unit, 0, grads_are_there=unit is held.root)
        else:
            self.note("backward", temporaries=use.embedding_backward)
            if comes:
                now.grads = held.grads
        now.activations -= use.between
        now.communication = communication

    def _backward_of(self, use: LayerBytes, communication: int, arriving: int = 0) -> None:
        """The fullest moment of one layer's backward, or the loss's; then its activations are freed.

        Args:
            arriving: of the layer before, on its way back from host memory.
        """
        grads, temporaries = use.backward_with_grads - use.backward, use.backward - use.kept + arriving
        if self.scheme.shards:
            self.note("backward", temporaries=temporaries, unsharded=grads, communication=communication)
        else:
            grads = 0 if self.grads_wait else grads
            self.note("backward", temporaries=temporaries, grads=grads, communication=communication)
        self.now.activations -= use.kept

    def _reduce(self, unit: UnitBytes, buffer: int, *, grads_are_there: bool = False) -> int:
        """Reduce a unit's gradients, whose weights are sharded again first.

        Args:
            buffer: of the all-gather that runs meanwhile.
            grads_are_there: its whole gradients are counted already.

        Returns:
            The bytes of the buffer, or of the gradients without one, which stay until the next reduction.
        """
        now, size = self.now, self.held.reduce_bytes(unit)
        now.unsharded -= 0 if self._keeps_weights else unit.whole
        # The reduce-scatter has two buffers: all gradients of the unit, and this rank's part of their sum.
        whole_grads = 0 if grads_are_there else unit.whole_grads
        buffers = buffer + (size if unit.packs_grads else 0) + size // max(1, self.scheme.num_shards)
        self.note("backward", unsharded=whole_grads, communication=buffers)
        if grads_are_there:
            now.unsharded -= unit.whole_grads
        # The sum of earlier micro-batches has gone into this reduction.
        if self.scheme.num_micro_batches > 1 and self.scheme.accumulates_unsharded:
            now.unsharded -= size
        is_cast = unit.stored_grads != size
        # A cast gradient is a tensor of its own until it was added to the one that waits, or copied to the host.
        if is_cast and (self.grads_wait or self.scheme.grads_on_host):
            waiting = 0 if unit.packs_grads or grads_are_there else unit.whole_grads  # until they are summed
            self.note("backward", unsharded=waiting, temporaries=unit.grads, communication=buffers)
        if not self.grads_wait and not self.scheme.grads_on_host:
            now.grads += unit.grads
        if self.scheme.num_copies > 1 and is_cast:
            now.communication += size // self.scheme.num_shards
        return size

    def note(self, phase: str, **more: int) -> None:
        """Keep this moment, with more of some parts, if it is the fullest of its phase."""
        moment = replace(self.now, **{part: getattr(self.now, part) + size for part, size in more.items()})
        if phase not in self.peaks or moment.total > self.peaks[phase].total:
            self.peaks[phase] = moment


def _distinct(use: PassBytes) -> list[nn.Module]:
    return list({id(layer): layer for layer, _ in use.layers}.values())


def _grad_bytes(layer: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in layer.parameters() if parameter.requires_grad)
