"""The start of a run and of --load_only: ranks agree on their command, start a process group, and make a plan."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from checkpointing.earlier_choice import earlier_choice
from checkpointing.finding import Checkpoint
from configs.absolute_paths import make_paths_absolute
from configs.run import RunConfig
from planning.machines.planned_environment import check_speeds
from planning.plan_file import PlanAtStart, plan_for_all
from policies.compilation.probe import why_ranks_cannot_compile
from ranks.collectives import gather_to_all
from ranks.context_group import join_context_group
from ranks.environment import Environment, launcher_notes, print_rank_zero
from ranks.job_store import connect
from ranks.meeting import Meeting, meet
from ranks.process_group import start_process_group
from resolving.agreement import facts_at_start
from resolving.data_facts import DataFacts
from resolving.resolved import Resolved, with_choice, without_compiling
from supervision.failures import end_at_once
from supervision.watchdog import Watchdog
from utils.compiled_code import keep_compiled_code
from utils.errors import ConfigError
from utils.progress import say_if_it_lasts
from utils.seeding import seed_everything, use_deterministic_kernels


def meet_ranks(config: RunConfig, env: Environment) -> tuple[RunConfig, Meeting]:
    """Meet the other ranks, which must have been started alike. Returns the settings with absolute paths, too.

    Raises:
        ConfigError: if they were not, or if --network_speeds is no file of speeds.
    """
    if config.train_config.deterministic:
        use_deterministic_kernels()  # cuBLAS reads its variable when CUDA starts
    print_rank_zero(env, *launcher_notes(env))
    if env.device.type == "cuda" or config.train_config.compile or config.fsdp_config.compile_optimizer:
        print_rank_zero(env, *filter(None, [keep_compiled_code()]))
    config = make_paths_absolute(config, env.started_in)  # a user's dataset function may change the working directory
    meeting = meet(connect(env), env)
    if env.world_size > 1:
        meeting.check_agreement(facts_at_start(config, env))
    if config.planning_config.network_speeds is not None:
        meeting.from_rank_zero("speeds", partial(check_speeds, config.planning_config))
    return config, meeting


def start_ranks(meeting: Meeting, config: RunConfig, env: Environment, watchdog: Watchdog) -> None:
    """Start the process group once all ranks have read their data, and the watchdogs."""
    meeting.wait_for_all()
    with meeting.listening(end_at_once):  # until the watchdogs watch
        start_process_group(env, meeting)
        watchdog.start(config.train_config.step_timeout_seconds)


def agree_to_compile(
    resolved: Resolved,
    plan: PlanAtStart,
    env: Environment,
    data: Callable[[], DataFacts],
    checkpoint: Checkpoint | None = None,
) -> tuple[Resolved, PlanAtStart]:
    """The settings and the plan, uncompiled if --compile auto chose to compile and one of the ranks' machines cannot.

    Every rank must call this: all compile, or none. torch starts its processes that compile kernels with the first
    compilation, so they are there when weights are read.

    Args:
        plan: of the run as it would be compiled.
        data, checkpoint: as in `follow_plan`.

    Raises:
        ConfigError: if one cannot, and --compile was asked for.
    """
    if not resolved.config.train_config.compile:
        return resolved, plan
    tried = say_if_it_lasts("trying whether torch.compile works here")
    obstacle = why_ranks_cannot_compile(env.device)
    tried()
    if obstacle is None:
        return resolved, plan
    if not resolved.chose_to_compile:
        raise ConfigError(f"--compile: {obstacle}; give --compile False, or leave it out")
    resolved = without_compiling(resolved, obstacle)
    print_rank_zero(env, resolved.config.notes[-1])
    return follow_plan(resolved, env, data, checkpoint)


def agree_on_attention(resolved: Resolved, env: Environment) -> Resolved:
    """The settings without flash-attn-4 if one of the ranks cannot use it, for the others would wait for its kernels.

    Every rank must call this.
    """
    told = gather_to_all((resolved.policies.flash_4, socket.gethostname()))
    lacking = [f"rank {rank} on {host}" for rank, (works, host) in enumerate(told) if not works]
    if not lacking or len(lacking) == len(told):
        return resolved
    print_rank_zero(
        env, f"attention: flash-attn-4 does not work on {lacking[0]}, or is not there, so torch's kernels serve on all"
    )
    return replace(resolved, policies=resolved.policies._replace(flash_4=False))


def join_ranks_of_rows(resolved: Resolved, env: Environment) -> Resolved:
    """The settings with the process group of the ranks that share rows, if any do. Every rank must call this."""
    context = join_context_group(resolved.policies.context, env)
    return replace(resolved, policies=resolved.policies._replace(context=context))


def follow_plan(
    resolved: Resolved,
    env: Environment,
    data: Callable[[], DataFacts],
    checkpoint: Checkpoint | None = None,
    *,
    num_replicated: int | None = None,
) -> tuple[Resolved, PlanAtStart]:
    """The plan, and the settings with what it chose: checkpointing, offloading, replicated layers, and not to compile a
    short run.

    Every rank must call this.

    The model is built next; print the plan's notes after that. An error that refuses the model has refused the plan,
    too, and is said once.

    Args:
        data: returns the facts of the data; called on rank 0.
        checkpoint: the one that the run goes on from.
        num_replicated: layers of the model that are replicated, if it is built already.

    Raises:
        ConfigError: on every rank, if what moves to host memory does not fit there.
    """
    earlier = earlier_choice(checkpoint, resolved.config, env.world_size)
    begins = checkpoint is None
    plan = plan_for_all(resolved, env, data, earlier, begins=begins, num_replicated=num_replicated)
    plan.check_host(resolved.config)
    if plan.too_short is not None:
        resolved = without_compiling(resolved, plan.too_short)
        print_rank_zero(env, resolved.config.notes[-1])
    seed_everything(resolved.config.train_config.seed)  # adapters are drawn alike on every rank
    return with_choice(resolved, plan.checkpointing, plan.offloaded, plan.num_replicated), plan
