"""The store over which the ranks of a run meet: the launcher's, or one that rank 0 opens."""

from __future__ import annotations

import errno
import socket
import time
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from ranks.environment import Environment
from ranks.heartbeats import START_SECONDS, start_beating
from utils.errors import ConfigError, TrainingError, in_one_line

ALL_THERE = timedelta(minutes=30)  # until every rank has read its data; the one that tokenizes longest comes last
RANK_0_ENDED = "rank 0 ended before the ranks had connected; its own output says why"
_NAME_SECONDS = 30.0  # for the name of rank 0's machine to become known; a pod's is known once the pod has started


def connect(env: Environment) -> dist.Store:
    """Connect to the store over which the ranks meet. Without a launcher a process has one of its own.

    Raises:
        ConfigError: if the launcher's variables lead to no store, or two processes have the same rank.
        TrainingError: if rank 0 has just ended, or tools/start_node.sh chose the place: its next start may reach it.
    """
    if env.meeting_place is None:
        return dist.HashStore()
    try:
        return _connect(env)
    except ConfigError as error:
        if env.refusal_file is None:
            raise
        raise TrainingError(str(error)) from error


def _connect(env: Environment) -> dist.Store:
    opens_store = env.is_rank_zero and not env.launcher_has_store
    store = _open_store(env) if opens_store else new_client(env)
    store.set_timeout(ALL_THERE)  # later waits include those for the rank that reads its data longest
    if not env.launcher_has_store:
        _take_rank(store, env)
        if not opens_store:
            start_beating(new_client(env), env)
    return store


def _open_store(env: Environment) -> dist.TCPStore:
    assert env.meeting_place is not None
    address, port = _checked_place(env)
    try:
        # Short, since it connects to itself alone.
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=_loopback_listener(address, port),
        )
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


def _loopback_listener(address: str, port: int) -> int | None:
    """A socket that listens on this machine's loopback alone; None if other machines may have to reach the address.

    torch itself listens on all interfaces, whatever the address: anybody who reaches the machine could write there.
    """
    found = {(family, place[0]) for family, *_, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)}
    if not all(ip_address(host).is_loopback for _, host in found):
        return None
    family, host = sorted(found)[0]  # IPv4 first, which torch's clients try, too
    try:
        listener = socket.create_server((str(host), port), family=family, backlog=4096)
    except OSError as error:
        raise dist.DistNetworkError(errno.errorcode.get(error.errno or 0, str(error))) from error
    return listener.detach()


def new_client(env: Environment, start_seconds: float = START_SECONDS) -> dist.TCPStore:
    """A client of the store, once something listens at the meeting place.

    It is polled here, since torch's own wait pauses for a minute. Each thread needs a client of its own: one that waits
    blocks the calls of other threads.

    Raises:
        ConfigError: if nothing answers, or something that is no store.
    """
    address, port = _checked_place(env)
    limit = start_seconds * env.grace_scale
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
    """The address and port of rank 0, once its name resolves: a pod's name may be known later than this process starts.

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
            # UnicodeError: not a name at all (a label of more than 63 bytes, say), so waiting does not help.
            if time.monotonic() > deadline or isinstance(error, UnicodeError):
                raise ConfigError(
                    f"MASTER_ADDR={address}: no machine has this name ({in_one_line(error)}); this machine's "
                    f"resolver (/etc/hosts, DNS) was asked for {limit:.0f} s; give a name that every machine knows, "
                    "or an address (under torchrun it is --local_addr of the first machine, or else its own name)"
                ) from error
            time.sleep(0.5)


def _take_rank(store: dist.TCPStore, env: Environment) -> None:
    """Claim this process's rank in the store.

    Raises:
        ConfigError: if another process has it, or rank 0 has another world size.
        TrainingError: if rank 0 has just ended.
    """
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
