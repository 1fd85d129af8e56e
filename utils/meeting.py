"""How the ranks of a run meet: over the launcher's store, or over one that rank 0 opens.

Ranks that no launcher watches connect as soon as they start, and tell rank 0 every few seconds that they live. So a
rank that ends while it reads its data, or on its way here, is noticed: the others need not wait for it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from utils.environment import Environment, print_rank_zero
from utils.errors import ConfigError, TrainingError, in_one_line

ALL_THERE = timedelta(minutes=30)  # until every rank has read its data; the one that tokenizes longest comes last
COME_SECONDS = 600.0  # for the processes of a run to start
_EARLY_SECONDS = 10.0  # to wait for rank 0 before anything else is done
_BEAT_SECONDS, _SILENT_SECONDS = 5.0, 60.0
_LOOK_SECONDS = 1.0
_RANK_0_ENDED = "rank 0 ended before the ranks had met; its own output says why"
_SAY_SECONDS = 30.0  # so often rank 0 says whom it waits for


def connect(env: Environment) -> Future[dist.Store]:
    """Connect to the store over which the ranks meet. Without a launcher a process has one of its own.

    If rank 0 does not answer soon, this returns and goes on trying beside what follows: rank 0 may start late, or it
    was refused what this rank will be refused, too. For the same reason a rank 0 that has just ended is no error yet:
    the future raises it, as a TrainingError.

    Raises:
        ConfigError: if the launcher's variables lead to no store, or two processes have the same rank. It may come out
            of the future only.
    """
    connection: Future[dist.Store] = Future()
    if env.is_rank_zero or env.launcher_has_store or env.meeting_place is None:
        connection.set_result(_connected(env))
        return connection

    def work() -> None:
        try:
            connection.set_result(_connected(env))
        except BaseException as error:
            connection.set_exception(error)

    threading.Thread(target=work, daemon=True, name="connect").start()
    with contextlib.suppress(TimeoutError, TrainingError):
        connection.result(_EARLY_SECONDS * env.grace_scale)
    return connection


def _connected(env: Environment) -> dist.Store:
    if env.meeting_place is None:
        return dist.HashStore()
    hosts = env.is_rank_zero and not env.launcher_has_store
    store = _open_store(env) if hosts else _connect(env)
    store.set_timeout(ALL_THERE)  # what it waits for later may come late, too
    if not env.launcher_has_store:
        _take_rank(store, env)
        if not hosts:
            threading.Thread(target=_beat, args=(_connect(env), env), daemon=True).start()
    return store


def meet(store: dist.Store, env: Environment, limit: timedelta = ALL_THERE) -> dist.Store:
    """Wait until every rank is here. Returns the store, without what an earlier attempt of the same job left in it.

    torchrun keeps one store over its restarts (https://github.com/pytorch/pytorch/issues/135712). A rank that reads
    rank 0's entries before rank 0 has renewed them connects to a process that is gone: gloo fails, NCCL hangs. Nodes do
    not agree on how often the job was restarted either. So rank 0 gives the attempt a name, and answers each rank that
    asks under this name. An attempt that is over answers nobody.

    Raises:
        TrainingError: if a rank ended, or did not come in time.
    """
    name = uuid4().hex
    if env.is_rank_zero:
        store.set("attempt", name)
        _wait_for_all(store, name, env, limit)
        for rank in range(1, env.world_size):  # none begins to connect, which has a short limit, before all are here
            store.set(f"{name}/{store.get(f'{name}/{rank}').decode()}", "")
        return dist.PrefixStore(name, store)
    deadline = time.monotonic() + limit.total_seconds()
    while time.monotonic() < deadline:
        try:
            store.wait(["attempt"], limit)
            attempt = store.get("attempt").decode()
            store.set(f"{attempt}/{env.rank}", name)
            store.wait([f"{attempt}/{name}"], timedelta(seconds=2 * _LOOK_SECONDS))
            return dist.PrefixStore(attempt, store)
        except dist.DistNetworkError as error:
            raise TrainingError(_RANK_0_ENDED) from error
        except dist.DistStoreError:
            continue
    raise TrainingError(f"the ranks did not meet in {limit}: some still read their data, or have ended")


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


def _connect(env: Environment) -> dist.TCPStore:
    """Wait until something listens at the meeting place, and connect. torch's own wait has pauses of a minute."""
    address, port = _checked_place(env)
    limit = COME_SECONDS * env.grace_scale
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
    assert env.meeting_place is not None
    address, port = env.meeting_place
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"MASTER_ADDR={address}: no machine has this name ({error}); correct it") from error
    return address, port


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
        raise TrainingError(_RANK_0_ENDED) from error
    if num_taken > 1:
        raise ConfigError(f"RANK={env.rank}: another process of this run has it; give each process a rank of its own")


def _beat(store: dist.Store, env: Environment) -> None:
    """The thread: tell rank 0 that this process lives, until rank 0 has gone."""
    with contextlib.suppress(dist.DistError):
        while True:
            store.add(f"beat/{env.rank}", 1)
            time.sleep(_BEAT_SECONDS * env.grace_scale)


class _Silence:
    """How long a rank has given no sign that it lives."""

    def __init__(self) -> None:
        self.seconds, self.beats = 0.0, 0

    def listen(self, store: dist.Store, rank: int, env: Environment) -> None:
        """Look for a sign, `_LOOK_SECONDS` after the last look.

        Raises:
            TrainingError: if there was none for too long.
        """
        before, self.beats = self.beats, store.add(f"beat/{rank}", 0)
        self.seconds = 0.0 if self.beats > before else self.seconds + _LOOK_SECONDS
        patience = (_SILENT_SECONDS if self.beats else COME_SECONDS) * env.grace_scale
        if self.seconds > patience:
            what = "ended before the ranks had met; its own output says why" if self.beats else "did not start"
            raise TrainingError(f"rank {rank} {what} (no sign of it for {self.seconds:.0f} s)")


def _wait_for_all(store: dist.Store, name: str, env: Environment, limit: timedelta) -> None:
    """Wait for the entries of all other ranks as long as they live, and say who came and who is waited for.

    Time in which this process was suspended does not count.
    """
    silences = {rank: _Silence() for rank in range(1, env.world_size)}  # of those that are not here
    waited, say_at = 0.0, _LOOK_SECONDS
    while silences:
        first = next(iter(silences))
        try:
            store.wait([f"{name}/{first}"], timedelta(seconds=_LOOK_SECONDS))
        except dist.DistStoreError:
            waited += _LOOK_SECONDS
            if not env.launcher_has_store:  # otherwise the launcher looks after its ranks
                for rank, silence in silences.items():
                    silence.listen(store, rank, env)
        come = [rank for rank in silences if store.check([f"{name}/{rank}"])]
        for rank in come:
            del silences[rank]
        if come:
            joined = f"{_ranks(come)} joined: {env.world_size - len(silences)} of {env.world_size} ranks are here"
            print_rank_zero(env, joined + (f"; waiting for {_ranks(list(silences))}" if silences else ""))
        elif waited >= say_at:
            print_rank_zero(env, f"waiting for {_ranks(list(silences))} ({waited:.0f} s so far)")
        if come or waited >= say_at:
            say_at = waited + _SAY_SECONDS
        if silences and waited > limit.total_seconds():
            raise TrainingError(
                f"{_ranks(list(silences))} did not come for {waited:.0f} s: still reading data, or hung"
            )


def _ranks(ranks: list[int]) -> str:
    """Ranks in words, in rising order: "rank 3", "ranks 1-4, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"
