"""The traffic of a step in each layout, and its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from data.batches.counts import BatchCounts
from planning.machines.group_speeds import Speeds
from planning.model.float8_weights import float8_weights
from planning.model.planned_model import PlannedModel, gathered_in, layers_and_modes, replicated_in
from policies.apply_policies import Policies
from policies.context_parallel.exchange import repeats_of_keys
from policies.direct_collectives import why_not_reduced
from utils.layer_configs import head_dim_of, layer_configs

LAYOUTS = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")


@dataclass(frozen=True)
class Traffic:
    """Bytes of whole tensors, and how often they are exchanged in a step."""

    units_bytes: int  # of the units that FULL_SHARD gathers for forward and again for backward
    root_bytes: int  # of the root unit, gathered once
    gradient_bytes: int  # as they are reduced
    num_units: int  # the root included
    num_trained_units: int
    num_micro_batches: int
    reduces_once: bool  # whether gradients accumulate whole
    all_reduces_once: bool = True  # whether sharded ones do so before they are reduced over the copies of the model
    packs_weights: bool = True  # they are copied to and from buffers
    unpacked_gradient_bytes: int = 0  # of those that are reduced without such copies


def find_traffic(planned: PlannedModel) -> Traffic:
    """The traffic of one optimizer step, from the model's shapes alone."""
    adapted, policies = planned.adapted, planned.resolved.policies
    units = gathered_in(planned)
    precision, trained = policies.precision, _trained_by_unit(adapted.model, units)
    computed = precision.compute_dtype if precision.casts else None
    in_float8 = float8_weights(adapted, planned.resolved).gathered

    replicated = frozenset(map(id, replicated_in(planned)))

    def gathered(parameter: nn.Parameter) -> int:
        if id(parameter) in replicated:
            return 0
        return parameter.numel() * (1 if id(parameter) in in_float8 else _item_size(parameter, computed))

    all_bytes = sum(map(gathered, adapted.model.parameters()))
    # A set: nested units share parameters with the units that hold them.
    units_bytes = sum(map(gathered, {p for unit in units for p in unit.parameters()}))
    # DistributedDataParallel reduces gradients as they are.
    is_ddp, reduced = policies.layout.kind == "ddp", precision.reduce_dtype.itemsize
    gradient_bytes = sum(p.numel() * (p.element_size() if is_ddp else reduced) for own in trained for p in own)
    unpacked = [own for own in trained if _is_unpacked(own, policies, in_float8)]
    return Traffic(
        units_bytes=units_bytes,
        root_bytes=all_bytes - units_bytes,
        gradient_bytes=gradient_bytes,
        num_units=len(units) + 1,
        num_trained_units=sum(map(bool, trained)),
        num_micro_batches=planned.resolved.batches.gradient_accumulation_steps,
        reduces_once=planned.accumulation.unsharded,
        all_reduces_once=not planned.accumulation.all_reduced,
        packs_weights=not policies.layout.is_direct or bool(in_float8),
        unpacked_gradient_bytes=reduced * sum(parameter.numel() for own in unpacked for parameter in own),
    )


def _is_unpacked(trained: Sequence[nn.Parameter], policies: Policies, in_float8: frozenset[int]) -> bool:
    """Whether the gradients of a unit are reduced without packing."""
    layout, precision = policies.layout, policies.precision
    computed = precision.compute_dtype if precision.casts else None
    reason = why_not_reduced(trained, layout.mesh_shape, precision.reduce_dtype, computed, in_float8)
    return layout.is_direct and reason is None


def exchange_seconds(planned: PlannedModel, counts: BatchCounts, speeds: Speeds, ranks_per_node: int) -> float:
    """Seconds in which ranks that share rows exchange tokens for heads, in a micro-batch; 0 if none do.

    Attention's input is exchanged, and its output; their gradients; and both again if the layer is recomputed. Each
    rank sends all but its own part. Computing waits for all of it.

    Args:
        counts: of one rank.
    """
    context, text = planned.resolved.policies.context, planned.resolved.model_config.get_text_config()
    if not context.shares_rows:
        return 0.0
    total, size = 0.0, planned.resolved.policies.precision.compute_dtype.itemsize
    group = speeds.node if context.size <= ranks_per_node and speeds.node.size > 1 else speeds.world
    per_byte = (context.size - 1) / context.size * group.all_gather.seconds_per_byte * group.size / (group.size - 1)
    modes = [mode for _, mode in layers_and_modes(planned)]
    for layer, mode in zip(layer_configs(text), modes, strict=False):
        heads = layer.num_attention_heads
        key_heads = getattr(layer, "num_key_value_heads", None) or heads
        sent = 2 * heads + 2 * key_heads * repeats_of_keys(key_heads, context.size)  # of a token, there and back
        times = 2 if mode == "off" else 3
        num_bytes = times * counts.num_tokens * sent * head_dim_of(layer) * size
        total += 2 * times * group.all_gather.latency_seconds + num_bytes * per_byte
    return total


def _trained_by_unit(model: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """The trained parameters of each unit, the root last; nested units come before those that hold them."""
    seen: set[nn.Parameter] = set()
    found = []
    for module in (*units, model):
        own = [parameter for parameter in module.parameters() if parameter not in seen]
        seen.update(own)
        found.append([parameter for parameter in own if parameter.requires_grad])
    return found


def _item_size(parameter: Any, computed: torch.dtype | None) -> int:
    casts = computed is not None and parameter.is_floating_point()
    return int(computed.itemsize if casts and computed is not None else parameter.element_size())


def seconds_per_step(layout: str, traffic: Traffic, speeds: Speeds) -> float:
    """Seconds of communication in a step, if computing hides none of them.

    Args:
        layout: of `LAYOUTS`; HYBRID_SHARD shards inside nodes.
    """
    num_reductions = 1 if traffic.reduces_once else traffic.num_micro_batches
    if layout == "NO_SHARD":
        return num_reductions * speeds.world.all_reduce.seconds(traffic.gradient_bytes, traffic.num_trained_units)
    group = speeds.node if layout == "HYBRID_SHARD" else speeds.world
    # Gathered for forward, and again for backward unless kept.
    times = 1 if layout == "SHARD_GRAD_OP" else 2
    gathered_bytes = times * traffic.units_bytes + traffic.root_bytes
    num_gathers = times * (traffic.num_units - 1) + 1
    # SHARD_GRAD_OP keeps the weights gathered for the first micro-batch.
    rounds = 1 if layout == "SHARD_GRAD_OP" else traffic.num_micro_batches
    total = rounds * group.all_gather.seconds(gathered_bytes, num_gathers)
    total += num_reductions * group.reduce_scatter.seconds(traffic.gradient_bytes, traffic.num_trained_units)
    if layout == "HYBRID_SHARD":
        share = traffic.gradient_bytes / group.size
        num_all_reduces = 1 if traffic.all_reduces_once else traffic.num_micro_batches
        total += num_all_reduces * speeds.between.all_reduce.seconds(share, traffic.num_trained_units)
    return total
