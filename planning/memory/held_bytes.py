"""The bytes of a model that a rank holds between steps, and those that each unit adds while it is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from planning.memory.layer_bytes import PassBytes
from planning.memory.optimizer_bytes import OptimizerBytes
from planning.memory.sharded_bytes import UnitBytes, unit_bytes, units_of
from policies.direct_collectives import why_not_reduced


@dataclass(frozen=True)
class Scheme:
    """How a system holds parameters, gradients and optimizer states on a rank."""

    kind: str  # "plain", "ddp" or "fully_shard", as in `policies.sharding.Layout`
    optimizer: OptimizerBytes
    num_shards: int = 1  # ranks that share one copy of the model
    num_copies: int = 1  # copies of the model over all ranks
    reshards_after_forward: bool = True
    compute_dtype: torch.dtype | None = None  # gathered weights are cast to it; None: they are not
    in_float8: frozenset[int] = frozenset()  # ids of parameters that are gathered in float8 instead
    replicated: frozenset[int] = frozenset()  # ids of those that stay whole on every rank, and are not gathered
    reduce_dtype: torch.dtype = torch.float32
    is_direct: bool = False  # --direct_collectives
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


class HeldBytes:
    """The bytes of a model's parameters, gradients and states on one rank, by sharding unit."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], scheme: Scheme) -> None:
        """
        Args:
            model: adapted, on the meta device, in the dtypes in which it is stored.
            units: the modules that are gathered one at a time, inner ones first.
        """
        self.scheme = scheme
        found, rest = units_of(model, units if scheme.shards else ())

        def measure(parameters: Sequence[nn.Parameter]) -> UnitBytes:
            found = unit_bytes(parameters, scheme.num_shards, scheme.compute_dtype, scheme.in_float8, scheme.replicated)
            return replace(found, packs_grads=self._packs_grads(parameters))

        self.root, self._of_root = measure(rest), set(map(id, rest))
        self.units = {unit: measure(parameters) for unit, parameters in found.items() if parameters}
        self.everything = (*self.units.values(), self.root)
        stored = 0 if scheme.params_on_host else sum(unit.stored for unit in self.everything)
        self.params = stored + sum(buffer.nbytes for buffer in model.buffers())
        self.grads = 0 if scheme.grads_on_host else sum(unit.grads for unit in self.everything)

    def units_of(self, layer: nn.Module) -> list[UnitBytes]:
        """The units that are gathered for a layer: itself and those inside it, or the one that holds it."""
        inside = set(map(id, layer.modules()))
        units = [unit for unit in self.units if id(unit) in inside]
        return [self.units[u] for u in units or [u for u in self.units if any(m is layer for m in u.modules())]]

    def outside(self, use: PassBytes) -> list[UnitBytes]:
        """The units that no layer needs: embeddings."""
        needed = {id(unit) for layer, _ in use.layers for unit in self.units_of(layer)}
        return [unit for unit in self.units.values() if id(unit) not in needed]

    def root_grads(self, layer: nn.Module) -> int:
        """Whole gradients of a layer's parameters that the root gathers."""
        if not self.scheme.shards:
            return 0
        of_root = (parameter for parameter in layer.parameters() if id(parameter) in self._of_root)
        return unit_bytes(of_root, 1, self.scheme.compute_dtype).whole_grads

    @property
    def gathers_directly(self) -> bool:
        """Whether weights arrive where they are used, without a buffer; float8 weights do not."""
        return self.scheme.is_direct and not self.scheme.in_float8

    def freed_late(self, whole: int) -> int:
        """Bytes of weights that forward has resharded, until the next unit has computed."""
        return whole if self.scheme.reshards_after_forward else 0

    def _packs_grads(self, parameters: Sequence[nn.Parameter]) -> bool:
        scheme = self.scheme
        sharded = [parameter for parameter in parameters if id(parameter) not in scheme.replicated]
        dtypes = (scheme.reduce_dtype, scheme.compute_dtype)
        reason = why_not_reduced(sharded, (scheme.num_copies, scheme.num_shards), *dtypes, scheme.in_float8)
        return not scheme.is_direct or reason is not None

    def prefetched(self, use: PassBytes, index: int) -> int:
        """The buffer of the layer before this one, which is gathered while this one computes its backward."""
        if not index or not self.scheme.reshards_after_forward:
            return 0
        return self.buffer(sum(unit.whole for unit in self.units_of(use.layers[index - 1][0])))

    def buffer(self, whole: int) -> int:
        """Bytes of the buffer that gathers `whole` bytes; a group of one rank copies without one."""
        return whole if self.scheme.shards and self.scheme.num_shards > 1 else 0

    def reduce_bytes(self, unit: UnitBytes) -> int:
        return self.scheme.reduce_dtype.itemsize * unit.num_trained
