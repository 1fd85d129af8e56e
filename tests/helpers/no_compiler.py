"""Ranks some of which have no C++ compiler, which torch.compile needs on a CPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

import finetuning
from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.machines.planned_environment import planned_environment
from planning.plan_file import PlanAtStart
from preparation import start
from ranks.environment import read_environment
from ranks.process_group import start_process_group, stop_process_group
from resolving.data_facts import DataFacts
from resolving.resolved import resolve
from utils.errors import ConfigError


def losing_compiler(argv: Sequence[str], ranks: Sequence[int]) -> Callable[[], int]:
    """A run, as what `ProcessGroup.run` runs instead of the flags. These ranks can compile until they have tried."""
    return partial(_train, tuple(argv), tuple(ranks))


def _train(argv: Sequence[str], ranks: Sequence[int]) -> int:
    why_not = start.why_ranks_cannot_compile

    def try_and_lose(device: torch.device) -> str | None:
        obstacle = why_not(device)
        _lose_compiler(ranks)
        return obstacle

    start.why_ranks_cannot_compile = try_and_lose
    return finetuning.main(argv, ends_process=True)


def agreeing_without_compiler(argv: Sequence[str], ranks: Sequence[int], hardware: str) -> Callable[[], int]:
    """Each rank prints what --compile auto comes to for a run on this hardware, once the ranks have tried on a CPU."""
    return partial(_agree, tuple(argv), tuple(ranks), hardware)


def _agree(argv: Sequence[str], ranks: Sequence[int], hardware: str) -> int:
    _lose_compiler(ranks)
    env, config = read_environment(), parse_flags(argv)
    if env.rank not in ranks:
        torch.compile = partial(torch.compile, backend="aot_eager")  # inductor's kernel would take seconds
    start_process_group(env)
    resolved = resolve(config, planned_environment(parse_hardware(hardware), config.train_config))
    unplanned = PlanAtStart(None, None, None, None, ())
    try:
        resolved, _ = start.agree_to_compile(resolved, unplanned, env, DataFacts)
    except ConfigError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    finally:
        stop_process_group()
    config, policies = resolved.config, resolved.policies
    came_to = {"compile": config.train_config.compile, "compile_optimizer": config.fsdp_config.compile_optimizer}
    print(json.dumps(came_to | {"compile_is_tried": policies.compile_is_tried}))
    return 0


def _lose_compiler(ranks: Sequence[int]) -> None:
    import torch._inductor.config as inductor

    inductor.force_disable_caches = True
    if int(os.environ["RANK"]) in ranks:
        inductor.cpp.cxx = (None, "/nowhere/c++")
