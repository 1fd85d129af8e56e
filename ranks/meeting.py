"""How the ranks of a run meet before they have a process group.

They meet as soon as they have started, and compare what they were started with. Then each reads its data, for as long
as that takes, and they meet again. A rank that ends meanwhile is noticed: the others need not wait for it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn
from uuid import uuid4

import torch.distributed as dist

from ranks.agreement import Facts, RankFacts, differing, disagreement, named, plain
from ranks.environment import Environment, print_rank_zero
from ranks.job_store import ALL_THERE, COME_SECONDS, RANK_0_ENDED, beat_key, new_client
from utils.errors import ConfigError, TrainingError

_SILENT_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 15.0  # between two lines on who is missing
_FIRST_WORD_SECONDS = 10.0  # for the main thread to say why it could not connect


@dataclass(frozen=True)
class Meeting:
    """Ranks that have met, before they have a process group. Every rank must call its methods alike."""

    env: Environment
    store: dist.Store  # of the job
    entries: dist.Store  # of this attempt of the job

    def check_agreement(self, facts: Facts) -> None:
        """Check that every rank was started with the same.

        Raises:
            ConfigError: on every rank; it names what differs.
        """
        env, own = self.env, RankFacts(self.env.rank, socket.gethostname(), plain(facts))
        if env.world_size == 1:
            return
        if not env.is_rank_zero:
            first = RankFacts(*json.loads(self._get("facts")))
            self.entries.set(f"differs/{env.rank}", json.dumps(own._replace(facts=differing(own.facts, first.facts))))
            message = self._get("agreement")
            self.entries.set(f"heard/{env.rank}", "")
        else:
            self.entries.set("facts", json.dumps(own))
            others = [RankFacts(*json.loads(told)) for told in self._get_from_all("differs")]
            message = disagreement(own, others)
            self.entries.set("agreement", message)
            if not env.launcher_has_store:  # the store ends with this process, which may be refused at once
                self._get_from_all("heard")
        if message:
            raise ConfigError(message)

    def from_rank_zero(self, subject: str, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 only and return its result, values of JSON, or raise its ConfigError, on every rank.

        Args:
            subject: the key of the result in the store; each may be used once.
        """
        env, found, heard = self.env, f"found-{subject}", f"heard-{subject}"
        if env.world_size == 1:
            return action()
        if not env.is_rank_zero:
            result, refusal = json.loads(self._get(found))
            self.entries.set(f"{heard}/{env.rank}", "")
            if refusal is not None:
                raise ConfigError(refusal)
            return result
        result, refused = None, None
        try:
            result = action()
        except ConfigError as error:
            refused = error
        self.entries.set(found, json.dumps([result, None if refused is None else str(refused)]))
        if not env.launcher_has_store:  # the store ends with this process, which may be refused its data soon
            self._get_from_all(heard)
        if refused is not None:
            raise refused
        return result

    def wait_for_all(self) -> None:
        """Wait until every rank has read its data.

        Raises:
            TrainingError: if a rank ended, or did not come in time.
        """
        env = self.env
        if env.is_rank_zero:
            _wait_for_all(self.entries, "has-read", env, ALL_THERE, signs=self.store, until="to read the data")
            self.entries.set("go", "")
        else:
            self.entries.set(f"has-read/{env.rank}", "")
            self._get("go")

    @contextlib.contextmanager
    def listening(self, end: Callable[[str], NoReturn]) -> Iterator[None]:
        """Notice a rank that ends inside, where ranks connect to each other: gloo waits five minutes for its address.

        If the store is the launcher's, so is this task.

        Args:
            end: says why the run ends, and ends this process from any thread.
        """
        connected = threading.Event()
        if self.env.world_size > 1 and not self.env.launcher_has_store:
            threading.Thread(target=self._listen, args=(connected, end), daemon=True).start()
        try:
            yield
        finally:
            connected.set()

    def _listen(self, connected: threading.Event, end: Callable[[str], NoReturn]) -> None:
        """The thread: rank 0 hears of every rank, the others of rank 0."""
        silences = {rank: _Silence() for rank in range(1, self.env.world_size)} if self.env.is_rank_zero else {}
        if connected.wait(_LOOK_SECONDS):
            return  # as nearly always
        try:
            signs = new_client(self.env, come_seconds=0)
            while not connected.wait(_LOOK_SECONDS):
                for rank, silence in silences.items():
                    silence.listen(signs, rank, self.env)
                signs.check(["attempt"])
        except TrainingError as error:
            end(str(error))
        except (ConfigError, dist.DistError):
            if not connected.wait(_FIRST_WORD_SECONDS * self.env.grace_scale):
                end(RANK_0_ENDED)

    def _get(self, key: str) -> str:
        """What rank 0 tells, when it does."""
        try:
            self.entries.wait([key], ALL_THERE)
            return self.entries.get(key).decode()
        except dist.DistNetworkError as error:
            raise TrainingError(RANK_0_ENDED) from error
        except dist.DistStoreError as error:
            raise TrainingError(_not_met(ALL_THERE)) from error

    def _get_from_all(self, key: str) -> list[str]:
        """What each other rank tells rank 0, as long as all of them live."""
        _wait_for_all(self.entries, key, self.env, ALL_THERE, signs=self.store)
        return [self.entries.get(f"{key}/{rank}").decode() for rank in range(1, self.env.world_size)]


