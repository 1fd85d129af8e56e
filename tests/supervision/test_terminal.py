"""A run outlives its terminal: whatever refuses what it prints, it trains as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.forked import Fork
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ROOT, ProcessGroup, process_variables, read_metrics, run_forked
from tests.helpers.resuming import assert_bit_equal, flags_of

PLAIN = ["--run_validation", "False", "--log_every_steps", "1"]

# What a program does to its own output before the run starts, and a dataset function while it reads.
WRAPPER = """
import os, runpy, sys
{before}
sys.argv, sys.path[0] = sys.argv[1:], {root!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
RECIPE = """
import os, sys
from tests.helpers.random_documents import get_custom_dataset

def get_rows(dataset_config, tokenizer, split):
    {body}
    return get_custom_dataset(dataset_config, tokenizer, split)
"""


@pytest.fixture(scope="module")
def whole(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    process_group.train(flags_of(tiny_model, run, *PLAIN), 1)
    return run


@contextlib.contextmanager
def no_reader() -> Iterator[int]:
    """As `| head -1`, when head has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    with open("/dev/full", "wb", buffering=0) as file:
        yield file.fileno()


@contextlib.contextmanager
def gone_terminal() -> Iterator[int]:
    """Writing to it is an input/output error."""
    master, slave = pty.openpty()
    os.close(master)
    yield slave
    os.close(slave)


@contextlib.contextmanager
def nothing() -> Iterator[int]:
    with open(os.devnull, "wb") as file:
        yield file.fileno()


PLACES = {
    "the reader of a pipe has gone": (no_reader, ""),
    "the disk is full": (full_disk, ""),
    "the terminal has vanished": (gone_terminal, ""),
    "the descriptors are closed": (nothing, "os.close(0); os.close(1); os.close(2)"),
    "there are no streams": (nothing, "os.close(1); os.close(2); sys.stdout = sys.stderr = None"),
}


def run_into(place: str, *words: str, folder: Path) -> int:
    """The exit status of a command that prints to this place."""
    make, before = PLACES[place]
    wrapper = folder / "wrapper.py"
    wrapper.write_text(WRAPPER.format(before=before, root=str(ROOT)))
    with make() as fd:
        argv = [str(wrapper), str(ROOT / "finetuning.py"), *words]
        return Fork(argv, cwd=folder, environment=process_variables({}), stdout=fd, stderr=fd).wait(300)


@pytest.mark.parametrize("place", slow_but(3, PLACES))
def test_a_run_that_cannot_print_trains_all_the_same(place: str, whole: Path, tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_into(place, *flags_of(tiny_model, run, *PLAIN), folder=tmp_path) == 0
    assert_bit_equal(run, whole)
    assert read_metrics(run)[-1]["status"] == "finished"
    assert len(read_metrics(run)) == len(read_metrics(whole))


@pytest.mark.parametrize("body", ["sys.stdout.close(); sys.stderr.close()", "os.close(1); os.close(2)"])
def test_a_dataset_function_that_closes_the_output_costs_nothing(
    body: str, whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Files that are opened afterwards do not get the lines that libraries print."""
    (tmp_path / "recipe.py").write_text(RECIPE.format(body=body))
    given = flags_of(tiny_model, tmp_path / "run", *PLAIN, "--dataset", f"{tmp_path}/recipe.py:get_rows")
    (outcome,) = process_group.train(given, 1)
    assert_bit_equal(tmp_path / "run", whole)
    if "stdout" in body:
        assert "finished: " in outcome.stdout


def test_help_into_a_pipe_that_nobody_reads_ends_in_silence(tmp_path: Path) -> None:
    modules = [path.stem for path in (ROOT / "tools").glob("*.py") if '"__main__"' in path.read_text()]
    assert len(modules) > 3
    commands = [["-m", f"tools.{module}", "--help"] for module in modules]
    for words in [[str(ROOT / "finetuning.py"), "--help"], *commands]:
        with no_reader() as fd, open(tmp_path / "errors", "wb") as errors:
            fork = Fork(words, cwd=ROOT, environment=process_variables({}), stdout=fd, stderr=errors.fileno())
            assert fork.wait(300) == 0, words
        shown = (tmp_path / "errors").read_text()
        assert "Traceback" not in shown, words
        assert "BrokenPipe" not in shown, words


def test_help_through_head_ends_in_silence() -> None:
    command = f'set -o pipefail; "{sys.executable}" "{ROOT}/finetuning.py" --help | head -1'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


STREAMS = """
import os, sys
sys.path.insert(0, {root!r})
from utils.streams import keep_standard_streams, refusal
keep_standard_streams()
print("f\\u00fcnf \\udc80")
sys.stdout.close()
print("still open", flush=True)
sys.stdout.buffer.write(b"bytes\\n")
opened = os.open({file!r}, os.O_WRONLY | os.O_CREAT)
assert opened > 2, "no file has the number of a standard stream"
os.write(opened, refusal().encode() or b"none")
"""


@pytest.mark.parametrize(
    ("redirected", "encoding", "printed", "refused"),
    [
        ("", "utf-8", "fünf \\udc80\nstill open\nbytes\n", "none"),
        ("", "ascii", "f\\xfcnf \\udc80\nstill open\nbytes\n", "none"),
        (">/dev/full 2>&1", "utf-8", "", "No space left on device"),
        (">&- 2>&- <&-", "utf-8", "", "none"),
        ("| true", "utf-8", "", "none"),
    ],
)
def test_no_print_fails(redirected: str, encoding: str, printed: str, refused: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STREAMS.format(root=str(ROOT), file=str(tmp_path / "file")))
    command = f'set -o pipefail; "{sys.executable}" "{tmp_path}/script.py" {redirected}'
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", printed)
    assert (tmp_path / "file").read_text() == refused


def test_control_characters_of_names_and_errors_are_shown_and_not_obeyed(tiny_model: Path, tmp_path: Path) -> None:
    r"""A model's folder, a data file and an exception bring escape bytes, C1 controls and direction overrides."""
    name = "mo\x1b]0;owned\x07del\x9b31m\u202etxt"
    model = tmp_path / name
    model.symlink_to(tiny_model)
    (tmp_path / "recipe.py").write_text(
        "def get_rows(config, tokenizer, split):\n    raise ValueError('\x1b[2Jgone')\n"
    )
    run = tmp_path / "run\x1b[31m"
    shown = ""
    for words in (
        flags_of(model, run, *PLAIN),
        flags_of(model, run, *PLAIN),  # refused: there is a run
        flags_of(model, tmp_path / "other", "--dataset", f"{tmp_path}/recipe.py:get_rows"),
        flags_of(tmp_path / f"no{name}", tmp_path / "other"),
    ):
        done = run_forked([str(ROOT / "finetuning.py"), *words])
        shown += done.stdout + done.stderr
    assert r"\x1b]0;owned\x07del\x9b31m\u202etxt" in shown
    assert r"run folder: " in shown
    assert r"already holds a run" in shown
    assert r"\x1b[2Jgone" in shown
    assert not set(shown) & {*map(chr, range(9)), *map(chr, range(11, 32)), *map(chr, range(127, 160)), "\u202e"}
