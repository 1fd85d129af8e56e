"""The few collectives that a run needs on the host: of numbers, of Python objects, and of who acts first.

Every rank must call each of them, in the same order. They need the process group (`ranks.process_group`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ranks.environment import Environment
from utils.errors import ConfigError

T = TypeVar("T")


def sum_on_host(*values: float) -> list[float]:
    """Sums of host numbers over all ranks, exact for integers below 2^53; never touches the device."""
    return _reduced_on_host(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM)


def max_on_host(*values: int) -> list[int]:
    """The largest of each number over all ranks; never touches the device."""
    return _reduced_on_host(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MAX)


def min_on_host(values: Sequence[float]) -> list[float]:
    """The smallest of each number over all ranks; never touches the device."""
    return _reduced_on_host(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MIN)


def _reduced_on_host(numbers: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> list[Any]:
    if dist.get_world_size() > 1:  # gloo takes half a millisecond even for one rank, while a GPU waits
        dist.all_reduce(numbers, op=operation)
    return numbers.tolist()


def gather_to_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank, by rank. Values are pickled."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=group)  # over gloo, which torch prefers if a group has it
    return gathered


def on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result of `action`, which rank 0 alone runs, on every rank: for files that all ranks share.

    Without it, rank 0 could fail alone and leave the others waiting in their next collective.

    Args:
        action: its result is pickled.
        group: a group of all ranks; the default process group unless a thread has one of its own.

    Raises:
        ConfigError: on every rank, if `action` raised it.
        RuntimeError: on the others, if `action` raised another error; rank 0 raises that error itself.
    """
    outcome: list[Any] = [None, None]  # result, error
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except ConfigError as error:
            outcome[1] = ("refused", str(error))
        except Exception as error:
            failure = error
            outcome[1] = ("failed", f"{type(error).__name__}: {error}")
    # The original error is not sent: it may hold what cannot be pickled.
    dist.broadcast_object_list(outcome, src=0, group=group)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        kind, message = outcome[1]
        raise ConfigError(message) if kind == "refused" else RuntimeError(f"rank 0 failed: {message}")
    return outcome[0]


def one_rank_per_node_first(env: Environment, action: Callable[[], T]) -> T:
    """The result of each rank's own `action`; a node's other ranks begin when its first one has ended.

    So a file is downloaded once per node, and the others find it in the cache.

    Raises:
        ConfigError: on every rank, if `action` raised it on any.
    """
    result: Any = None
    # Each turn ends in a collective, for all ranks: it holds the others back, and tells them of a refusal.
    for first in (True, False):
        refusal = None
        if (env.local_rank == 0) == first:
            try:
                result = action()
            except ConfigError as error:
                refusal = str(error)
        refusals = [message for message in gather_to_all(refusal) if message is not None]
        if refusals:
            raise ConfigError(refusals[0])
    return result
