"""The work of a micro-batch of images and text, counted on the meta device, operator by operator.

No formula per token holds for such models: the vision encoder reads patches, a Q-Former its queries, and the language
model the features made of them. A frozen encoder before everything that is trained has no backward pass. So the whole
model runs forward and backward over a micro-batch without values, and each product is counted as
torch.utils.flop_counter counts it: recomputed ones included, without gradients that nobody asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from data.batches.counts import BatchCounts, causal_pairs
from planning.cost.step_work import (
    MicroBatchWork,
    bytes_per_side,
    float8_weight_bytes,
    launch_seconds,
    packed_bytes,
    passes,
    thirds,
)
from planning.machines.cards import Card
from planning.memory.device_kernels import FUSED_ATTENTION, FUSED_ATTENTION_BACKWARD
from planning.memory.meta_pass import pass_on_meta
from planning.memory.row_lengths import RowLengths
from planning.memory.sharded_bytes import add_statistics
from planning.model.float8_weights import float8_weights
from planning.model.planned_model import PlannedModel
from utils.parameters import count_weights

_aten = torch.ops.aten
_ATTENTION_PRODUCTS = {_aten.bmm.default, _aten.baddbmm.default}


class CountedWork(NamedTuple):
    """A micro-batch's counts and its work."""

    counts: BatchCounts
    work: MicroBatchWork


@dataclass
class _Leaf:
    """The forward of a module without children."""

    num_rows: int = 0  # vectors of its output
    has_backward: bool = False


class _Products(TorchDispatchMode):
    """Counts the FLOPs of products, those of attention apart."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = self.attention = self.causal_attention = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = function(*args, **kwargs)
        if function in (FUSED_ATTENTION, FUSED_ATTENTION_BACKWARD):
            query, key, value, *_, is_causal = args
            products = 2 if function is FUSED_ATTENTION else 4
            flops = products * _attention_product(query, key, value, is_causal=is_causal)
            if is_causal:
                self.causal_attention += flops
            else:
                self.attention += flops
        elif formula := flop_registry.get(function._overloadpacket):
            flops = formula(*args, **kwargs, out_val=outputs)
            if function in _ATTENTION_PRODUCTS:
                self.attention += flops
            else:
                self.matrix += flops
        return outputs


def _attention_product(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> float:
    """FLOPs of one of the products of attention: queries with keys, or probabilities with values, on average.

    Backward has four (`tasks.flops.StepFlops`): what a kernel computes again to save memory is not counted.
    """
    batch, heads, num_queries, width = query.shape
    pairs = num_queries * key.shape[2]
    if is_causal and num_queries == key.shape[2]:
        pairs = causal_pairs(num_queries)
    return float(batch * heads * pairs * (width + value.shape[-1]))


def counted_work(
    planned: PlannedModel,
    card: Card,
    num_rows: int,
    widths: tuple[int, ...],
    rows: RowLengths,
    *,
    trains: bool = True,
    attended_share: float = 1.0,
) -> CountedWork:
    """The work of one rank for a micro-batch of this shape, forward and backward.

    Args:
        planned: its model; it gets the buffers of packed weights here, if it has not yet.
        rows: the run's: its share of label tokens, and whether rows are packed.
        trains: False: of an evaluation's batch, forward alone.
        attended_share: of the pairs of causal attention in whole rows, those that the documents in them have.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    model = planned.adapted.model
    if rows.images is not None:
        rows = replace(rows, images=rows.images._replace(of_each=rows.images.typical))
    add_statistics(model)
    leaves: dict[int, _Leaf] = {}
    with (
        pass_on_meta(planned, card, num_rows, widths, rows, trains=trains) as (batch, compute),
        _Products() as products,
    ):
        with torch.set_grad_enabled(trains), _watched(model, leaves):
            loss = compute()
        if trains:
            loss.backward()
    # The next pass over this model must not add to them.
    for parameter in model.parameters():
        parameter.grad = None
    num_passes = passes(planned) if trains else 1.0
    of_weights = _by_weight(model, leaves)
    num_forward_only = sum(leaf.num_rows > 0 and not leaf.has_backward for leaf in leaves.values())
    work = MicroBatchWork(
        matrix_flops=products.matrix,
        attention_flops=products.attention + attended_share * products.causal_attention,
        moved_bytes=bytes_per_side(planned) * _sides(of_weights, num_passes)
        + packed_bytes(planned, num_passes)
        + float8_weight_bytes(planned),
        weight_bytes=_weight_bytes(planned, of_weights, num_passes),
        launch_seconds=launch_seconds(planned, num_passes, num_forward_only),
        float8_flops=_float8_flops(planned, of_weights, num_passes),
    )
    return CountedWork(BatchCounts(*(getattr(batch, name) for name in BatchCounts._fields)), work)


