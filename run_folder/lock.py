"""The lock of a run folder: a second run that would write into it is refused; a run that has died keeps nothing.

The lock is the file lock.json, which names its owner: host, process, since when. On a disk of this machine the kernel
holds it, and lets go when the owner ends, however it ends (`run_folder.kernel_lock`). Whether an owner of this machine
lives is seen by its process, too.

A disk that several machines share may have no locks that reach all of them. There the owner touches the file every few
seconds, and a file that nobody has touched for a minute has no owner. An owner that was held up for so long, by a
machine that slept or a file server that was gone, may find its lock taken when it wakes: then it must write no more,
and is told.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import psutil

from run_folder.kernel_lock import is_locked, is_on_local_disk, lock_file
from run_folder.lock_owner import LockState, Owner, read_lock
from utils.errors import ConfigError
from utils.printing import print_line
from utils.progress import shows_progress

NAME = "lock.json"
BEAT_SECONDS = 10.0  # from touch to touch
STALE_SECONDS = 60.0  # without a touch, and the owner is dead
BEGINNING = "a run that has just begun"  # whose lock names no owner yet
_CERTAIN_SECONDS = 600.0  # as above, by the file server's clock, without waiting


class RunLock:
    """Holds folders for this run until `release`. Used as a context; it may hold nothing.

    Args:
        say: prints a line.
        on_loss: called, by a thread, with an error's text if another run has taken a folder: this one must end.
    """

    def __init__(
        self,
        *,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
        say: Callable[[str], None] = print,
        on_loss: Callable[[str], None] = print,
    ) -> None:
        self.beat_seconds, self.stale_seconds = beat_seconds, stale_seconds
        self.say, self.on_loss = say, on_loss
        self.held: list[Path] = []  # lock files
        self._locked: dict[Path, int] = {}  # those of them that the kernel keeps: their open descriptors
        self._made: list[Path] = []  # folders that were not there before
        self._gone: set[Path] = set()  # lock files whose folders were missed and are not back
        self._token = uuid4().hex
        self._ended = threading.Event()
        self._busy = threading.RLock()  # held by whoever looks at the files
        self._beat: threading.Thread | None = None

    def take(self, flag: str, folder: Path) -> None:
        """Make the folder if need be, and hold it.

        Raises:
            ConfigError: if another run holds it; naming the flag that gave it and the other run. Nothing is held then.
            OSError: if the file system refuses.
        """
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            self._made.append(folder)
        path = folder / NAME
        try:
            while not self._create(path):
                dead = find_dead(flag, folder, stale_seconds=self.stale_seconds)
                if dead is not None:
                    _remove(path, dead)
        except ConfigError:
            self.release()
            raise
        if not self.held:
            # A forked data worker must neither keep the lock of a killed run nor delete that of a living one.
            os.register_at_fork(after_in_child=self._forget)
        self.held.append(path)
        if self._beat is None:
            self._beat = threading.Thread(target=self._touch_all, daemon=True, name="run lock")
            self._beat.start()

    def release(self) -> None:
        """Give the folders back. May be called again, and from any thread."""
        self._ended.set()
        # The thread must make no file anew after this. It may wait for a file server that is gone.
        has_lock = self._busy.acquire(timeout=1)
        for path in self.held:
            with contextlib.suppress(OSError):
                if self._is_ours(path):
                    path.unlink()
        if has_lock:
            self._busy.release()
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if nothing was written into it
        self._made = []
        self._forget()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _forget(self) -> None:
        while self._locked:
            with contextlib.suppress(KeyError):  # two threads may end the run
                os.close(self._locked.popitem()[1])
        self.held = []

    def _create(self, path: Path) -> bool:
        """Whether the file was made; False if there is one already. NFS makes such a file once, too."""
        owner = Owner.of_this_process(self._token)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        if is_on_local_disk(path.parent) and lock_file(file):
            if (gone := self._locked.pop(path, None)) is not None:
                os.close(gone)
            self._locked[path] = file  # stays open: closing it would let the lock go
        with open(file, "w", encoding="utf-8", closefd=path not in self._locked) as lock:
            json.dump(asdict(owner), lock, indent=1)
            lock.flush()
            os.fsync(lock.fileno())
        return True

    def _touch_all(self) -> None:
        """The thread."""
        while not self._ended.wait(self.beat_seconds):
            for path in self.held:
                self.look_after(path)

    def look_after(self, path: Path) -> None:
        """Touch a lock file that the kernel does not keep, or make it again if it is gone and its folder is back."""
        with contextlib.suppress(OSError), self._busy:
            if not (self._ended.is_set() or self._is_kept(path)):
                self._touch(path)

    def _is_kept(self, path: Path) -> bool:
        """Whether the kernel keeps the lock of the file at this path, and not of one that is gone."""
        file = self._locked.get(path)
        return file is not None and os.path.exists(path) and os.path.samestat(os.fstat(file), os.stat(path))

    def _touch(self, path: Path) -> None:
        """Touch the file, or make it again if its folder was deleted or renamed, and is back."""
        state = read_lock(path)
        if state is None:
            if path not in self._gone:
                self._gone.add(path)
                self.say(
                    f"{path} is gone, deleted or moved with its folder; the run goes on, and writes there if it can"
                )
            if path.parent.is_dir():
                self._create(path)
        elif state.owner is not None and state.owner.token == self._token:
            self._gone.discard(path)
            os.utime(path)
        elif state.owner is not None and not self._ended.is_set():
            self._ended.set()
            self.on_loss(f"{path.parent} is in use by {state.owner} since this run was held up; this run ends")

    def _is_ours(self, path: Path) -> bool:
        state = read_lock(path)
        return state is not None and state.owner is not None and state.owner.token == self._token


def _remove(path: Path, dead: LockState) -> None:
    """Remove the lock of a dead owner, unless another run has just replaced it by its own."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY  # NFS asks for the first
        with open(os.open(path, mode), "rb") as file:
            # Runs that found the same owner dead come one by one, and the first removes the file that all locked.
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()) and read_lock(path) == dead:
                path.unlink()


