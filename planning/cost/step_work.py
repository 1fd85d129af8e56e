"""The work of one rank's device for a micro-batch and for an optimizer step, from the shapes of the model alone.

Three figures were measured on one H200 (docs/performance.md: TinyLlama-1.1B and Llama-3.1-8B, with and without
`--compile`; 13B at one row of 512 tokens; BART at one row) and are taken for all models and cards:

- How often the inputs and outputs of a matrix product pass through memory outside of it, forward and backward.
- The host's time to start the kernels of a module. It decides if a micro-batch is small.
- The host's time to gather and free a sharding unit of uncompiled layers.

Two were measured on H100s: the host's time to start the kernels of a layer's experts (Qwen3-30B-A3B by QLoRA at one row
of 4096 tokens, 14,000 kernels; they sort rows, and compiled code calls each of their products as an operator), and its
time for a unit of compiled layers (16 layers of it, LoRA on attention, two GPUs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from data.batches.counts import BatchCounts
from planning.cost.kernel_rates import KernelRates
from planning.model.float8_weights import float8_weights
from planning.model.planned_model import PlannedModel, gathered_in, layers_and_modes
from policies.attention.choice import WITHOUT_MASKS
from policies.optimizers.build import state_bytes
from policies.optimizers.kind import kind_of
from policies.quantization.float8_linear import FrozenFloat8Linear
from policies.tiling.tiles import tiled_parts
from tasks.flops import StepFlops, flops_per_token, matrices_of, visited_length
from utils.parameters import Counted, count_weights, packed_weights

MOVES_COMPILED, MOVES_EAGER = 7.6, 20.6
MODULE_SECONDS = 0.33e-3  # of a module without children, forward and backward; a third of it is forward
EXPERTS_SECONDS = 2.5e-3  # of the experts of a mixture's layer, forward and backward
ADAPTED_EXPERTS_SECONDS = 5.4e-3  # the same with adapters, or in 4 bits
UNIT_SECONDS = 7e-3  # of a unit of fully_shard, forward and backward
# 37,370 tokens/s of 2 x 4096 are 219 ms a step: 38 communication by the plan, 60 modules, 40 experts, and 18 units.
COMPILED_UNIT_SECONDS = 4.5e-3
COMPILED_LAUNCHES = 1 / 3  # of the kernels of uncompiled layers
RECOMPUTED = {"off": 0.0, "selective": 0.5, "full": 1.0}  # of a layer's matrix products
ROUNDING_BYTES = 5
"""Bytes for each bf16 number that a float8 product reads: read for the scale, read again, written in one byte."""


@dataclass(frozen=True)
class MicroBatchWork:
    """The work of one rank for one micro-batch: forward and backward, or forward alone."""

    matrix_flops: float
    attention_flops: float
    moved_bytes: float  # by kernels between matrix products
    weight_bytes: float  # that matrix products read, and gradients that they write, at least
    launch_seconds: float  # of the host, to start all kernels
    float8_flops: float = 0.0  # of the matrix products, those in float8
    sequence_length: float = 0.0  # tokens of those that attention visits, on average; 0: not known, so short

    def device_seconds(self, rates: KernelRates) -> tuple[float, float, float]:
        """Seconds of matrix products, of attention and of all other kernels, at these rates."""
        # A product with few rows takes as long as reading its weights.
        matrix = (self.matrix_flops - self.float8_flops) / rates.matrix_flops + self.float8_flops / rates.float8_flops
        matrix = max(matrix, self.weight_bytes / rates.memory_bytes)
        attention = self.attention_flops / rates.attention_flops(self.sequence_length)
        return matrix, attention, self.moved_bytes / rates.memory_bytes


@dataclass(frozen=True)
class OptimizerWork:
    """The work of one rank for one optimizer step."""

    device_bytes: float  # read and written in device memory
    host_bytes: float  # the same in host memory, if the optimizer steps there
    transfer_bytes: float  # between the device and host memory
    product_flops: float = 0.0  # of its own matrix products, in bf16
    exchanged_bytes: float = 0.0  # of whole parameters that ranks gather and send
    num_exchanges: int = 0


def _computed_twice(planned: PlannedModel) -> set[int]:
    """The ids of the head's parameters, if training computes it twice (`policies.loss.objectives`)."""
    head = [matrix.parameter for matrix in matrices_of(planned.adapted.model)[0]]
    in_fp16 = planned.resolved.policies.precision.compute_dtype == torch.float16
    is_twice = in_fp16 or any(parameter.requires_grad for parameter in head)
    return {id(p) for p in head} if planned.resolved.task.COMPUTES_TRAINED_HEAD_TWICE and is_twice else set()


