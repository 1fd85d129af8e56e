"""Runs whose memory runs out, on a device that is too small for one phase: one account, its file, and no rank left."""

from __future__ import annotations

import html
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from planning.out_of_memory.failure_scene import FailedBatch
from planning.out_of_memory.memory_account import MemoryAccount
from planning.out_of_memory.report import OutOfMemory
from tests.helpers import random_documents
from tests.helpers.limited_files import files_limited_to
from tests.helpers.made import Made
from tests.helpers.pairwise import keep_fast
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.refusals import error_lines
from tests.helpers.small_device import on_small_device
from utils.memory_errors import AllocatorFigures

PHASES = ("forward", "backward", "optimizer_step", "evaluation")
LAYOUTS = {1: [], 2: ["--enable_fsdp"]}
# Forward has the gradient of the head, too: only with few activations and logits does it take less than backward.
OF_BACKWARD = ("--loss_chunk_size", "8", "--activation_checkpointing", "full", "--report")
PARTS = ("params", "grads", "optimizer", "activations", "other")


def flags(model: Path, output: Path, ranks: int, *given: str) -> list[str]:
    """An evaluation takes more than the optimizer step, that more than backward, and that more than forward."""
    argv = ["--model_name", str(model), "--output_dir", str(output), "--num_workers_dataloader", "0"]
    argv += ["--dataset", f"{random_documents.__file__}:get_more_to_evaluate", "--batching_strategy", "padding"]
    argv += [
        "--batch_size_training",
        "1",
        "--context_length",
        "64",
        "--val_batch_size",
        "16",
        "--eval_every_steps",
        "1",
    ]
    return [*argv, "--max_train_step", "3", "--save_model", "False", *LAYOUTS[ranks], *given]


