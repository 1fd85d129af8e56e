"""Where the ranks of a run meet, before they have a process group.

They meet as soon as they have started, and compare their settings and devices. Then each reads its data, for as long
as that takes, and they meet again. A rank that ends meanwhile is noticed, so the others do not wait for it. Order:
`job_store.connect`, `meet`, the methods of `Meeting`, `process_group.start_process_group`.
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
from ranks.heartbeats import LOOK_SECONDS, Silence
from ranks.job_store import ALL_THERE, RANK_0_ENDED, new_client
from utils.errors import ConfigError, TrainingError

_SAY_SECONDS = 15.0  # between two lines on who is missing
_HEAR_SECONDS = 3.0  # for the others, who look every second, if rank 0 is refused and takes the store along
_FIRST_WORD_SECONDS = 10.0  # the main thread may say why it could not connect before the listening one ends it


@dataclass(frozen=True)
class Meeting:
    """Ranks that have met, before they have a process group. Every rank must call its methods in the same order."""

    env: Environment
    store: dist.Store  # of the job
    entries: dist.Store  # of this attempt of the job

    def check_agreement(self, facts: Facts) -> None:
        """Check that every rank was started with the same facts. `ranks.agreement.check_agreement` does it later.

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
            if not env.launcher_has_store:  # this process holds the store, and may be refused at once
                self._get_from_all("heard")
        if message:
            raise ConfigError(message)

    def from_rank_zero(self, subject: str, action: Callable[[], Any]) -> Any:
        """The result of `action`, which rank 0 alone runs, on every rank; `on_rank_zero` once there is a process group.

        Args:
            subject: the key of the result in the store; each may be used once.
            action: returns a JSON value.

        Raises:
            ConfigError: on every rank, if `action` raised it.
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
        if not env.launcher_has_store:  # this process holds the store, and its data may be refused soon
            self._get_from_all(heard)
        if refused is not None:
            raise refused
        return result

    @contextlib.contextmanager
    def sharing_refusals(self) -> Iterator[None]:
        """A context in which a rank may be refused alone. Then every other is, too, where it next waits for ranks."""
        try:
            yield
        except ConfigError as error:
            if self.env.world_size > 1:
                with contextlib.suppress(dist.DistError):  # rank 0 may have ended
                    self._share(error)
            raise

    def _share(self, refusal: ConfigError) -> None:
        who = f"rank {self.env.rank} ({socket.gethostname()})"
        self.entries.compare_set("refused", "", f"{who}: {refusal}")  # the first stays
        self.entries.set(f"is-refused/{self.env.rank}", "")
        if self.env.is_rank_zero and not self.env.launcher_has_store:  # this process holds the store, and ends next
            others = [f"is-refused/{rank}" for rank in range(1, self.env.world_size)]
            self.entries.wait(others, timedelta(seconds=_HEAR_SECONDS))

    def wait_for_all(self) -> None:
        """Wait until every rank has read its data.

        Raises:
            ConfigError: if another rank was refused meanwhile.
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
        """A context in which ranks connect to each other: if one ends meanwhile, so does this process.

        Otherwise gloo would wait five minutes for its address. A launcher that holds the store watches its ranks.

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
        """The thread's work: rank 0 listens to every rank, the others to rank 0."""
        silences = {rank: Silence() for rank in range(1, self.env.world_size)} if self.env.is_rank_zero else {}
        if connected.wait(LOOK_SECONDS):
            return  # nearly always: no second connection is opened
        try:
            signs = new_client(self.env, start_seconds=0)
            while not connected.wait(LOOK_SECONDS):
                for rank, silence in silences.items():
                    silence.listen(signs, rank, self.env)
                signs.check(["attempt"])
        except TrainingError as error:
            end(str(error))
        except (ConfigError, dist.DistError):
            if not connected.wait(_FIRST_WORD_SECONDS * self.env.grace_scale):
                end(RANK_0_ENDED)

    def _get(self, key: str) -> str:
        """The entry of rank 0, once it is there."""
        try:
            for _ in range(int(ALL_THERE.total_seconds() / LOOK_SECONDS)):
                with contextlib.suppress(dist.DistStoreError):
                    self.entries.wait([key], timedelta(seconds=LOOK_SECONDS))
                    return self.entries.get(key).decode()
                _check_refusals(self.entries)
        except dist.DistNetworkError as error:
            raise TrainingError(RANK_0_ENDED) from error
        raise TrainingError(_not_met(ALL_THERE))

    def _get_from_all(self, key: str) -> list[str]:
        """The entries of all other ranks, by rank, once they are there. Rank 0 calls this."""
        _wait_for_all(self.entries, key, self.env, ALL_THERE, signs=self.store)
        return [self.entries.get(f"{key}/{rank}").decode() for rank in range(1, self.env.world_size)]