def micro_batch_work(planned: PlannedModel, counts: BatchCounts, *, trains: bool = True) -> MicroBatchWork:
    """The work of a micro-batch with these counts, in closed form: for models of text alone. Those of images are
    counted (`planning.cost.counted_work`).

    Args:
        trains: False: of an evaluation's batch, forward alone.
    """
    task, model = planned.resolved.task, planned.adapted.model
    compute_size = planned.resolved.policies.precision.compute_dtype.itemsize
    mode_of, last = _matrices_of_layers(planned)
    tiled = {id(p) for part in tiled_parts(planned.adapted.base) for p in part.parameters()}
    num_passes = passes(planned) if trains else 1.0
    float8 = float8_weights(planned.adapted, planned.resolved)
    of_head = _computed_twice(planned)
    without_attention = counts._replace(num_attended_pairs=0, num_decoder_pairs=0, num_cross_pairs=0)

    def total(cost: Callable[[Counted], float]) -> float:
        return float(task.make_flops(model, cost).count(without_attention))

    def recomputed(matrix: Counted) -> float:
        """FLOPs per token. The last product of a layer is not recomputed: nothing in backward needs it. A tile is
        computed again as a whole, in any mode."""
        if trains and id(matrix.parameter) in tiled | of_head:
            return 2 * matrix.num_weights
        if not trains or id(matrix.parameter) in last:
            return 0.0
        return 2 * matrix.num_weights * RECOMPUTED[mode_of.get(id(matrix.parameter), "off")]

    def in_float8(matrix: Counted) -> float:
        """FLOPs per token, those computed again included."""
        if id(matrix.parameter) not in float8.computed:
            return 0.0
        return (flops_per_token(matrix) if trains else 2 * matrix.num_weights) + recomputed(matrix)

    def rounded_by_float8(matrix: Counted) -> float:
        return ROUNDING_BYTES * _sides(matrix) if id(matrix.parameter) in float8.computed else 0.0

    flops = total(flops_per_token if trains else lambda matrix: 2 * matrix.num_weights)
    # The difference of the counts with and without pairs.
    step = task.make_flops(model)
    attention = float(step.count(counts)) - total(flops_per_token)
    model_config = planned.adapted.base.config
    sequence_length = visited_length(counts)
    skips = model_config.get_text_config()._attn_implementation in WITHOUT_MASKS
    if isinstance(step, StepFlops) and not skips:  # masks cut windows, and kernels compute what is cut
        attention /= step.share_in_windows(counts)
    # Forward is a third of an attention's FLOPs (`tasks.flops.StepFlops`).
    attention *= 1 if trains else 1 / 3
    moved = total(_sides)
    weights = sum(
        m.num_weights * compute_size * (num_passes + (1 if trains and m.parameter.requires_grad else 0))
        for m in count_weights(model)
        if m.parameter.dim() > 1
    )
    return MicroBatchWork(
        matrix_flops=flops + total(recomputed),
        attention_flops=attention * (1 + (_share_of_layers(planned, "full") / 3 if trains else 0)),
        moved_bytes=thirds(num_passes) / 3 * (moved * bytes_per_side(planned) + total(rounded_by_float8))
        + packed_bytes(planned, num_passes)
        + float8_weight_bytes(planned),
        weight_bytes=weights,
        launch_seconds=launch_seconds(planned, num_passes),
        float8_flops=total(in_float8),
        sequence_length=sequence_length,
    )