@pytest.fixture(scope="module")
def limits(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """For a number of ranks and more flags: the GiB that are too little for each phase, enough for those before it."""

    def measure(ranks: int, given: tuple[str, ...]) -> dict[str, float]:
        folder = tmp_path_factory.mktemp("whole") / "run"
        process_group.train(on_small_device(flags(tiny_model, folder, ranks, *given)), ranks)
        memory = [e for e in read_metrics(folder) if e["event"] == "memory" and e["rank"] == ranks - 1]
        peaks = [event["peak_allocated_gib"] for event in memory[:5]]  # the last: before the second step's forward
        return {phase: (peaks[at] + peaks[at + 1]) / 2 for at, phase in enumerate(PHASES)}

    return Made(measure)


@pytest.mark.parametrize(
    ("swaps", "phase"),
    keep_fast(
        # Over two ranks forward takes no more than the trial before it: both gather embedding and head.
        [*itertools.product((False,), PHASES), *itertools.product((True,), PHASES[1:])],
        [(False, "forward"), (False, "optimizer_step")],
        full=[(True, phase) for phase in PHASES[1:]],
    ),
)
def test_the_account_names_the_phase_and_no_rank_is_left(
    phase: str, swaps: bool, limits: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """The last rank alone has so little: of two, the other one waits in a collective."""
    ranks = 2 if (phase in ("backward", "evaluation")) != swaps else 1
    given = OF_BACKWARD if phase == "backward" else ()
    argv = flags(tiny_model, tmp_path / "run", ranks, *given)
    limit = limits[ranks, given][phase]
    outcomes = process_group.run(on_small_device(argv, limit, rank=ranks - 1), ranks, timeout_seconds=60)
    printed = "".join(outcome.stderr for outcome in outcomes)
    assert [outcome.status for outcome in outcomes] == [1] * ranks, printed
    (line,) = error_lines(printed)
    words = {"optimizer_step": "in the optimizer step of step 1", "evaluation": "in an evaluation after step 1"}
    who = f"rank {ranks - 1}: " if ranks > 1 else ""
    assert line.startswith(f"error: {who}out of device memory: rank {ranks - 1} of {ranks} on ")
    assert words.get(phase, f"in {phase} of step 1") in line
    assert "Traceback" not in printed
    assert read_metrics(tmp_path / "run")[-1]["status"] == "failed"

    account: dict[str, Any] = json.loads((tmp_path / "run/oom.json").read_text())
    assert (account["rank"], account["phase"], account["step"]) == (ranks - 1, phase, 1)
    assert account["capacity_gib"] == pytest.approx(limit, rel=0.05)
    assert sum(account[f"{part}_gib"] for part in PARTS) == pytest.approx(account["allocated_gib"], rel=0.05)
    assert account["batch"]["rows"] == (16 if phase == "evaluation" else 1)
    assert 0 < account["batch"]["num_label_tokens"] <= account["batch"]["rows"] * account["batch"]["longest_row"]
    assert 0 < account["batch"]["longest_row"] <= account["batch"]["width"] <= 64
    assert (account["optimizer_gib"] > 0) == (phase in ("optimizer_step", "evaluation"))
    assert account["largest"]["params"][0]["name"] == "model.embed_tokens.weight"
    assert not account["fragmented"]
    assert account["plan"]["phases"][phase]["params"] > 0
    assert 0 < len(account["changes"]) <= 3
    if phase == "evaluation":
        assert account["changes"][0]["flags"] == ["--val_batch_size", "1"]
    for change in account["changes"]:
        assert change["command"] in printed
        assert change["saves_gib"] > 0
        assert shlex.split(change["command"])[-2:] == ["--resume", "auto"]
    if phase == "backward":  # whichever rank it was
        page = (tmp_path / "run/report.html").read_text()
        assert f"ran out of device memory on rank {ranks - 1} in backward, step 1" in page
        assert html.escape(account["changes"][0]["command"]) in page


def test_the_first_command_runs_where_the_run_had_ended(
    limits: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """It goes on from the checkpoint in the run folder, on a device as small."""
    argv = flags(tiny_model, tmp_path / "run", 1, "--save_every_steps", "1")
    argv[argv.index("--eval_every_steps") + 1] = "2"
    limit = limits[1, ()]["evaluation"]
    (outcome,) = process_group.run(on_small_device(argv, limit), 1)
    assert outcome.status == 1, outcome.stdout
    assert "in an evaluation after step 2" in outcome.stderr
    command = shlex.split(json.loads((tmp_path / "run/oom.json").read_text())["changes"][0]["command"])
    script = next(place for place, word in enumerate(command) if word.endswith(".py"))  # as this process was started
    process_group.train(on_small_device(command[script + 1 :], limit), 1)
    events = read_metrics(tmp_path / "run")
    assert [event["step"] for event in events if event["event"] == "train"] == [1, 2, 3]
    assert [event["step"] for event in events if event["event"] == "eval"] == [2, 3]
    assert not (tmp_path / "run/oom.json").exists()


@pytest.mark.parametrize(("phase", "share"), [("evaluation", 1.0), ("forward", 0.5)])
def test_memory_in_pieces_is_told_apart_and_its_remedy_comes_first_if_the_run_would_fit(
    phase: str, share: float, limits: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """In forward what has still to come needs more than all pieces together."""
    limit = limits[1, ()][phase]
    device = on_small_device(
        flags(tiny_model, tmp_path / "run", 1), limit * (1 + share), unused=int(share * limit * 2**30)
    )
    (outcome,) = process_group.run(device, 1)
    assert outcome.status == 1
    account = json.loads((tmp_path / "run/oom.json").read_text())
    assert account["fragmented"]
    assert account["unused_gib"] == pytest.approx(share * limit, rel=0.05)
    first = account["changes"][0]
    if phase == "forward":
        assert not any(change["environment"] for change in account["changes"])
        assert re.search(r"planned .* that torch may take: does not fit", outcome.stderr)
        return
    assert first["environment"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert first["command"].startswith("env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ")
    assert re.search(r"fragmentation +\S+ MiB were reserved and not used", outcome.stderr)


def test_before_there_is_a_run_folder_the_account_is_only_printed(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    argv = flags(tiny_model, tmp_path / "run", 1)
    (outcome,) = process_group.run(on_small_device(argv, 0.1 / 1024), 1)
    assert outcome.status == 1
    (line,) = error_lines(outcome.stderr)
    assert "while the model was loaded" in line
    assert re.search(r"parameters +0.\d\d MiB +largest: model.embed_tokens.weight", outcome.stderr)
    assert "oom.json" not in outcome.stderr
    assert not (tmp_path / "run").exists()


def long_row_account(**figures: int) -> MemoryAccount:
    """A row of 131,072 tokens, planned at 51.6 GiB, which needed 73.3 and left 6.1 in pieces (one H100)."""
    gib = {name: int(value * 2**30) for name, value in {"asked": 3.5, "capacity": 79.2, "free": 2.8}.items()}
    gib |= {"allocated": int(69.8 * 2**30), "unused": int(6.1 * 2**30)}
    return MemoryAccount(
        whose="device",
        rank=0,
        world_size=1,
        host="here",
        phase="backward",
        step=2,
        layer=None,
        batch=FailedBatch(rows=1, width=131072, longest_row=131072, targets_width=None),
        figures=AllocatorFigures(**gib | figures),
        num_alloc_retries=0,
        parts={},
        largest={},
        host_figures={},
        plan={"peak_gib": 51.6, "peak_phase": "backward", "phases": {"backward": {"params": 5.6, "activations": 46.0}}},
        error="of the library",
    )


def test_the_account_never_says_that_what_has_failed_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    account = long_row_account()
    (planned,) = [line for line in account.lines() if line.startswith("  planned")]
    assert ": should have fit; it needed 73.30 GiB and more" in planned
    assert planned.endswith("changes are planned with 21.70 GiB more, 0.17 MiB for each token")
    (pieces,) = [line for line in account.lines() if line.startswith("  fragmentation")]
    assert "6.10 GiB were reserved and not used, in pieces smaller than 3.50 GiB" in pieces
    assert pieces.endswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets pieces grow instead")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    assert "although segments may grow" in "\n".join(account.lines())
    whole = long_row_account(unused=0, free=0)
    assert not whole.is_fragmented
    assert "fragmentation" not in "\n".join(whole.lines())


def test_an_account_that_the_disk_refuses_is_printed_all_the_same(tmp_path: Path) -> None:
    account = MemoryAccount(
        whose="host",
        rank=0,
        world_size=1,
        host="here",
        phase="load",
        step=0,
        layer=None,
        batch=None,
        figures=AllocatorFigures(),
        num_alloc_retries=0,
        parts={},
        largest={},
        host_figures={"resident": 3.0},
        plan=None,
        error="of the library",
    )
    error = OutOfMemory(account, list, tmp_path, write_page=None)
    (tmp_path / "oom.json").write_text("earlier")
    with files_limited_to(100):
        first, *_ = error.parts()
    *lines, last = first.split("\n")
    assert lines == account.lines()
    assert last == f"  {tmp_path}/oom.json cannot be written (File too large)"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"oom.json": "earlier"}
    first, *_ = error.parts()
    assert first.endswith(f" {tmp_path}/oom.json")
    assert json.loads((tmp_path / "oom.json").read_text())["error"] == "of the library"