def meet(store: dist.Store, env: Environment, limit: timedelta = ALL_THERE) -> Meeting:
    """Wait until every rank has come, and hide what an earlier attempt of the same job left in the store.

    torchrun keeps one store over its restarts (https://github.com/pytorch/pytorch/issues/135712). A rank that reads
    rank 0's entries before rank 0 has renewed them connects to a process that is gone: gloo fails, NCCL hangs. Nodes do
    not agree on how often the job was restarted either. So rank 0 names the attempt, and answers each rank that asks
    under this name. An attempt that has ended answers nobody.

    Raises:
        TrainingError: if a rank ended, or did not come in time.
    """
    name = uuid4().hex
    if env.is_rank_zero:
        store.set("attempt", name)
        _wait_for_all(store, name, env, limit, signs=store, announce=True)
        for rank in range(1, env.world_size):  # only now: the time limit of connecting is short, and starts here
            store.set(f"{name}/{store.get(f'{name}/{rank}').decode()}", "")
        return Meeting(env, store, dist.PrefixStore(name, store))
    deadline = time.monotonic() + limit.total_seconds()
    while time.monotonic() < deadline:
        try:
            store.wait(["attempt"], limit)
            attempt = store.get("attempt").decode()
            store.set(f"{attempt}/{env.rank}", name)
            store.wait([f"{attempt}/{name}"], timedelta(seconds=2 * LOOK_SECONDS))
            return Meeting(env, store, dist.PrefixStore(attempt, store))
        except dist.DistNetworkError as error:
            raise TrainingError(RANK_0_ENDED) from error
        except dist.DistStoreError:  # an attempt that has ended answers nobody: look who is rank 0 now
            continue
    raise TrainingError(_not_met(limit))


def _check_refusals(entries: dist.Store) -> None:
    """Raise ConfigError if a rank was refused alone."""
    if entries.check(["refused"]):
        raise ConfigError(f"refused on {entries.get('refused').decode()}")


def _not_met(limit: timedelta) -> str:
    return f"the ranks did not meet in {limit}: some still read their data, or have ended"


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
    """Wait for the entries of all other ranks as long as they live, and print whom rank 0 waits for.

    Looks are counted, not time: a process that was suspended has not waited.

    Args:
        signs: the store with the ranks' heartbeats.
        announce: print who has come, too.
        until: what the ranks have yet to do, in words.

    Raises:
        ConfigError: if a rank was refused.
        TrainingError: if a rank gives no sign of life, or its entry does not come within the limit.
    """
    silences = {rank: Silence() for rank in range(1, env.world_size)}  # of the missing ranks
    waited, say_at = 0.0, LOOK_SECONDS if announce else _SAY_SECONDS
    while silences:
        first = next(iter(silences))
        try:
            entries.wait([f"{name}/{first}"], timedelta(seconds=LOOK_SECONDS))
        except dist.DistStoreError:
            waited += LOOK_SECONDS
            _check_refusals(entries)
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
