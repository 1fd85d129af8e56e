"""What one rank's device does for a micro-batch and for an optimizer step, from the shapes of the model alone.

Three figures were measured on one H200 (docs/performance.md: TinyLlama-1.1B and Llama-3.1-8B, with and without
`--compile`; 13B at one row of 512 tokens; BART at one row) and are taken for all models and cards:

- How often the inputs and outputs of a matrix product pass through memory outside of it, forward and backward.
- What starting the kernels of a module takes the host. It decides if a micro-batch is small.
- What gathering and freeing a sharding unit takes the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from data.counts import BatchCounts
from planning.planned_model import PlannedModel
from policies.optimizers.build import state_bytes
from policies.wrapping import find_layers
from tasks.flops import flops_per_token
from utils.parameters import Counted, count_weights

MOVES_COMPILED, MOVES_EAGER = 7.6, 20.6
MODULE_SECONDS = 0.33e-3  # of a module without children, forward and backward; a third of it is forward
UNIT_SECONDS = 7e-3  # of a unit of fully_shard, forward and backward
COMPILED_LAUNCHES = 1 / 3  # of the kernels of uncompiled layers


@dataclass(frozen=True)
class MicroBatchWork:
    """Of one rank for one micro-batch, forward and backward."""

    matrix_flops: float
    attention_flops: float
    moved_bytes: float  # by kernels between matrix products
    weight_bytes: float  # that matrix products read, and gradients that they write, at least
    launch_seconds: float  # of the host, to start all kernels


@dataclass(frozen=True)
class OptimizerWork:
    """Of one rank for one optimizer step."""

    device_bytes: float  # read and written in device memory
    host_bytes: float  # the same in host memory, if the optimizer steps there
    transfer_bytes: float  # between the device and host memory


def micro_batch_work(planned: PlannedModel, counts: BatchCounts) -> MicroBatchWork:
    """The work of a micro-batch with these counts. NaN for models whose FLOPs are not counted (`tasks.image_text`)."""
    task, model = planned.resolved.task, planned.adapted.model
    compute_size = planned.resolved.policies.precision.compute_dtype.itemsize
    compiled, mode = planned.config.train_config.compile, planned.empty.checkpointing
    num_passes = 2 if mode == "off" else 3
    in_layers, last = _matrices_of_layers(planned.adapted.base)
    sides, bits = _sides(model), _bits(model)
    without_attention = counts._replace(num_attended_pairs=0, num_decoder_pairs=0, num_cross_pairs=0)

    def total(cost: Callable[[Counted], float]) -> float:
        return float(task.make_flops(model, cost).count(without_attention))

    def recomputed(matrix: Counted) -> float:
        """FLOPs per token. The last product of a layer is not recomputed: nothing in backward needs it."""
        if mode == "off" or id(matrix.parameter) not in in_layers or id(matrix.parameter) in last:
            return 0.0
        return 2 * matrix.num_weights * (1.0 if mode == "full" else 0.5)

    flops = total(flops_per_token)
    attention = float(task.make_flops(model).count(counts)) - flops
    matrices = list(count_weights(model))
    moves = (MOVES_COMPILED if compiled else MOVES_EAGER) * (1 + (num_passes - 2) / 3)
    moved = compute_size * moves * total(lambda m: sides.get(id(m.parameter), sum(m.parameter.shape)))
    # A packed weight is read and written out before each product that needs it.
    moved += sum(
        num_passes * m.num_weights * (bits[id(m.parameter)] / 8 + compute_size)
        for m in matrices
        if id(m.parameter) in bits
    )
    weights = sum(
        m.num_weights * compute_size * (num_passes + (1 if m.parameter.requires_grad else 0))
        for m in matrices
        if m.parameter.dim() > 1
    )
    return MicroBatchWork(
        matrix_flops=flops + total(recomputed),
        attention_flops=attention * (4 / 3 if mode == "full" else 1.0),
        moved_bytes=moved,
        weight_bytes=weights,
        launch_seconds=launch_seconds(planned, num_passes),
    )


def launch_seconds(planned: PlannedModel, num_passes: int) -> float:
    """What the host needs to start a micro-batch's kernels.

    Args:
        num_passes: 1 for forward alone, 2 with backward, 3 if layers are computed again.
    """
    modules = _num_leaves(planned.adapted.model)
    launches = MODULE_SECONDS * (COMPILED_LAUNCHES if planned.config.train_config.compile else 1.0)
    thirds = {1: 1, 2: 3, 3: 4}[num_passes]
    is_sharded = planned.resolved.policies.layout.kind == "fully_shard"
    units = len(planned.adapted.units) + 1 if is_sharded else 0
    return thirds / 3 * (modules * launches + units * UNIT_SECONDS)


def token_launch_seconds(planned: PlannedModel) -> float:
    """What the host needs to start the kernels of one generated token: an encoder has run before."""
    model, seconds = planned.adapted.model, launch_seconds(planned, num_passes=1)
    if not planned.resolved.model_config.is_encoder_decoder:
        return seconds
    return seconds * _num_leaves(planned.adapted.base.get_decoder()) / _num_leaves(model)


def _num_leaves(model: nn.Module) -> int:
    return sum(not any(module.children()) for module in model.modules())


def optimizer_work(planned: PlannedModel) -> OptimizerWork:
    """Of a step on this rank's part: gradients and weights are read, weights written, states read and written.

    The gradient norm reads gradients once more, and clipping writes them.
    """
    train, fsdp = planned.config.train_config, planned.config.fsdp_config
    layout = planned.resolved.policies.layout
    trained = [parameter for parameter in planned.adapted.model.parameters() if parameter.requires_grad]
    shares = layout.mesh_shape[1]
    own = sum(parameter.numel() * parameter.element_size() for parameter in trained) / shares
    states = sum(state_bytes(parameter, train, fsdp) for parameter in trained) / shares
    norm = own * (3 if train.gradient_clipping else 1)
    update = 3 * own + 2 * states
    if layout.cpu_offload:
        return OptimizerWork(0.0, update + norm, 0.0)  # what its layers copy is counted with the layout's traffic
    if fsdp.optimizer_cpu_offload:
        return OptimizerWork(norm, update, 2 * own)
    return OptimizerWork(update + norm, 0.0, 0.0)


def _matrices_of_layers(base: Any) -> tuple[set[int], set[int]]:
    """The ids of the weights of the repeated layers, and of each layer's last matrix."""
    inside, last = set(), set()
    for layer in find_layers(base):
        own = [parameter for parameter in layer.parameters() if parameter.dim() > 1]
        inside |= {id(parameter) for parameter in own}
        linears = [m.weight for m in layer.modules() if hasattr(m, "in_features") and not _is_adapter(m)]
        last |= {id(linears[-1])} if linears else set()
    return inside, last


def _is_adapter(module: Any) -> bool:
    """Whether a linear layer is a low-rank one: those of a layer itself have no side so short."""
    return bool(min(module.in_features, module.out_features) < 64)


def _sides(model: nn.Module) -> dict[int, int]:
    """Inputs and outputs of each linear layer, by its weight: a packed one does not have its shape."""
    linears = (m for m in model.modules() if hasattr(m, "in_features") and hasattr(m, "weight"))
    return {id(m.weight): m.in_features + m.out_features for m in linears}  # type: ignore[operator, misc]


def _bits(model: nn.Module) -> dict[int, int]:
    """Bits of each weight that is packed, by its parameter."""
    packed = (m for m in model.modules() if hasattr(m, "quantization") and hasattr(m, "stored_as"))
    return {id(m.weight): m.quantization.bits for m in packed}  # type: ignore[union-attr, misc]