def passes(planned: PlannedModel) -> float:
    """Passes over the model in a micro-batch: forward and backward, and as many layers as are computed again."""
    return 2 + _share_of_layers(planned, "selective", "full")


def thirds(num_passes: float) -> float:
    """The passes in units of a third of forward and backward: forward is one, backward two, recomputing one more."""
    return num_passes if num_passes == 1 else num_passes + 1


def bytes_per_side(planned: PlannedModel) -> float:
    """Bytes that other kernels move, forward and backward, for each input and each output of a matrix product."""
    moves = MOVES_COMPILED if planned.config.train_config.compile else MOVES_EAGER
    return moves * planned.resolved.policies.precision.compute_dtype.itemsize


def float8_weight_bytes(planned: PlannedModel) -> float:
    """Bytes that rounding and transposing the weights of float8 products moves, once for each micro-batch: trained ones
    are read twice and written, and all are transposed for backward."""
    float8 = float8_weights(planned.adapted, planned.resolved).computed
    matrices = (m for m in count_weights(planned.adapted.model) if id(m.parameter) in float8)
    return sum(m.num_weights * (ROUNDING_BYTES + 2 if m.parameter.requires_grad else 2) for m in matrices)


def packed_bytes(planned: PlannedModel, num_passes: float) -> float:
    """Bytes of packed weights, each read and written out before each product that needs it."""
    model, written = planned.adapted.model, planned.resolved.policies.precision.compute_dtype.itemsize
    bits = _bits(model)
    packed = (matrix for matrix in count_weights(model) if id(matrix.parameter) in bits)
    return sum(num_passes * m.num_weights * (bits[id(m.parameter)] / 8 + written) for m in packed)


def launch_seconds(planned: PlannedModel, num_passes: float, num_forward_only: int = 0) -> float:
    """Seconds that the host needs to start a micro-batch's kernels.

    Args:
        num_passes: 1 for forward alone, 2 with backward, 3 if all layers are computed again.
        num_forward_only: modules without children that have no backward pass.
    """
    modules = _num_leaves(planned.adapted.model) - num_forward_only
    is_compiled = planned.config.train_config.compile
    launches = MODULE_SECONDS * (COMPILED_LAUNCHES if is_compiled else 1.0)
    is_sharded = planned.resolved.policies.layout.kind == "fully_shard"
    units = len(gathered_in(planned)) + 1 if is_sharded else 0
    of_units = units * (COMPILED_UNIT_SECONDS if is_compiled else UNIT_SECONDS)
    each = modules * launches + of_units + _experts_seconds(planned.adapted.model)
    return (thirds(num_passes) * each + num_forward_only * launches) / 3


def token_launch_seconds(planned: PlannedModel) -> float:
    """Seconds that the host needs to start the kernels of one generated token: encoders have run before."""
    model, base, seconds = planned.adapted.model, planned.adapted.base, launch_seconds(planned, num_passes=1)
    if not (planned.resolved.model_config.is_encoder_decoder or planned.resolved.task.READS_IMAGES):
        return seconds
    return seconds * _num_leaves(base.get_decoder()) / _num_leaves(model)


def _experts_seconds(model: nn.Module) -> float:
    """Of the experts of all layers, adapters around them or not."""
    mixtures = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
    return sum(ADAPTED_EXPERTS_SECONDS if _are_adapted(experts) else EXPERTS_SECONDS for experts in mixtures)


def _are_adapted(experts: nn.Module) -> bool:
    """Whether they are trained by adapters, or packed."""
    parameters = list(experts.parameters())
    is_packed = any(packed_weights(module) for module in experts.modules())
    return is_packed or (any(p.requires_grad for p in parameters) and not all(p.requires_grad for p in parameters))


