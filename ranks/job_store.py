"""The store over which the ranks of a run meet: the launcher's, or one that rank 0 opens.

Ranks that no launcher watches tell rank 0 over it, every few seconds, that they live.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from ranks.environment import Environment
from utils.errors import ConfigError, TrainingError, in_one_line

ALL_THERE = timedelta(minutes=30)  # until every rank has read its data; the one that tokenizes longest comes last
COME_SECONDS = 600.0  # for the processes of a run to start
RANK_0_ENDED = "rank 0 ended before the ranks had connected; its own output says why"
_NAME_SECONDS = 30.0  # for the name of rank 0's machine to become known: a pod's is, when it has started
_BEAT_SECONDS = 5.0


def beat_key(rank: int) -> str:
    """Of the number that a rank raises to tell that it lives."""
    return f"beat/{rank}"


def connect(env: Environment) -> dist.Store:
    """Connect to the store over which the ranks meet. Without a launcher a process has one of its own.

    Raises:
        ConfigError: if the launcher's variables lead to no store, or two processes have the same rank.
        TrainingError: if rank 0 has just ended.
    """
    if env.meeting_place is None:
        return dist.HashStore()
    hosts = env.is_rank_zero and not env.launcher_has_store
    store = _open_store(env) if hosts else new_client(env)
    store.set_timeout(ALL_THERE)  # what it waits for later may come late, too
    if not env.launcher_has_store:
        _take_rank(store, env)
        if not hosts:
            threading.Thread(target=_beat, args=(new_client(env), env), daemon=True).start()
    return store


def _open_store(env: Environment) -> dist.TCPStore:
    assert env.meeting_place is not None
    address, port = _checked_place(env)
    try:
        # Its own connection to itself is a matter of moments.
        store = dist.TCPStore(address, port, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"MASTER_PORT={port}: is in use on this machine, by another run or by a second process with RANK=0; "
                "give a free port, and each process a rank of its own"
            ) from error
        raise ConfigError(
            f"MASTER_ADDR={address}, MASTER_PORT={port}: rank 0 cannot listen there ({in_one_line(error)}); "
            "give the address of the machine that rank 0 runs on, and a free port"
        ) from error
    store.set("world_size", str(env.world_size))
    return store


def new_client(env: Environment, come_seconds: float = COME_SECONDS) -> dist.TCPStore:
    """Wait until something listens at the meeting place, and connect. torch's own wait has pauses of a minute.

    Each thread needs a client of its own: one that waits lets no other call through.
    """
    address, port = _checked_place(env)
    limit = come_seconds * env.grace_scale
    deadline = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"MASTER_ADDR={address}, MASTER_PORT={port}: rank 0 did not answer there for {limit:.0f} s "
                    f"({in_one_line(error)}); start it, or correct these variables"
                ) from error
            time.sleep(0.2)
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise ConfigError(
            f"MASTER_ADDR={address}, MASTER_PORT={port}: what listens there is no rank 0, or has just ended "
            f"({in_one_line(error)}); look at its output, or correct these variables"
        ) from error


def _checked_place(env: Environment) -> tuple[str, int]:
    """The address and port of rank 0, when the name is known: that of a pod may come later than this process.

    Raises:
        ConfigError: if it does not become known.
    """
    assert env.meeting_place is not None
    address, port = env.meeting_place
    limit = _NAME_SECONDS * env.grace_scale
    deadline = time.monotonic() + limit
    while True:
        try:
            socket.getaddrinfo(address, port)
            return address, port
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline or isinstance(error, UnicodeError):
                raise ConfigError(
                    f"MASTER_ADDR={address}: no machine has this name ({in_one_line(error)}); this machine's "
                    f"resolver (/etc/hosts, DNS) was asked for {limit:.0f} s; give a name that every machine knows, "
                    "or an address (under torchrun it is --local_addr of the first machine, or else its own name)"
                ) from error
            time.sleep(0.5)


def _take_rank(store: dist.TCPStore, env: Environment) -> None:
    try:
        store.wait(["world_size"], timedelta(seconds=30))
        world_size = int(store.get("world_size"))
        if world_size != env.world_size:
            raise ConfigError(
                f"WORLD_SIZE={env.world_size}: rank 0 has WORLD_SIZE={world_size}; give all ranks the same"
            )
        num_taken = store.add(f"taken/{env.rank}", 1)
    except dist.DistNetworkError as error:
        raise TrainingError(RANK_0_ENDED) from error
    if num_taken > 1:
        raise ConfigError(f"RANK={env.rank}: another process of this run has it; give each process a rank of its own")


def _beat(store: dist.Store, env: Environment) -> None:
    """The thread: tell rank 0 that this process lives, until rank 0 has gone."""
    with contextlib.suppress(dist.DistError):
        while True:
            store.add(beat_key(env.rank), 1)
            time.sleep(_BEAT_SECONDS * env.grace_scale)
