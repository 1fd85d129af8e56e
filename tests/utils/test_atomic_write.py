"""A file that is replaced is there as a whole, before and after; one that cannot be written is named."""

from __future__ import annotations

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.limited_files import files_limited_to
from tests.helpers.processes import ROOT, run_forked
from utils.atomic_write import FileWriteError, write_atomically, write_in_place


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("contents", ["ä\n\u2028\r\n", b"\x00\xff", ""])
def test_contents_are_what_was_given_and_nothing_lies_beside_them(
    contents: str | bytes, sync: bool, tmp_path: Path
) -> None:
    data = contents.encode() if isinstance(contents, str) else contents
    for before in (None, b"longer than what replaces it"):
        if before is not None:
            (tmp_path / "a.txt").write_bytes(before)
        write_atomically(tmp_path / "a.txt", contents, sync=sync)
        assert held(tmp_path) == {"a.txt": data}


@pytest.mark.parametrize("name", ["a" * 255, "ä" * 127])
def test_a_name_may_be_as_long_as_the_file_system_takes(name: str, tmp_path: Path) -> None:
    write_atomically(tmp_path / name, "all")
    assert held(tmp_path) == {name: b"all"}


def test_it_has_the_mode_of_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a.txt", "all")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


@pytest.mark.parametrize("earlier", [{}, {"a.txt": b"earlier"}])
def test_a_file_that_the_disk_takes_in_part_is_named_and_the_earlier_one_stays(
    earlier: dict[str, bytes], tmp_path: Path
) -> None:
    for name, data in earlier.items():
        (tmp_path / name).write_bytes(data)
    with files_limited_to(1000), pytest.raises(FileWriteError) as refused:
        write_atomically(tmp_path / "a.txt", "a" * 1001)
    assert held(tmp_path) == earlier
    assert str(refused.value) == f"{tmp_path}/a.txt cannot be written (File too large)"
    assert [*refused.value.parts()] == [str(refused.value)]


def test_callers_that_go_on_without_it_catch_an_oserror(tmp_path: Path) -> None:
    file = tmp_path / "gone" / "a.txt"
    with pytest.raises(OSError, match="cannot be written") as refused:
        write_atomically(file, "all")
    error = refused.value
    assert (error.errno, error.strerror, error.filename) == (errno.ENOENT, "No such file or directory", str(file))
    assert not file.parent.exists()


def test_what_cannot_be_replaced_stays_and_so_does_no_half(tmp_path: Path) -> None:
    (tmp_path / "a\nfolder").mkdir()
    with pytest.raises(FileWriteError) as refused:
        write_atomically(tmp_path / "a\nfolder", "all")
    assert [path.name for path in tmp_path.iterdir()] == ["a\nfolder"]
    assert str(refused.value) == f"{tmp_path}/a folder cannot be written (Is a directory)", "one line"


def test_a_pipe_that_is_written_stays_a_pipe_and_a_full_device_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        write_in_place(pipe, "ä\n")
        assert reader.read() == "ä\n".encode()
    assert pipe.is_fifo()
    with pytest.raises(FileWriteError) as refused:
        write_in_place(Path("/dev/full"), "all")
    assert str(refused.value) == "/dev/full cannot be written (No space left on device); make room there"


def test_ctrl_c_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("earlier")
    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a.txt", "all", sync=True)
    assert held(tmp_path) == {"a.txt": b"earlier"}


def test_of_several_writers_each_writes_a_whole_file_and_no_reader_sees_a_part(tmp_path: Path) -> None:
    file, whole = tmp_path / "a.txt", {str(writer) * 50_000 for writer in range(4)}
    write_atomically(file, min(whole))
    ended, seen = threading.Event(), set()

    def read() -> None:
        while not ended.is_set():
            seen.add(file.read_text())

    def write(text: str) -> None:
        for _ in range(100):
            write_atomically(file, text)

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(len(whole)) as pool:
        done = [pool.submit(write, text) for text in whole]
    ended.set()
    reader.join()
    assert [future.exception() for future in done] == [None] * len(whole)
    assert seen <= whole
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


ON_A_FULL_DISK = """
import subprocess, sys
from contextlib import suppress
from pathlib import Path

from utils.atomic_write import write_atomically

file, then = Path(sys.argv[1]), sys.argv[2]
file.write_text("earlier")
if then == "fill":
    with open(file.parent / "ballast", "wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(4096))
else:
    subprocess.run(["mount", "-o", "remount,ro", file.parent], check=True)
try:
    write_atomically(file, "all")
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("then", "reason"),
    [("fill", "(No space left on device); make room there"), ("make read-only", "(Read-only file system)")],
)
def test_a_real_disk_that_refuses_is_said_and_keeps_what_it_has(then: str, reason: str, tmp_path: Path) -> None:
    disk, copy, script = tmp_path / "disk", tmp_path / "copy", tmp_path / "script.py"
    disk.mkdir()
    script.write_text(ON_A_FULL_DISK)
    words = [str(disk), "1m", str(copy), str(script), f"{disk}/a.txt", then]
    done = run_forked([str(ROOT / "tests/helpers/own_disk.py"), *words])
    assert (done.returncode, done.stdout) == (0, f"{disk}/a.txt cannot be written {reason}\n"), done.stderr
    assert {name: data for name, data in held(copy).items() if name != "ballast"} == {"a.txt": b"earlier"}
