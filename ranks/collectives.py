"""The few collectives that a run needs on the host."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ranks.agreement import Facts, RankFacts, differing, disagreement, plain
from ranks.environment import Environment
from utils.errors import ConfigError

T = TypeVar("T")


def sum_on_host(*values: float) -> list[float]:
    """Sums of host numbers over all ranks, exact for integers below 2^53; never touches the device."""
    return _reduced_on_host(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM)


def max_on_host(*values: int) -> list[int]:
    """The largest of each over all ranks; never touches the device."""
    return _reduced_on_host(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MAX)


def min_on_host(values: Sequence[float]) -> list[float]:
    """The smallest of each over all ranks; never touches the device."""
    return _reduced_on_host(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MIN)


def _reduced_on_host(numbers: torch.Tensor, operation: Any) -> list[Any]:
    if dist.get_world_size() > 1:  # gloo takes half a millisecond to sum one rank's numbers, while a GPU waits
        dist.all_reduce(numbers, op=operation)
    return numbers.tolist()


def gather_to_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def check_agreement(facts: Facts) -> None:
    """Check that every rank has found the same. Every rank must call this.

    Raises:
        ConfigError: on every rank; it names what differs.
    """
    told = gather_to_all(RankFacts(dist.get_rank(), socket.gethostname(), plain(facts)))
    message = disagreement(told[0], [one._replace(facts=differing(one.facts, told[0].facts)) for one in told[1:]])
    if message:
        raise ConfigError(message)


def on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on rank 0 only and return its result, or raise its error, on every rank.

    Without this, a rank that fails alone would leave the others waiting in their next collective.

    Raises:
        ConfigError: on all ranks, if `action` raised it.
        RuntimeError: if `action` raised another error. Rank 0 raises that error itself.
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
    dist.broadcast_object_list(outcome, src=0, group=group)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        kind, message = outcome[1]
        raise ConfigError(message) if kind == "refused" else RuntimeError(f"rank 0 failed: {message}")
    return outcome[0]


def one_rank_per_node_first(env: Environment, action: Callable[[], T]) -> T:
    """The result of `action` on every rank; a node's other ranks start when its first one is done.

    So a file is downloaded once per node.

    Raises:
        ConfigError: on all ranks, if `action` raised it on any.
    """
    result: Any = None
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
