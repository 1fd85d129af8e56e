"""Nodes without a shared disk: checkpoints are whole on rank 0's node, and every rank goes on from there."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from run_folder.checkpoint_folder import checkpoints
from tests.helpers import own_folder
from tests.helpers.processes import ROOT, SHORT_GRACE, Captured, ProcessGroup, process_variables, ranks_of
from tests.helpers.refusals import error_lines
from tests.helpers.resuming import SHARDED, assert_bit_equal, flags_of

STEPS = ["--max_train_step", "24", *SHARDED]


class Hosts:
    """Two machines of one rank each, on which RUNS is a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.disks = [folder / "disk-0", folder / "disk-1"]
        self.own_files: list[str] = []  # that both find besides: PATH=SOURCE
        for path in (self.runs, *self.disks):
            path.mkdir()

    def start(self, *flags: str) -> list[Captured]:
        alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", **SHORT_GRACE}
        return [
            Captured(
                [str(own_folder.__file__), f"{self.runs}={disk}", *self.own_files, str(ROOT / "finetuning.py"), *flags],
                self.runs.parent,
                process_variables(variables | alone),
            )
            for variables, disk in zip(ranks_of(2), self.disks, strict=True)
        ]

    def run(self, *flags: str, status: int = 0) -> str:
        """What rank 0 prints until both end with this status."""
        outcomes = [rank.outcome(300) for rank in self.start(*flags)]
        assert [outcome.status for outcome in outcomes] == [status] * 2, outcomes
        return outcomes[0].stdout + outcomes[0].stderr

    def have_no_free_memory(self) -> None:
        """Let Linux say so in the file that programs read it from."""
        meminfo = self.runs.parent / "meminfo"
        there = Path("/proc/meminfo").read_text()
        meminfo.write_text(re.sub(r"(?m)^(MemAvailable: +)\d+", r"\g<1>8", there))
        self.own_files = [f"/proc/meminfo={meminfo}"]

    def lose(self, disk: int) -> None:
        shutil.rmtree(self.disks[disk])
        self.disks[disk].mkdir()


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


@pytest.mark.slow
def test_a_run_is_killed_loses_a_disk_and_goes_on_bit_for_bit(
    hosts: Hosts, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    process_group.train(flags_of(tiny_model, whole, *STEPS), 2)

    run, flags = hosts.disks[0] / "run", flags_of(tiny_model, hosts.runs / "run", *STEPS, "--resume", "auto")
    ranks = hosts.start(*flags)
    deadline = time.monotonic() + 300
    while not checkpoints(run / "checkpoints"):
        assert time.monotonic() < deadline, [rank.outcome(1) for rank in ranks]
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
    printed = ranks[0].outcome(300).stdout
    assert "checkpoints: gathered and written by rank 0 on " in printed
    assert "since rank 1 does not see the disk of " in printed
    assert not list(hosts.disks[1].rglob("step-*")), "all of it is on the first one"

    hosts.lose(1)
    assert f"resume: from {hosts.runs}/run/checkpoints/step-" in hosts.run(*flags)
    assert_bit_equal(run, whole)

    hosts.lose(0)
    printed = hosts.run(*flags)
    assert f"resume: there is no checkpoint in {hosts.runs}/run/checkpoints on " in printed


def test_shards_that_one_node_does_not_see_are_refused(
    hosts: Hosts, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    process_group.train(flags_of(tiny_model, hosts.disks[0] / "run", *SHARDED, "--max_train_step", "3"), 2)
    given = flags_of(tiny_model, hosts.runs / "run", *SHARDED, "--max_train_step", "4", "--resume", "auto")
    (line,) = error_lines(hosts.run(*given, status=2))
    assert "holds shards that rank 1 does not see; put it on a disk that all nodes share" in line


def test_a_run_that_cannot_save_is_refused_or_trains_without(hosts: Hosts, tiny_model: Path) -> None:
    hosts.have_no_free_memory()
    given = flags_of(tiny_model, hosts.runs / "run", *SHARDED, "--max_train_step", "2")
    (line,) = error_lines(hosts.run(*given, status=2))
    assert re.search(r"rank 1 does not see the disk of \S+/run/checkpoints, and the host memory of rank 0 has no", line)
    assert line.endswith("or --save_model False to train without checkpoints and results")
    assert not [path for disk in hosts.disks for path in disk.rglob("*")], "nothing was written"

    printed = hosts.run(*given, "--save_model", "False")
    assert "checkpoints: none, since rank 1 does not see the disk of " in printed
    assert not [path for disk in hosts.disks for path in disk.rglob("step-*")]
