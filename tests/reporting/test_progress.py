"""Progress of a run: bars in a terminal; in a log file no bar, but a line when a long phase starts and when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.processes import ProcessGroup, log_lines

DATASET = """
def get_rows(dataset_config, tokenizer, split):
    return [{"input_ids": [5, 6, 7 + index], "labels": [5, 6, 7 + index]} for index in range(6)]
"""


def flags(model: Path, folder: Path) -> list[str]:
    (folder / "rows.py").write_text(DATASET)
    argv = ["--model_name", str(model), "--output_dir", str(folder / "run"), "--dataset", f"{folder}/rows.py:get_rows"]
    argv += ["--num_workers_dataloader", "0", "--batch_size_training", "1", "--num_epochs", "1"]
    return [*argv, "--batching_strategy", "padding", "--log_every_steps", "2", "--save_every_steps", "2"]


def in_a_terminal(argv: list[str], output: Path) -> int:
    """Run with a pseudo-terminal as stdout and stderr, and write all that it showed."""
    import finetuning

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux says that the other end was closed
            while data := os.read(master, 65536):
                shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with open(slave, "w") as terminal, contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        assert sys.stderr.isatty()
        status = finetuning.main(argv)
    reader.join()
    os.close(master)
    output.write_bytes(b"".join(shown))
    return status


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_in_a_log_file_no_bar_writes_and_phases_have_a_line_at_their_start_and_end(
    num_ranks: int, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    outcomes = process_group.train(flags(tiny_model, tmp_path), num_ranks)
    assert "\r" not in "".join(outcome.stdout + outcome.stderr for outcome in outcomes)
    assert "it/s" not in "".join(outcome.stdout + outcome.stderr for outcome in outcomes)
    lines = log_lines(outcomes[0].stdout)
    num_steps = 6 // num_ranks
    steps = [line for line in lines if line.startswith("step ")]
    assert [int(line.split("/")[0].split()[1]) for line in steps] == [1, *range(2, num_steps, 2), num_steps]
    assert all(re.fullmatch(r"\d:\d\d:\d\d left", line.rsplit(" | ")[-1]) for line in steps), steps
    assert steps[-1].endswith("| 0:00:00 left")
    for name in ("loading weights", "evaluating", "saving the weights"):
        started = lines.index(f"{name} ...")
        assert any(re.fullmatch(rf"{name}: \d+\.\d s", line) for line in lines[started:]), lines
    assert lines.index("saving a checkpoint of step 2 ...") < next(
        index for index, line in enumerate(lines) if line.startswith("checkpoint | step 2 |")
    )
    assert not [line for outcome in outcomes[1:] for line in outcome.stdout.splitlines() if " ..." in line]


def test_in_a_terminal_bars_show_the_same(tiny_model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    process_group.train(partial(in_a_terminal, flags(tiny_model, tmp_path), shown), 1)
    text = shown.read_bytes().decode()
    for bar in ("epoch 1/1", "eval", "weights"):
        assert re.search(rf"\r{bar}: +\d+%\|", text), text
    assert not re.search(r"\.\.\.\r?$", text, re.MULTILINE), "no lines beside the bars"
    assert len(re.findall(r"[\r\n]\d\d:\d\d:\d\d step \d+/6 \|", text)) == 4
