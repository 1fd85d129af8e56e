"""The model of a plan: built and adapted as a run's, on the meta device, so that it has shapes and no values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from configs.run import RunConfig
from planning.model.compiled_loss import compiled_cross_entropy
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.apply_policies import Adapted, adapt_model
from policies.building import MetaModel, build_empty
from policies.replicated_weights import gathered_units, replicated_weights
from policies.sharding import Accumulation, choose_accumulation
from policies.wrapping import outermost
from ranks.environment import Environment
from resolving.resolved import Resolved


@dataclass(frozen=True)
class PlannedModel:
    """The model that a run on this hardware would shard and fill. Only its buffers take memory."""

    config: RunConfig  # with the defaults that depend on the task
    resolved: Resolved
    env: Environment  # rank 0 of the planned hardware
    empty: MetaModel
    adapted: Adapted  # with adapters; not sharded
    accumulation: Accumulation
    num_embeddings: int  # rows that the embeddings have at least


def build_planned_model(
    resolved: Resolved, env: Environment, *, num_embeddings: int = 0, new_tokens: Sequence[int] = ()
) -> PlannedModel:
    """The model of a plan.

    Args:
        num_embeddings: rows that the tokenizer needs; if it is not known, those of config.json are there.
        new_tokens: the ids of the tokens of --add_special_tokens.

    Raises:
        ConfigError: if the model cannot be built or adapted so.
    """
    config, policies, task = resolved.config, resolved.policies, resolved.task
    num_embeddings = max(num_embeddings, resolved.model_config.get_text_config().vocab_size)
    empty = build_empty(
        config,
        resolved.model_config,
        task,
        policies=policies,
        row_length=resolved.context_length,
        num_embeddings=num_embeddings,
        device=env.device_facts,
        new_tokens=new_tokens,
    )
    adapted = adapt_model(
        empty.model,
        config,
        policies,
        task=task,
        checkpointing=empty.checkpointing,
        new_tokens=new_tokens,
        adapter_device="meta",
        compiled_loss=compiled_cross_entropy,
    )
    asked = config.fsdp_config.accumulate_unsharded
    return PlannedModel(
        config=config,
        resolved=resolved,
        env=env,
        empty=empty,
        adapted=adapted,
        accumulation=choose_accumulation(asked, policies.layout, policies.precision, adapted.model, env.device_facts),
        num_embeddings=num_embeddings,
    )


def replicated_in(planned: PlannedModel) -> list[nn.Parameter]:
    """The frozen weights that stay whole on every rank.

    Raises:
        ConfigError: if more layers were asked for than there are.
    """
    number = planned.resolved.policies.layout.num_replicated or 0
    return replicated_weights(planned.adapted.model, planned.adapted.layers, number)


def gathered_in(planned: PlannedModel) -> list[nn.Module]:
    """The units that are gathered one at a time; the root gathers the rest."""
    return gathered_units(planned.adapted.units, replicated_in(planned))


def layers_of(planned: PlannedModel) -> list[nn.Module]:
    """The layers that are in no other, in the order in which the model lists them."""
    return outermost(planned.adapted.layers)[::-1]


def layers_and_modes(planned: PlannedModel) -> list[tuple[nn.Module, str]]:
    """Each layer and how it is checkpointed, in the order in which the model lists them."""
    return list(planned.empty.checkpointing.of(planned.adapted.layers))


def with_replicated(planned: PlannedModel, num_layers: int) -> PlannedModel:
    """The same model with the frozen weights of so many layers whole on every rank. They share their modules."""
    resolved, policies = planned.resolved, planned.resolved.policies
    policies = policies._replace(layout=replace(policies.layout, num_replicated=num_layers))
    return replace(planned, resolved=replace(resolved, policies=policies))


def with_checkpointing(planned: PlannedModel, checkpointing: Checkpointing) -> PlannedModel:
    """The same model with other checkpointing. They share their modules, so only the last one returned may be used."""
    checkpoint_layers(planned.adapted.layers, checkpointing)
    return replace(planned, empty=replace(planned.empty, checkpointing=checkpointing))