def find_dead(flag: str, folder: Path, *, stale_seconds: float = STALE_SECONDS) -> LockState | None:
    """The lock that a dead run left in the folder, if any. Writes nothing.

    If the lock's owner is on another machine, this waits for its next touch, for `stale_seconds` at most.

    Raises:
        ConfigError: if the owner lives; naming the flag that gave the folder, and the owner.
    """
    try:
        state = read_lock(folder / NAME)
    except OSError as error:
        raise ConfigError(
            f"{flag}: {folder / NAME} cannot be read ({error.strerror}), so nobody knows whether a run uses the "
            "folder; remove it, or give another folder"
        ) from error
    if state is None:
        return None
    is_alive = state.owner.is_alive() if state.owner is not None else None
    if is_alive is None:
        is_alive = is_locked(folder / NAME) or _is_touched(folder / NAME, state, stale_seconds)
    if is_alive:
        owner = state.owner or BEGINNING
        raise ConfigError(f"{flag}: {folder} is in use by {owner}; stop that run, or give another folder")
    return state


def is_in_use(folder: Path) -> bool:
    """Whether a run seems to hold the folder (`holder_of`)."""
    return holder_of(folder) is not None


def holder_of(folder: Path) -> str | None:
    """The run that seems to hold the folder, for those who only look: nothing is written, and nothing waited for.

    An owner on another machine counts as alive if its last touch is recent by this machine's clock.
    """
    path = folder / NAME
    try:
        state = read_lock(path)
        if state is None:
            return None
        is_alive = state.owner.is_alive() if state.owner is not None else None
    except (OSError, psutil.Error):
        return None
    if is_alive is None:
        is_alive = is_locked(path) or abs(time.time() - state.touched_at / 1e9) < STALE_SECONDS
    return str(state.owner or BEGINNING) if is_alive else None


def _is_touched(path: Path, before: LockState, stale_seconds: float) -> bool:
    """Wait until a lock is touched or given back. False if neither happens in time, or has not for a long time."""
    if _server_time(path.parent) - before.touched_at / 1e9 > max(_CERTAIN_SECONDS, stale_seconds):
        return False
    kind = "names no run" if before.owner is None else "is of another machine"
    deadline, is_said = time.monotonic() + stale_seconds, False
    while time.monotonic() < deadline:
        time.sleep(min(1.0, stale_seconds / 10))
        state = read_lock(path)
        if state is None:
            return False
        if state != before:
            return True
        if shows_progress() and not is_said:  # not at once: a run that has just begun writes its name
            is_said = True
            print_line(f"{path} {kind}: waiting up to {stale_seconds:.0f} s for a sign of its run")
    return False


def _server_time(folder: Path) -> float:
    """Now by the clock of the folder's file server, in seconds since the epoch; 0 if it cannot be asked.

    This machine's clock may be hours away from it.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0
