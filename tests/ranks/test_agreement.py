"""Ranks that were started with, or find, something else are refused: on every rank, by name, with nothing written."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ranks.agreement import RankFacts, disagreement
from tests.helpers.processes import ROOT, SHORT_GRACE, Captured, process_variables, ranks_of
from tests.helpers.refusals import Bench, contents, dialogues, error_lines, write_lines
from utils import software

LIMIT_SECONDS = 120  # a refusal takes two seconds; a busy machine is no failure
SCRIPT = (str(ROOT / "finetuning.py"),)


def refused(bench: Bench, first: list[str], second: list[str], *, second_script: Sequence[str] = SCRIPT) -> str:
    """The line with which two ranks of these flags are refused. `second_script`: what the second one runs."""
    before = contents(bench.folder)
    environments = [process_variables(variables | SHORT_GRACE) for variables in ranks_of(2)]
    commands = [[*SCRIPT, *bench.flags(*first)], [*second_script, *bench.flags(*second)]]
    ranks = [Captured(argv, bench.folder, env) for argv, env in zip(commands, environments, strict=True)]
    began = time.monotonic()
    outcomes = [rank.outcome(LIMIT_SECONDS - (time.monotonic() - began)) for rank in ranks]
    printed = "\n".join(outcome.stderr for outcome in outcomes)
    assert [outcome.status for outcome in outcomes] == [2, 2], printed
    assert "Traceback" not in printed
    assert contents(bench.folder) == before
    (line,) = error_lines(outcomes[0].stderr)
    # No launcher ends these ranks: until their watchdogs have started, the other one repeats it.
    assert error_lines(outcomes[1].stderr) in ([], [line.replace("error: ", "error: rank 1: ", 1)])
    return line


@pytest.mark.parametrize(
    ("flag", "first", "second"),
    [
        ("--lr", "0.001", "0.002"),
        ("--seed", "1", "2"),
        ("--enable_fsdp", "False", "True"),
        ("--use_peft", "True", "False"),
        pytest.param("--optimizer", "AdamW", "SGD", marks=pytest.mark.slow),
        pytest.param("--weight_decay", "0.1", "0.2", marks=pytest.mark.slow),
        pytest.param("--scheduler", "cosine", "linear", marks=pytest.mark.slow),
        pytest.param("--max_train_step", "2", "3", marks=pytest.mark.slow),
        pytest.param("--save_every_steps", "2", "3", marks=pytest.mark.slow),
        pytest.param("--batch_size_training", "1", "2", marks=pytest.mark.slow),
    ],
)
def test_another_setting_is_refused(bench: Bench, flag: str, first: str, second: str) -> None:
    host = socket.gethostname()
    line = refused(bench, [flag, first], [flag, second])
    assert f"{flag}: {second} on rank 1 ({host}), {first} on rank 0 ({host})" in line
    assert "give the same command on every machine" in line


def test_another_output_dir_is_refused_and_neither_is_made(bench: Bench) -> None:
    line = refused(bench, ["--output_dir", "here"], ["--output_dir", "there"])
    assert f"--output_dir: {bench.folder}/there on rank 1 " in line
    assert f", {bench.folder}/here on rank 0 " in line


def test_other_weights_of_the_same_shapes_are_refused(bench: Bench) -> None:
    file = bench.copy_of_model() / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + 1e-3 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    line = refused(bench, ["--enable_fsdp"], ["--enable_fsdp", "--model_name", str(file.parent)])
    assert "--model_name, model.safetensors: " in line
    assert "copy the model to every machine again" in line


@pytest.mark.parametrize("late", ["another row", "a longer row"])
def test_a_stream_that_differs_late_is_refused(late: str, bench: Bench, tmp_path: Path) -> None:
    """The first rows are the same, and so is the name that a machine has for them."""
    paths = []
    for rank, folder in enumerate(("first", "second")):
        rows = dialogues(3000)
        if rank:
            rows[2200:] = [row | {"summary": row["summary"][::-1]} for row in rows[2200:]]
            rows[-1] |= {"summary": "Late."} if late == "a longer row" else {}
        write_lines(tmp_path / folder / "train.jsonl", rows)
        paths.append(["--samsum_dataset.data_path", str(tmp_path / folder / "train.jsonl")])
    common = ["--samsum_dataset.streaming", "--max_train_step", "2", "--run_validation", "False"]
    line = refused(bench, [*common, *paths[0]], [*common, *paths[1]])
    assert re.search(r"--dataset, .*split 'train', number of files: 1, \d+ bytes, digest \w+ on rank 1 ", line), line
    assert "copy the data to every machine again" in line


def test_the_same_weights_elsewhere_are_not_refused(bench: Bench) -> None:
    copy = bench.copy_of_model()
    given = ["--enable_fsdp", "--max_train_step", "1", "--save_model", "False"]
    environments = [process_variables(variables | SHORT_GRACE) for variables in ranks_of(2)]
    ranks = [
        Captured([*SCRIPT, *bench.flags(*given, *more)], bench.folder, env)
        for more, env in zip(([], ["--model_name", str(copy)]), environments, strict=True)
    ]
    outcomes = [rank.outcome(300) for rank in ranks]
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes


def test_another_config_of_the_model_and_another_adapter_are_refused(bench: Bench) -> None:
    copy = bench.copy_of_model()
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert (copy / "config.json").read_text() != config
    line = refused(bench, [], ["--model_name", str(copy)])
    assert "--model_name: rms_norm_eps of config.json: 1e-05 on rank 1 " in line


def test_another_state_of_this_repository_is_refused(bench: Bench) -> None:
    code = f"""
import runpy, sys
import resolving.agreement
resolving.agreement.code_checksum = lambda: "0123456789ab"
sys.path[0] = {str(ROOT)!r}
runpy.run_path({str(ROOT / "finetuning.py")!r}, run_name="__main__")
"""
    line = refused(bench, [], [], second_script=["-c", code])
    assert "this repository's code: commit " in line
    assert ", files 0123456789ab on rank 1 " in line
    assert "install the same on every machine" in line


def test_the_checksum_of_the_code_tells_of_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_ROOT", tmp_path)
    for name in ("a/__init__.py", "a/b/code.py", "datasets/kind.py", "script.py", "tests/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        before = software.code_checksum()
        (tmp_path / name).write_text("1")
        assert (software.code_checksum() != before) == (name != "tests/__init__.py")


def test_many_ranks_of_one_host_are_named_together() -> None:
    first = RankFacts(0, "a", {"give the same command": {"--lr": 0.1, "--seed": 1}})
    others = [RankFacts(rank, "b", {"give the same command": {"--lr": 0.2}}) for rank in range(8, 16)]
    others += [RankFacts(20, "c", {"give the same command": {"--seed": 2}})]
    line = disagreement(first, others)
    assert line == (
        "--lr: 0.2 on ranks 8-15 (b), 0.1 on rank 0 (a); --seed: 2 on rank 20 (c), 1 on rank 0 (a); "
        "give the same command"
    )
    assert disagreement(first, [RankFacts(1, "b", {})]) == ""
