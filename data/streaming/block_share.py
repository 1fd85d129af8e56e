"""The processes of a machine share the tokenizing of a stream: each does its part of the blocks and hands it on.

Every process still goes through all blocks in the same order, so what it trains on does not depend on how many share
them. Blocks travel as files in the machine's folder for temporary files: no process waits in a collective, and one that
dies leaves the others to be ended as any rank's peers are.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TypeVar

from data.sequences.tokenized import Sequences
from ranks.collectives import gather_to_all
from ranks.environment import Environment
from utils.deleting import delete_folder
from utils.errors import ConfigError
from utils.processes import machine

T = TypeVar("T")

_PREFIX = "finetuning-blocks-"
_SECONDS_BETWEEN_LOOKS = 0.002


@dataclass
class BlockShare:
    """One process's share. Process `place` of `size` has the folder `place` for the blocks that others give it."""

    folder: Path
    place: int
    size: int
    num_rounds: int = 0  # so far; the same in every process, since all read the same

    def in_turn(self, batches: Iterator[T], work: Callable[[T], Sequences]) -> Iterator[tuple[T, Sequences]]:
        """Every batch and `work` of it, in order, `size` batches at a time: one is this process's own.

        Raises:
            ConfigError: if `work` does, in any process; the same in all.
        """
        while group := list(islice(batches, self.size)):
            number = self.num_rounds
            self.num_rounds += 1
            own = (self.place - number) % self.size  # in turn, so that nobody can run ahead if rounds are short
            outcome: Sequences | ConfigError | None = None
            if own < len(group):
                try:
                    outcome = work(group[own])
                except ConfigError as error:
                    outcome = error
                self._give(number, outcome)
            for position in range(len(group)):
                found = outcome if position == own else self._take(number, (position + number) % self.size)
                if isinstance(found, ConfigError):
                    raise found
                assert found is not None
                yield group[position], found

    def end(self) -> None:
        """Take no more blocks. The last process removes the folder."""
        delete_folder(self.folder / str(self.place))
        with suppress(OSError):  # others are still reading
            self.folder.rmdir()

    def _give(self, number: int, outcome: Sequences | ConfigError) -> None:
        written = self.folder / str(self.place) / "written"
        try:
            written.write_bytes(pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL))
            for place in range(self.size):
                if place != self.place:
                    with suppress(FileNotFoundError):  # it has ended
                        os.link(written, self.folder / str(place) / f"{number}-{self.place}")
            written.unlink()
        except OSError as error:
            raise ConfigError(
                f"--streaming: tokens cannot be handed on in {self.folder} ({error}); name another place with TMPDIR"
            ) from error

    def _take(self, number: int, giver: int) -> Sequences | ConfigError:
        file = self.folder / str(self.place) / f"{number}-{giver}"
        while not file.exists():
            if not file.parent.exists():  # this process's main process has ended its run
                raise ConfigError("--streaming: the run has ended")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        found = pickle.loads(file.read_bytes())  # of this run, from a folder that only this user can write
        file.unlink()
        return found


def open_share(env: Environment) -> BlockShare | None:
    """This process's share with the others of its machine; None if it is alone. Every rank must call this."""
    if env.world_size == 1:
        return None
    own = None
    if env.local_rank == 0 and env.local_world_size > 1:
        _remove_left_over()
        with suppress(OSError):
            own = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-"))
            for place in range(env.local_world_size):
                (own / str(place)).mkdir()
    folder = gather_to_all(own)[env.rank - env.local_rank]
    sees_it = folder is not None and os.access(folder / str(env.local_rank), os.W_OK)
    if not all(gather_to_all(sees_it or env.local_world_size == 1)) or folder is None:
        return None
    return BlockShare(folder, env.local_rank, env.local_world_size)


def _prefix() -> str:
    """Begins the names of the folders whose processes this one can see. Other containers may share the folder for
    temporary files, with process numbers of their own."""
    return f"{_PREFIX}{sha256(machine().encode()).hexdigest()[:16]}-"


def _remove_left_over() -> None:
    """Remove the folders of runs that were killed, on this machine since its last boot and in this container."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix()}*-*"):
        with suppress(ValueError, OSError):
            if not Path(f"/proc/{int(folder.name.removeprefix(_prefix()).split('-')[0])}").exists():
                delete_folder(folder)
