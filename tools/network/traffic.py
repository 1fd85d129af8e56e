"""What a step of a run communicates in each layout, and how long that takes at measured speeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from configs.run import RunConfig
from planning.resolved import Resolved
from policies.apply_policies import adapt_model
from policies.building import build_empty
from policies.sharding import accumulates_unsharded
from tools.network.bandwidth import Speeds
from utils.environment import Environment

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


def find_traffic(config: RunConfig, resolved: Resolved, env: Environment) -> Traffic:
    """The traffic of one optimizer step, from the model's shapes alone. Reads no weights.

    Raises:
        ConfigError: if the model cannot be built or adapted so.
    """
    policies, task = resolved.policies, resolved.task
    vocab_size = resolved.model_config.get_text_config().vocab_size
    empty = build_empty(
        config,
        resolved.model_config,
        task,
        policies=policies,
        row_length=resolved.context_length,
        num_embeddings=vocab_size,
        device=env.device_facts,
    )
    adapted = adapt_model(empty.model, config, policies, task=task, checkpointing=empty.checkpointing)
    precision = policies.precision

    def gathered(parameters: Iterable[nn.Parameter]) -> int:
        return sum(p.numel() * _item_size(p, precision.compute_dtype if precision.casts else None) for p in parameters)

    seen: set[nn.Parameter] = set()
    unit_parameters = []
    for unit in adapted.units:
        own = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen.update(own)
        unit_parameters.append(own)
    root = [parameter for parameter in adapted.model.parameters() if parameter not in seen]
    trained = [sum(p.numel() for p in own if p.requires_grad) for own in (*unit_parameters, root)]
    return Traffic(
        units_bytes=sum(map(gathered, unit_parameters)),
        root_bytes=gathered(root),
        gradient_bytes=4 * sum(trained),
        num_units=len(unit_parameters) + 1,
        num_trained_units=sum(map(bool, trained)),
        num_micro_batches=resolved.batches.gradient_accumulation_steps,
        reduces_once=accumulates_unsharded(
            config.fsdp_config.accumulate_unsharded, policies.layout, adapted.model, env.device_facts
        ),
    )


def _item_size(parameter: Any, computed: torch.dtype | None) -> int:
    casts = computed is not None and parameter.is_floating_point()
    return int(computed.itemsize if casts and computed is not None else parameter.element_size())


def seconds_per_step(layout: str, traffic: Traffic, speeds: Speeds) -> float:
    """How long a step communicates, if nothing of it is hidden behind computing.

    Args:
        layout: of `LAYOUTS`; HYBRID_SHARD shards inside nodes.
    """
    num_reductions = 1 if traffic.reduces_once else traffic.num_micro_batches
    if layout == "NO_SHARD":
        return speeds.world.all_reduce.seconds(traffic.gradient_bytes, traffic.num_trained_units)
    group = speeds.node if layout == "HYBRID_SHARD" else speeds.world
    times = 1 if layout == "SHARD_GRAD_OP" else 2
    gathered_bytes = times * traffic.units_bytes + traffic.root_bytes
    num_gathers = times * (traffic.num_units - 1) + 1
    total = traffic.num_micro_batches * group.all_gather.seconds(gathered_bytes, num_gathers)
    total += num_reductions * group.reduce_scatter.seconds(traffic.gradient_bytes, traffic.num_trained_units)
    if layout == "HYBRID_SHARD":
        share = traffic.gradient_bytes / group.size
        total += speeds.between.all_reduce.seconds(share, traffic.num_trained_units)
    return total
