"""A rank's memory through a step: a walk over the layers in the order in which they run, in closed form.

| held                  | by                      | when                                                             |
|-----------------------|-------------------------|------------------------------------------------------------------|
| parameters            | every layout            | always                                                           |
| optimizer states      | every layout            | always, but for forward and backward of the first step           |
| gradients             | DistributedDataParallel | always: they are views of its buckets                            |
|                       | other layouts           | from a layer's backward to the end of the step                   |
| gathered weights      | `fully_shard`           | of a unit, while it computes; of the root, from forward to the   |
|                       |                         | end of backward; of all units, if forward does not reshard, and  |
|                       |                         | then until the end of the step's last backward                   |
| all-gather buffer     | `fully_shard`           | in forward, of the unit that computes (freed after the next one  |
|                       |                         | arrives); in backward, of the unit that is prefetched            |
| whole gradients       | `fully_shard`           | of a unit, until they are reduced; of the root, until the end    |
| reduce-scatter buffer | `fully_shard`           | of one unit, until the next one's gradients are there            |
| all-reduce buffers    | copies of `fully_shard` | of all units until the end of backward, unless gradients are     |
|                       |                         | stored in the dtype in which they are reduced                    |

Source for `fully_shard`: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from planning.memory.layer_use import StepUse, Use
from planning.memory.memory_plan import Parts
from planning.memory.optimizer_bytes import OptimizerBytes
from planning.memory.sharded_bytes import UnitBytes, unit_bytes, units_of
from utils.units import GIB


@dataclass(frozen=True)
class Scheme:
    """How a system holds parameters, gradients and optimizer states on a rank."""

    kind: str  # "plain", "ddp" or "fully_shard", as in `policies.sharding.Layout`
    optimizer: OptimizerBytes
    num_shards: int = 1  # ranks that share one copy of the model
    num_copies: int = 1  # copies of the model over all ranks
    reshards_after_forward: bool = True
    compute_dtype: torch.dtype | None = None  # what gathered weights are cast to; None: they are not
    in_float8: frozenset[int] = frozenset()  # ids of parameters that are gathered in float8 instead
    reduce_dtype: torch.dtype = torch.float32
    num_micro_batches: int = 1
    accumulates_unsharded: bool = True
    keeps_weights: bool = False  # all that were gathered stay until the step's last backward
    bucket_views: bool = True  # DistributedDataParallel(gradient_as_bucket_view=True)
    holds_grads: bool = False  # gradients stay until the next step's first forward is over, not until its beginning
    params_on_host: bool = False
    grads_on_host: bool = False  # gradients that wait for the optimizer

    @property
    def shards(self) -> bool:
        return self.kind == "fully_shard"


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


class Timeline:
    """Walks through a step. `peaks` holds the fullest moment of each phase, `after_forward` that of the ledger."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], scheme: Scheme) -> None:
        """
        Args:
            model: adapted, on the meta device, in the dtypes in which it is stored.
            units: the modules that are gathered one at a time, inner ones first.
        """
        self.scheme = scheme
        found, rest = units_of(model, units if scheme.shards else ())

        def measure(parameters: Sequence[nn.Parameter]) -> UnitBytes:
            return unit_bytes(parameters, scheme.num_shards, scheme.compute_dtype, scheme.in_float8)

        self.root, self._of_root = measure(rest), set(map(id, rest))
        self.units = {unit: measure(parameters) for unit, parameters in found.items() if parameters}
        self.everything = (*self.units.values(), self.root)
        self.grads = 0 if scheme.grads_on_host else sum(unit.grads for unit in self.everything)
        stored = 0 if scheme.params_on_host else sum(unit.stored for unit in self.everything)
        self.now = Bytes(
            params=stored + sum(buffer.nbytes for buffer in model.buffers()), optimizer=scheme.optimizer.states
        )
        if scheme.kind == "ddp" and scheme.bucket_views:
            self.now.grads = self.grads
        elif scheme.kind == "ddp":
            self.now.communication = self.grads
        self.peaks: dict[str, Bytes] = {}
        self.after_forward = Bytes()
        self._grads_wait = scheme.kind == "ddp" and scheme.bucket_views  # no backward makes them anew
        self._keeps = False  # what was gathered, behind backward

    def step(self, use: StepUse) -> None:
        """Walk through the micro-batches of a step, and the step of the optimizer."""
        self._micro_batches(use)
        self._note("optimizer_step", temporaries=self.scheme.optimizer.temporaries)

    def first_step(self, use: StepUse) -> None:
        """Walk through the micro-batches of the first step: the optimizer's states come behind them. Call this before
        `step`."""
        before, waited = replace(self.now), self._grads_wait
        self.now.optimizer = 0
        self._micro_batches(use)
        self.now, self._grads_wait = before, waited

    def micro_batch(self, use: StepUse, *, first: bool = True, notes_peaks: bool = True) -> None:
        """Walk through the forward pass of a micro-batch, to see what is there after it. Call this before `step`.

        Args:
            first: of its step; else gradients of earlier ones are there.
            notes_peaks: False for a mean over all steps, which the first may have made wider than the fullest of the
                others.
        """
        before, waited, peaks = replace(self.now), self._grads_wait, dict(self.peaks)
        if not first:
            self._grads_stay()
        elif self.scheme.holds_grads and not waited:
            self.now.grads += self.grads
        self._forward(use)
        self.after_forward, self.now, self._grads_wait = self.now, before, waited
        self.peaks = self.peaks if notes_peaks else peaks

    def evaluation(self, use: StepUse) -> None:
        """Walk through an evaluation's forward pass. Call this before `step`."""
        before = replace(self.now)
        self._forward(use, phase="evaluation")
        self.now = before

    def generation(self, cache: int, peak: int, free_bytes: int) -> None:
        """Walk through the generation of an evaluation. Call this before `step`.

        Sharded weights are gathered once if they take at most half of the free memory, else layer by layer
        (`policies.generating`).

        Args:
            cache, peak: as of `GenerationUse`.
            free_bytes: of the device, less what it holds beside tensors.
        """
        unsharded = communication = 0
        if self.scheme.shards:
            largest = max((unit.whole for unit in self.units.values()), default=0)
            communication = self._buffer(largest)
            unsharded = sum(unit.whole for unit in self.everything)
            if 2 * unsharded > free_bytes - self.now.total:
                unsharded = self.root.whole + largest
        self._note(
            "generation", activations=cache, temporaries=peak - cache, unsharded=unsharded, communication=communication
        )

    def _micro_batches(self, use: StepUse) -> None:
        """The last one of a step, and one before it if weights stay gathered behind that one's backward."""
        if self.scheme.keeps_weights and self.scheme.num_micro_batches > 1:
            before, waited = replace(self.now), self._grads_wait
            self._keeps = True
            self._whole_micro_batch(use)
            self.now, self._grads_wait, self._keeps = before, waited, False
        self._whole_micro_batch(use)

    def _whole_micro_batch(self, use: StepUse) -> None:
        if self.scheme.num_micro_batches > 1:
            self._grads_stay()
        self._forward(use)
        self._backward(use)

    def _grads_stay(self) -> None:
        """Gradients of earlier micro-batches of the step are there."""
        if self._grads_wait:
            return
        if self.scheme.shards and self.scheme.accumulates_unsharded:
            self.now.unsharded += sum(map(self._reduce_bytes, self.everything))
        else:
            self._grads_wait = True
            self.now.grads += self.grads

    def _forward(self, use: StepUse, phase: str = "forward") -> None:
        now, scheme = self.now, self.scheme
        now.activations += use.beside
        if scheme.shards:
            now.unsharded += self.root.whole
            if not scheme.reshards_after_forward:
                now.unsharded += sum(unit.whole for unit in self._outside(use))
        seen: set[int] = set()
        buffer = self._buffer(self.root.whole)
        leaving = 0  # of the layer before, on its way to host memory
        for layer, of_layer in use.layers:
            whole = sum(unit.whole for unit in self._units_of(layer) if id(unit) not in seen)
            now.unsharded += whole
            buffer = self._buffer(whole) or buffer
            self._note(phase, temporaries=of_layer.forward + leaving, communication=buffer)
            now.activations += of_layer.kept
            leaving = of_layer.moved
            if scheme.reshards_after_forward:
                now.unsharded -= whole
            else:
                seen.update(id(unit) for unit in self._units_of(layer))
        now.activations += leaving
        self._note(phase, temporaries=use.loss.forward, communication=buffer)
        now.activations += use.loss.kept

    def _backward(self, use: StepUse) -> None:
        now, scheme, reduced, communication = self.now, self.scheme, 0, self.now.communication
        comes = not self._grads_wait and not scheme.grads_on_host  # whether backward adds gradients that stay
        self._backward_of(use.loss, communication=self._prefetched(use, len(use.layers)))
        now.activations -= use.layers[-1][1].moved if use.layers else 0  # it counts with its layer's backward
        if scheme.shards:
            now.unsharded += self.root.whole_grads - sum(map(self._root_grads, _distinct(use)))
        elif comes:  # those of the head; the embedding's come last
            outside = self.grads - sum(map(_grad_bytes, _distinct(use)))
            now.grads += outside - min(outside, use.embedding_backward)
        left = {id(layer): sum(layer is other for other, _ in use.layers) for layer, _ in use.layers}
        for index in range(len(use.layers) - 1, -1, -1):
            layer, of_layer = use.layers[index]
            left[id(layer)] -= 1
            units = self._units_of(layer)
            if scheme.reshards_after_forward:
                now.unsharded += sum(unit.whole for unit in units)
            buffer = self._prefetched(use, index)
            arriving = use.layers[index - 1][1].moved if index else 0
            self._backward_of(of_layer, communication=buffer + reduced, arriving=arriving)
            if not left[id(layer)]:
                now.unsharded += self._root_grads(layer)
                now.grads += _grad_bytes(layer) if comes and not scheme.shards else 0
            for unit in units:
                reduced = self._reduce(unit, buffer)
        if scheme.shards:
            for unit in (*self._outside(use), self.root):
                now.unsharded += 0 if unit is self.root else unit.whole_grads
                now.unsharded += 0 if unit is self.root or not scheme.reshards_after_forward else unit.whole
                self._note("backward", communication=reduced)
                now.unsharded += 0 if unit is self.root else -unit.whole_grads
                reduced = self._reduce(unit, 0, grads_are_there=unit is self.root)
        else:
            self._note("backward", temporaries=use.embedding_backward)
            if comes:
                now.grads = self.grads
        now.activations -= use.beside
        now.communication = communication

    def _backward_of(self, use: Use, communication: int, arriving: int = 0) -> None:
        """The fullest moment of one layer's backward, or the loss's; then what it kept is gone.

        Args:
            arriving: of the layer before, on its way back from host memory.
        """
        grads, temporaries = use.backward_with_grads - use.backward, use.backward - use.kept + arriving
        if self.scheme.shards:
            self._note("backward", temporaries=temporaries, unsharded=grads, communication=communication)
        else:
            grads = 0 if self._grads_wait else grads
            self._note("backward", temporaries=temporaries, grads=grads, communication=communication)
        self.now.activations -= use.kept

    def _reduce(self, unit: UnitBytes, buffer: int, *, grads_are_there: bool = False) -> int:
        """Reduce a unit's gradients, whose weights are sharded again first.

        Args:
            buffer: of the all-gather that runs meanwhile.
            grads_are_there: its whole gradients are counted already.

        Returns:
            The bytes of the buffer, which stays until the next reduction.
        """
        now, size = self.now, self._reduce_bytes(unit)
        now.unsharded -= 0 if self._keeps else unit.whole
        whole_grads = 0 if grads_are_there else unit.whole_grads
        self._note(
            "backward", unsharded=whole_grads, communication=buffer + size + size // max(1, self.scheme.num_shards)
        )
        if grads_are_there:
            now.unsharded -= unit.whole_grads
        if self.scheme.num_micro_batches > 1 and self.scheme.accumulates_unsharded:
            now.unsharded -= size
        is_cast = unit.stored_grads != size
        if is_cast and (self._grads_wait or self.scheme.grads_on_host):  # what is added, or copied, is one tensor more
            num_bytes = buffer + size + size // max(1, self.scheme.num_shards)
            self._note("backward", temporaries=unit.grads, communication=num_bytes)
        if not self._grads_wait and not self.scheme.grads_on_host:
            now.grads += unit.grads
        if self.scheme.num_copies > 1 and is_cast:
            now.communication += size // self.scheme.num_shards
        return size

    def _note(self, phase: str, **more: int) -> None:
        """Keep this moment, with more of some parts, if it is the fullest of its phase."""
        moment = replace(self.now, **{part: getattr(self.now, part) + size for part, size in more.items()})
        if phase not in self.peaks or moment.total > self.peaks[phase].total:
            self.peaks[phase] = moment

    def _units_of(self, layer: nn.Module) -> list[UnitBytes]:
        """The units that are gathered for a layer: itself and those inside it, or the one that holds it."""
        inside = set(map(id, layer.modules()))
        units = [unit for unit in self.units if id(unit) in inside]
        return [self.units[u] for u in units or [u for u in self.units if any(m is layer for m in u.modules())]]

    def _outside(self, use: StepUse) -> list[UnitBytes]:
        """The units that no layer needs: embeddings."""
        needed = {id(unit) for layer, _ in use.layers for unit in self._units_of(layer)}
        return [unit for unit in self.units.values() if id(unit) not in needed]

    def _root_grads(self, layer: nn.Module) -> int:
        """Whole gradients of a layer's parameters that the root gathers."""
        if not self.scheme.shards:
            return 0
        of_root = (parameter for parameter in layer.parameters() if id(parameter) in self._of_root)
        return unit_bytes(of_root, 1, self.scheme.compute_dtype).whole_grads

    def _prefetched(self, use: StepUse, index: int) -> int:
        """The buffer of the layer before this one, which is gathered while this one computes its backward."""
        if not index or not self.scheme.reshards_after_forward:
            return 0
        return self._buffer(sum(unit.whole for unit in self._units_of(use.layers[index - 1][0])))

    def _buffer(self, whole: int) -> int:
        """The buffer that gathers so many bytes; a group of one rank copies without one."""
        return whole if self.scheme.shards and self.scheme.num_shards > 1 else 0

    def _reduce_bytes(self, unit: UnitBytes) -> int:
        return self.scheme.reduce_dtype.itemsize * unit.num_trained


def _distinct(use: StepUse) -> list[nn.Module]:
    return list({id(layer): layer for layer, _ in use.layers}.values())


def _grad_bytes(layer: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in layer.parameters() if parameter.requires_grad)