def meet(store: dist.Store, env: Environment, limit: timedelta = ALL_THERE) -> Meeting:
    """Wait until every rank has come. What an earlier attempt of the same job left in the store is out of sight then.

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
        _wait_for_all(store, name, env, limit, signs=store, announce=True)
        for rank in range(1, env.world_size):  # none begins to connect, which has a short limit, before all are here
            store.set(f"{name}/{store.get(f'{name}/{rank}').decode()}", "")
        return Meeting(env, store, dist.PrefixStore(name, store))
    deadline = time.monotonic() + limit.total_seconds()
    while time.monotonic() < deadline:
        try:
            store.wait(["attempt"], limit)
            attempt = store.get("attempt").decode()
            store.set(f"{attempt}/{env.rank}", name)
            store.wait([f"{attempt}/{name}"], timedelta(seconds=2 * _LOOK_SECONDS))
            return Meeting(env, store, dist.PrefixStore(attempt, store))
        except dist.DistNetworkError as error:
            raise TrainingError(RANK_0_ENDED) from error
        except dist.DistStoreError:
            continue
    raise TrainingError(_not_met(limit))


def _not_met(limit: timedelta) -> str:
    return f"the ranks did not meet in {limit}: some still read their data, or have ended"


class _Silence:
    """How long a rank has given no sign that it lives."""

    def __init__(self) -> None:
        self.seconds, self.beats = 0.0, 0

    def listen(self, store: dist.Store, rank: int, env: Environment) -> None:
        """Look for a sign, `_LOOK_SECONDS` after the last look.

        Raises:
            TrainingError: if there was none for too long.
        """
        before, self.beats = self.beats, store.add(beat_key(rank), 0)
        self.seconds = 0.0 if self.beats > before else self.seconds + _LOOK_SECONDS
        patience = (_SILENT_SECONDS if self.beats else COME_SECONDS) * env.grace_scale
        if self.seconds > patience:
            what = "ended before the ranks had connected; its own output says why" if self.beats else "did not start"
            raise TrainingError(f"rank {rank} {what} (no sign of it for {self.seconds:.0f} s)")


def _wait_for_all(
    entries: dist.Store,
    name: str,
    env: Environment,
    limit: timedelta,
    *,
    signs: dist.Store,
    announce: bool = False,
    until: str = "to come",
) -> None:
    """Wait for the entries of all other ranks as long as they live, and say whom rank 0 waits for.

    Time in which this process was suspended does not count.

    Args:
        signs: the store with the signs that ranks live.
        announce: say who has come, too.
        until: what the ranks have yet to do, in words.
    """
    silences = {rank: _Silence() for rank in range(1, env.world_size)}  # of those that are not here
    waited, say_at = 0.0, _LOOK_SECONDS if announce else _SAY_SECONDS
    while silences:
        first = next(iter(silences))
        try:
            entries.wait([f"{name}/{first}"], timedelta(seconds=_LOOK_SECONDS))
        except dist.DistStoreError:
            waited += _LOOK_SECONDS
            if not env.launcher_has_store:  # otherwise the launcher looks after its ranks
                for rank, silence in silences.items():
                    silence.listen(signs, rank, env)
        come = [rank for rank in silences if entries.check([f"{name}/{rank}"])]
        for rank in come:
            del silences[rank]
        missing = named(list(silences))
        if come and announce:
            joined = f"{named(come)} joined: {env.world_size - len(silences)} of {env.world_size} ranks are here"
            print_rank_zero(env, joined + (f"; waiting for {missing}" if silences else ""))
        elif silences and waited >= say_at:
            print_rank_zero(env, f"waiting for {missing} {until} ({waited:.0f} s so far)")
        if (come and announce) or waited >= say_at:
            say_at = waited + _SAY_SECONDS
        if silences and waited > limit.total_seconds():
            raise TrainingError(f"{missing} did not come for {waited:.0f} s: still reading data, or hung")
