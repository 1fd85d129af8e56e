"""The trial of layers that --compile auto chose to compile, before the first step (`policies.compilation.trial`)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from checkpointing.finding import Checkpoint
from data.batches.rows import make_rows
from data.batches.step_loader import StepSampler, Unreadable
from planning.plan_file import PlanAtStart
from policies.building import BuiltModel, with_choices
from policies.compilation.layers import EagerFallback
from policies.compilation.trial import what_fails_compiled
from preparation.batch_forms import collator_of_run
from preparation.start import follow_plan
from ranks.collectives import gather_to_all
from ranks.environment import Environment, print_rank_zero
from resolving.inputs import Inputs
from resolving.resolved import Resolved, without_compiling
from tasks.micro_batch import MicroBatch
from utils.model_parts import vision_layers
from utils.progress import say_if_it_lasts


def try_to_compile(
    built: BuiltModel, inputs: Inputs, plan: PlanAtStart, env: Environment, checkpoint: Checkpoint | None
) -> tuple[BuiltModel, Inputs, PlanAtStart]:
    """The model, settings and plan, uncompiled if --compile auto chose to compile and a layer fails compiled on a rank.

    If only layers of the vision encoder fail, they alone are not compiled. Every rank must call this: all compile, or
    none.

    Args:
        checkpoint: the one that the run goes on from. If it was trained compiled, so is the rest, as far as layers
            compile here. The vision encoder is compared again.
    """
    if built.fallback is None or built.vision_fallback is None:
        return built, inputs, plan
    keeps_choice = checkpoint is not None and checkpoint.was_compiled is True
    seeing = vision_layers(built.empty.model, built.layers)
    others = [layer for layer in built.layers if layer not in seeing]
    tried = say_if_it_lasts("trying compiled layers")
    reason = _what_fails(built, others, built.fallback, inputs, env, compares=not keeps_choice)
    of_vision = None
    if reason is None and seeing:
        # Checkpoints do not say that the encoder alone failed, so a resumed run compares it again.
        of_vision = _what_fails(built, seeing, built.vision_fallback, inputs, env, compares=True)
    tried()
    if reason is not None:
        built.fallback.give_up()
        built.vision_fallback.give_up()
        resolved = without_compiling(inputs.resolved, reason)
        print_rank_zero(env, resolved.config.notes[-1])
    elif of_vision is not None:
        built.vision_fallback.give_up()
        resolved = inputs.resolved
        resolved = replace(resolved, policies=resolved.policies._replace(vision_as_written=True))
        print_rank_zero(env, f"--compile auto leaves the vision encoder as it is written: {of_vision}")
    else:
        return built, inputs, plan
    # Layers as they were written keep more for backward.
    replicated = resolved.policies.layout.num_replicated or 0  # the model is built
    resolved, plan = follow_plan(resolved, env, inputs.data_facts, checkpoint, num_replicated=replicated)
    if plan.checkpointing is not None:
        built = with_choices(built, plan.checkpointing, plan.offloaded)
    return built, replace(inputs, resolved=resolved), plan


def _what_fails(
    built: BuiltModel,
    layers: Sequence[nn.Module],
    fallback: EagerFallback,
    inputs: Inputs,
    env: Environment,
    *,
    compares: bool,
) -> str | None:
    """What fails on the first rank on which something does, as a clause; the same on every rank.

    Args:
        layers: those to try, inner ones first.
        fallback: calls them.
    """
    batch = first_batch(inputs, collator_of_run(inputs, built.empty), env)
    is_unreadable = any(gather_to_all(isinstance(batch, Unreadable)))
    if is_unreadable or isinstance(batch, Unreadable):
        return None  # training meets it, too, and names its row
    task, names = inputs.resolved.task, {id(module): name for name, module in built.empty.model.named_modules()}
    batch = batch.to(env.device)
    with built.routing.trying(batch):
        found = what_fails_compiled(
            built.model,
            {names[id(layer)]: layer for layer in reversed(layers)},  # the last one comes first there
            lambda: task.token_losses(built.model, batch),
            fallback,
            inputs.resolved.policies.precision.compute_dtype,
            compares=compares,
            on_any=_on_any if _need_each_other(inputs.resolved) else bool,
        )
    told = gather_to_all((socket.gethostname(), found))
    failed = [(rank, host, reason) for rank, (host, reason) in enumerate(told) if reason is not None]
    if not failed:
        return None
    rank, host, reason = failed[0]
    if env.world_size == 1:
        return reason
    return f"{reason}; so on rank {rank} of {host}, and on {len(failed)} of {env.world_size} ranks in all"


def _need_each_other(resolved: Resolved) -> bool:
    """Whether a rank's layers wait for other ranks."""
    return resolved.policies.context.shares_rows or resolved.policies.layout.mesh_shape[1] > 1


def _on_any(found: bool) -> bool:
    return any(gather_to_all(found))


def first_batch(inputs: Inputs, collate: Callable[[int], Any], env: Environment) -> MicroBatch | Unreadable:
    """The first micro-batch of the run on this rank; of a stream, one of its first rows."""
    train, data, batches = inputs.resolved.config.train_config, inputs.data, inputs.resolved.batches
    rows = data.train_rows
    if rows is None:
        rows = make_rows(
            data.train, batching_strategy=train.batching_strategy, context_length=inputs.resolved.context_length
        )
    lengths = None if rows.packed else rows.lengths
    sampler = StepSampler(len(rows), batches, env.rank // inputs.resolved.policies.context.size, train.seed, lengths)
    places = next(sampler.steps(), [[]])[0]
    batch: MicroBatch | Unreadable = collate(batches.rows_per_micro_batch)([rows[place] for place in places])
    return batch