@contextmanager
def _watched(model: nn.Module, leaves: dict[int, _Leaf]) -> Iterator[None]:
    """Inside this context each call of a module without children is noted in `leaves`, by the module's id."""

    def note(leaf: _Leaf, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.dim():
            leaf.num_rows += output.numel() // output.shape[-1]
            leaf.has_backward |= output.requires_grad

    hooks = []
    for module in model.modules():
        if not any(module.children()):
            leaf = leaves[id(module)] = _Leaf()
            hooks.append(module.register_forward_hook(partial(note, leaf)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _by_weight(model: nn.Module, leaves: Mapping[int, _Leaf]) -> dict[int, tuple[_Leaf, int]]:
    """The forward of each linear layer, and its number of inputs and outputs, by the id of its weight.

    The two matrices of an adapter are no calls of modules (policies/adapters/lora_products.py); they meet the rows of
    their layer. Those of experts are left out, as experts are: how many rows meet them, no module says.
    """
    found: dict[int, tuple[_Leaf, int]] = {}
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "in_features") and id(module) in leaves:
            found[id(module.weight)] = leaves[id(module)], module.in_features + module.out_features
    for layer in modules:
        base = getattr(layer, "base_layer", None)
        if base is not None and hasattr(base, "weight") and hasattr(layer, "lora_A"):
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                of_layer = _Leaf(found[id(base.weight)][0].num_rows, has_backward=True)
                found[id(part.weight)] = of_layer, sum(part.weight.shape)
    return found


def _sides(of_weights: Mapping[int, tuple[_Leaf, int]], num_passes: float) -> float:
    """Inputs and outputs of all matrix products. Forward alone counts a third, as in `step_work.thirds`."""
    of_leaf = {True: thirds(num_passes), False: 1.0}
    return sum(leaf.num_rows * sides * of_leaf[leaf.has_backward] / 3 for leaf, sides in of_weights.values())


def _weight_bytes(planned: PlannedModel, of_weights: Mapping[int, tuple[_Leaf, int]], num_passes: float) -> float:
    """Bytes of the weights in matrix products, read in each pass, and of their gradients."""
    size, total = planned.resolved.policies.precision.compute_dtype.itemsize, 0.0
    for matrix in count_weights(planned.adapted.model):
        if id(matrix.parameter) in of_weights:
            has_backward = of_weights[id(matrix.parameter)][0].has_backward
            # Read in each pass; the gradient of a trained one is written once (True counts as 1).
            times = num_passes + matrix.parameter.requires_grad if has_backward else 1.0
            total += matrix.num_weights * size * times
    return total


def _float8_flops(planned: PlannedModel, of_weights: Mapping[int, tuple[_Leaf, int]], num_passes: float) -> float:
    """FLOPs of products in float8: forward, gradients of inputs and of trained weights, recomputed ones."""
    float8, total = float8_weights(planned.adapted, planned.resolved).computed, 0.0
    for matrix in count_weights(planned.adapted.model):
        if id(matrix.parameter) in float8 and id(matrix.parameter) in of_weights:
            leaf, _ = of_weights[id(matrix.parameter)]
            times = num_passes + matrix.parameter.requires_grad if leaf.has_backward else 1
            total += 2 * matrix.num_weights * leaf.num_rows * times
    return total