def _num_leaves(model: nn.Module) -> int:
    return sum(not any(module.children()) for module in model.modules())


def optimizer_work(planned: PlannedModel) -> OptimizerWork:
    """The work of a step on this rank's part: gradients and weights are read, weights written, states read and written.

    The gradient norm reads gradients once more. Clipping reads and writes them; AdamW's fused kernel only writes them,
    and its compiled one does not.
    """
    train, fsdp = planned.config.train_config, planned.config.fsdp_config
    layout = planned.resolved.policies.layout
    trained = [parameter for parameter in planned.adapted.model.parameters() if parameter.requires_grad]
    shares = layout.mesh_shape[1]
    own = sum(parameter.numel() * parameter.element_size() for parameter in trained) / shares
    states = sum(state_bytes(parameter, train, fsdp) for parameter in trained) / shares
    in_step = kind_of(fsdp.optimizer).clips_in_step and not fsdp.optimizer_cpu_offload
    clipping = 0 if fsdp.compile_optimizer else 1 if in_step else 2
    norm = own * (1 + (clipping if train.gradient_clipping else 0))
    update = 3 * own + 2 * states
    if layout.cpu_offload:
        return OptimizerWork(0.0, update + norm, 0.0)  # copies of its layers are counted with the layout's traffic
    if fsdp.optimizer_cpu_offload:
        return OptimizerWork(norm, update, 2 * own)
    kind = kind_of(fsdp.optimizer)
    flops = sum(map(kind.product_flops, trained)) / shares  # ranks that share parameters take turns
    whole = [p for p in trained if kind.product_flops(p)] if kind.steps_whole and shares > 1 else []
    exchanged = 2 * 2 * sum(parameter.numel() for parameter in whole)  # bf16, gathered once and sent once
    return OptimizerWork(update + norm, 0.0, 0.0, flops, exchanged, 2 * len(whole))


def _share_of_layers(planned: PlannedModel, *modes: str) -> float:
    """The fraction of the repeated layers that have one of these modes."""
    of_layers = [mode for _, mode in layers_and_modes(planned)]
    return sum(mode in modes for mode in of_layers) / max(1, len(of_layers))


def _matrices_of_layers(planned: PlannedModel) -> tuple[dict[int, str], set[int]]:
    """By the ids of the weights of the repeated layers, how their layer is checkpointed; and each layer's last matrix.

    Inner layers come last: they are in the layers that hold them, too.
    """
    mode_of, last = dict[int, str](), set[int]()
    for layer, mode in layers_and_modes(planned):
        mode_of |= {id(parameter): mode for parameter in layer.parameters() if parameter.dim() > 1}
        of_adapters = _modules_of_adapters(layer)
        modules = [m for m in layer.modules() if m not in of_adapters]
        linears = [m.weight for m in modules if hasattr(m, "in_features") and hasattr(m, "weight")]
        last |= {id(linears[-1])} if linears else set()
    return mode_of, last


def _modules_of_adapters(layer: nn.Module) -> set[nn.Module]:
    """The modules that peft has put into a layer, such as LoRA's A and B. peft's own layers name them."""
    parts = [getattr(m, name) for m in layer.modules() for name in getattr(m, "adapter_layer_names", ())]
    return {inner for part in parts if isinstance(part, nn.Module) for inner in part.modules()}


def _sides(matrix: Counted) -> int:
    """Inputs and outputs of a matrix, or of all experts `[experts, ...]`."""
    shape = matrix.shape
    return sum(shape) if len(shape) < 3 else shape[0] * sum(shape[1:])


def _bits(model: nn.Module) -> dict[int, int]:
    """Bits of each weight that is unpacked for its products, by its parameter."""
    return {
        id(getattr(module, name)): packed.quantization.bits
        for module in model.modules()
        if not isinstance(module, FrozenFloat8Linear)
        for name, packed in packed_weights(module).items()
    }
