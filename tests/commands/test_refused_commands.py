"""Whole commands, with and without torchrun: refused once, in one line, with no process left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import ROOT, command, run_command
from tests.helpers.refusals import DIFFERS_BY_RANK, Bench, contents, error_lines


def run_refused(
    bench: Bench, *given: str, nproc: int | None = None, within: Sequence[str] = (), real: bool = False
) -> str:
    """As Bench.refused, of the whole command with its launcher: it ends, and leaves no process behind.

    Args:
        within: a command that runs the one given after it.
        real: start new interpreters, not forks.
    """
    before = contents(bench.folder)
    flags = bench.flags(*given)
    if within:
        argv = [*within, *command(*flags, nproc=nproc)]
        done = subprocess.run(argv, cwd=bench.folder, capture_output=True, text=True, timeout=300, check=False)
    else:
        done = run_command(*flags, nproc=nproc, cwd=bench.folder, real=real, HF_HUB_OFFLINE="1")
    processes = [process.info for process in psutil.process_iter(["cmdline", "cwd"])]  # a fork is known by its folder
    words = [word for info in processes for word in [*(info["cmdline"] or []), info["cwd"] or ""]]
    assert not [word for word in words if str(bench.folder) in word], "left behind"
    lines = error_lines(done.stderr)
    assert len(lines) == 1, done.stderr
    assert "Failed to load" not in done.stderr, "a library's own words beside ours"
    assert 'finetuning.py", line' not in done.stderr, "a traceback of this project"
    if nproc is None:
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
    else:  # torchrun's own report follows; a rank that had not come so far yet was ended by it (-15)
        assert done.returncode != 0
        assert set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr)) - {"-15"} == {"2"}, done.stderr
    assert contents(bench.folder) == before
    return lines[0]


def unwritable(folder: Path) -> tuple[list[str], Path]:
    """A command, and a place that the commands it runs cannot write, not even as root where mounts can be made."""
    folder.mkdir()
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 1; shift; exec "$@"'
    for namespace in ("-m", "-rm"):  # root's own, or an unprivileged user's
        within = ["unshare", namespace, "sh", "-c", script, "sh", str(folder)]
        if subprocess.run([*within, "true"], capture_output=True, check=False).returncode == 0:
            return within, folder
    folder.chmod(0o555)
    return [], folder if os.getuid() else Path("/proc")


def test_python_refuses_a_misspelt_flag(bench: Bench) -> None:
    message = run_refused(bench, "--num_epoch", "3", real=True)
    assert "--num_epochs" in message


def test_flags_are_refused_before_torch_is_imported(bench: Bench) -> None:
    """Importing torch and transformers takes seconds, on a busy machine a minute; a misspelt flag takes neither."""
    script = bench.folder / "refuse.py"
    script.write_text(
        "import runpy, sys\n"
        "sys.argv = ['finetuning.py', '--num_epoch', '3']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'finetuning.py')!r}, run_name='__main__')\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == "False\n"
    assert "--num_epochs" in done.stderr


def test_python_refuses_enable_fsdp_and_names_torchrun(bench: Bench) -> None:
    message = run_refused(bench, "--enable_fsdp")
    assert "--enable_fsdp" in message
    assert "torchrun" in message


def test_python_refuses_a_model_name_that_is_neither_here_nor_to_be_reached(bench: Bench) -> None:
    message = run_refused(bench, "--model_name", "no-such-model")
    assert "--model_name" in message
    assert "no-such-model" in message


def test_python_refuses_a_dataset_that_is_neither_here_nor_to_be_reached(bench: Bench) -> None:
    message = run_refused(bench, "--dataset", "alpaca_dataset", "--alpaca_dataset.data_path", "nobody/nothing")
    assert "--alpaca_dataset.data_path" in message
    assert "nobody/nothing" in message


@pytest.mark.slow
def test_python_refuses_an_output_folder_on_a_read_only_file_system(bench: Bench) -> None:
    within, place = unwritable(bench.folder / "mounted")
    message = run_refused(bench, "--output_dir", str(place / "below" / "run"), within=within)
    assert "--output_dir" in message
    assert str(place) in message


@pytest.mark.full
def test_an_existing_output_folder_on_a_read_only_file_system_is_refused_too(bench: Bench) -> None:
    within, place = unwritable(bench.folder / "mounted")
    message = run_refused(bench, "--output_dir", str(place), "--overwrite", within=within)
    assert str(place) in message


def test_python_refuses_a_data_file_that_is_broken(bench: Bench) -> None:
    (bench.folder / "train.jsonl").write_text('{"dialogue": "A: Hi", "summ')
    message = run_refused(bench, "--samsum_dataset.data_path", str(bench.folder / "train.jsonl"))
    assert str(bench.folder / "train.jsonl") in message


@pytest.mark.slow
def test_torchrun_shows_a_misspelt_flag_once(bench: Bench) -> None:
    message = run_refused(bench, "--enable_fsdp", "--batch_size_trainin", "2", nproc=2, real=True)
    assert "--batch_size_training" in message


@pytest.mark.slow
def test_torchrun_shows_a_missing_model_once(bench: Bench) -> None:
    message = run_refused(bench, "--enable_fsdp", "--model_name", str(bench.folder / "absent"), nproc=2)
    assert str(bench.folder / "absent") in message


@pytest.mark.slow
def test_torchrun_shows_an_output_folder_that_is_refused_once(bench: Bench) -> None:
    bench.output.mkdir()
    (bench.output / "metrics.jsonl").write_text("{}\n")
    message = run_refused(bench, "--enable_fsdp", nproc=2)
    assert str(bench.output) in message


@pytest.mark.slow
def test_torchrun_shows_target_modules_that_match_nothing_once(bench: Bench) -> None:
    message = run_refused(bench, "--use_peft", "--lora_config.target_modules", "query", nproc=2)
    assert "query" in message


@pytest.mark.slow
def test_torchrun_shows_ranks_that_read_different_data_once(bench: Bench) -> None:
    message = run_refused(bench, "--enable_fsdp", *bench.dataset_function(DIFFERS_BY_RANK), nproc=2)
    assert "same" in message


@pytest.mark.slow
def test_torchrun_shows_the_refusal_of_one_rank_alone(bench: Bench) -> None:
    # Rank 0 waits for it in its first collective, cannot speak for it, and is ended by torchrun.
    body = "if os.environ['RANK'] == '1':\n    raise OSError('disk is gone')\n"
    given = bench.dataset_function(body + "return [{'input_ids': [5, 6], 'labels': [5, 6]}] * 4")
    message = run_refused(bench, *given, nproc=2)
    assert "rank 1" in message
    assert "disk is gone" in message
