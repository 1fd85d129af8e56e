"""Process groups: joined once the ranks have met (`ranks.meeting`), with time limits longer than the watchdog's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ranks.environment import Environment
from ranks.job_store import connect
from ranks.meeting import Meeting, meet
from utils.errors import TrainingError, in_one_line
from utils.torch_internals import num_entered, process_groups, set_timeout

CONNECT_MINUTES = 5  # for ranks that have met to connect to each other


def start_process_group(env: Environment, meeting: Meeting | None = None) -> None:
    """Join the default process group. A single process gets one too, so that later code has one case.

    On GPUs it has two backends: nccl for device tensors, and gloo for the few counts on the host, which then never wait
    for the device.

    Args:
        meeting: None lets the ranks meet first.

    Raises:
        ConfigError, TrainingError: if the ranks do not meet, or do not connect.
    """
    backend, device_id = "gloo", None
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
        backend, device_id = "cpu:gloo,cuda:nccl", env.device
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # flight recorder: a hang is explained by its last entries
    if meeting is None:
        meeting = meet(connect(env), env)
    store = meeting.entries
    with connecting():
        timeout = timedelta(minutes=CONNECT_MINUTES)
        # With device_id NCCL connects here, and not in the first collective, where a missing rank would be a hang.
        dist.init_process_group(
            backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout, device_id=device_id
        )
    set_timeouts()


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """A context in which ranks that have met connect to each other.

    If one ends meanwhile, `Meeting.listening` notices, or the time limit of `CONNECT_MINUTES`; no watchdog runs yet.

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
    """Set the time limit of every group, those of meshes included, to 70 minutes.

    The watchdog's longest limit is an hour, so it acts first; its message says more than torch's.
    """
    for group in process_groups():
        set_timeout(group, timedelta(minutes=70))


def stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def new_host_group() -> dist.ProcessGroup:
    """A group of all ranks over gloo, for a thread: its collectives must not be mixed with the main thread's."""
    group = dist.new_group(backend="gloo")
    set_timeouts()
    return group


def num_collectives(*, leaving_out: Iterable[dist.ProcessGroup]) -> int:
    """The number of collectives that this rank has entered, in all groups but these. Any thread may call this."""
    left_out = [id(group) for group in leaving_out]
    return sum(num_entered(group) for group in process_groups() if id(group) not in left_out)
