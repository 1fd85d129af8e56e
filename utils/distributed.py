"""The process group, and the few collectives that a run needs on the host."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from utils.agreement import Facts, Told, differing, disagreement, plain
from utils.environment import Environment
from utils.errors import ConfigError, TrainingError, in_one_line
from utils.job_store import connect
from utils.meeting import Meeting, meet
from utils.torch_internals import num_entered, process_groups, set_timeout

T = TypeVar("T")


CONNECT_MINUTES = 5  # for ranks that have met to connect to each other


def start_process_group(env: Environment, meeting: Meeting | None = None) -> None:
    """Join the default process group. A single process gets one too, so that later code has one case.

    On GPUs it has both backends: nccl for device tensors, and gloo for the few counts on the host, which then never
    wait for the device.

    Args:
        meeting: of the ranks, if they have met.

    Raises:
        ConfigError, TrainingError: if the ranks do not meet, or do not connect.
    """
    backend, device_id = "gloo", None
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
        backend, device_id = "cpu:gloo,cuda:nccl", env.device
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the last collectives, for what a hang leaves behind
    if meeting is None:
        meeting = meet(connect(env), env)
    store = meeting.entries
    with connecting():
        timeout = timedelta(minutes=CONNECT_MINUTES)
        dist.init_process_group(
            backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout, device_id=device_id
        )
    set_timeouts()


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Ranks that have met connect to each other. One that ends meanwhile is noticed by `Meeting.listening`, or else
    after `CONNECT_MINUTES`: no watchdog watches yet.

    Raises:
        TrainingError: if a rank has ended.
    """
    try:
        yield
    except dist.DistError as error:
        raise TrainingError(
            f"another rank ended while the ranks connected; its own output says why ({in_one_line(error)})"
        ) from error


def set_timeouts() -> None:
    """Let the collectives of every group, those of a mesh included, wait for 70 minutes.

    The watchdog's longest limit is an hour, so it comes first; it says more.
    """
    for group in process_groups():
        set_timeout(group, timedelta(minutes=70))


def stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def new_host_group() -> dist.ProcessGroup:
    """A group of all ranks over gloo, for a thread whose collectives must not meet those of the main thread."""
    group = dist.new_group(backend="gloo")
    set_timeouts()
    return group


def num_collectives(*, leaving_out: Iterable[dist.ProcessGroup]) -> int:
    """How many collectives this rank has entered, over all groups but these. Any thread may ask."""
    left_out = [id(group) for group in leaving_out]
    return sum(num_entered(group) for group in process_groups() if id(group) not in left_out)


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded, as a plain tensor."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "fsdp_pre_all_gather"):  # it is gathered in another form than it is stored in
        (name, *_), _ = local.detach().__tensor_flatten__()  # type: ignore[attr-defined]
        local = getattr(local, name)
    return local


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, sharded alike, without gradients and as it is stored, whatever form it is gathered in."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor) or not hasattr(tensor.to_local(), "fsdp_pre_all_gather"):
        return tensor
    return DTensor.from_local(
        local_tensor(tensor),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


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
    told = gather_to_all(Told(dist.get_rank(), socket.gethostname(), plain(facts)))
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
