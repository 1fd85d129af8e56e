"""plan.json is written if the run can be planned; if not, the run goes on and a line says why."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finetuning
from configs.flags import parse_flags
from planning.plan_file import plan_at_start, write_plan
from ranks.environment import lone_process
from resolving.data_facts import DataFacts
from resolving.resolved import Resolved, resolve
from tests.helpers.generated import flags
from tests.helpers.limited_files import files_limited_to
from tests.helpers.processes import ProcessGroup
from utils.atomic_write import FileWriteError


@pytest.fixture
def resolved(tiny_model: Path) -> Resolved:
    return resolve(parse_flags(["--model_name", str(tiny_model), "--batching_strategy", "padding"]), lone_process())


def test_it_holds_the_plan(resolved: Resolved, tmp_path: Path) -> None:
    plan = plan_at_start(resolved, lone_process(), DataFacts())
    write_plan(tmp_path, plan.values)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert (written["hardware"], written["world_size"]) == ("1xCPU", 1)
    assert not plan.notes


def test_a_disk_that_refuses_it_is_named_and_no_half_of_it_is_left(resolved: Resolved, tmp_path: Path) -> None:
    plan = plan_at_start(resolved, lone_process(), DataFacts())
    with files_limited_to(100), pytest.raises(FileWriteError, match=r"plan\.json cannot be written \(File too large\)"):
        write_plan(tmp_path, plan.values)
    assert not list(tmp_path.iterdir())


def test_it_says_which_micro_batch_it_is_made_for(resolved: Resolved) -> None:
    """Padded rows: the longest that this run's steps take, if that can be known; else the longest that there may be."""
    batches = replace(resolved.batches, rows_per_micro_batch=4)
    lengths, limit = np.array([*[10] * 40, *[60] * 5]), resolved.context_length

    def planned(num_steps: int, facts: DataFacts) -> tuple[dict[str, Any], float]:
        config = resolved.config
        train = replace(config.train_config, batch_size_training=4, max_train_step=num_steps)
        rows = replace(resolved, config=replace(config, train_config=train), batches=batches)
        plan = plan_at_start(rows, lone_process(), facts).values
        assert plan is not None, "planned"
        return plan["micro_batch"], plan["peak_gib"]

    one, few = planned(1, DataFacts(lengths=(lengths,)))
    rest, more = planned(12, DataFacts(lengths=(lengths,)))
    most, all_rows = planned(0, DataFacts(lengths=(lengths,)))
    assert one == {"rows": 4, "widths": (16,), "source": "as wide as the longest row of the run's 1 step"}
    assert rest == {"rows": 4, "widths": (64,), "source": "as wide as the longest row of the run's 12 steps"}
    assert (most["rows"], most["widths"]) == (4, (64,))
    assert few < more == all_rows
    start, unknown = (planned(1, facts)[0] for facts in (DataFacts(lengths=(lengths,), is_start=True), DataFacts()))
    assert start["source"] == "what a stream goes on with is not known: as long as rows may be"
    assert unknown["source"] == "the data is not at hand: as long as rows may be"
    assert start["widths"] == unknown["widths"] == (limit,)


def test_a_run_that_cannot_be_planned_goes_on_and_says_so(resolved: Resolved, tmp_path: Path) -> None:
    plan = plan_at_start(resolved, lone_process(), DataFacts(lengths=(np.array([]),)))
    write_plan(tmp_path, plan.values)
    assert plan.notes[0].startswith("plan.json: not written, since this run could not be planned (")
    assert not list(tmp_path.iterdir())


def test_rank_0_alone_reads_the_speeds_that_it_plans_with(
    tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    speeds = {
        name: {"latency_seconds": 1e-4, "seconds_per_byte": 1e-9}
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    }
    groups = {"world": {"size": 2, **speeds}, "node": {"size": 2, **speeds}, "between": {"size": 1, **speeds}}
    (tmp_path / "speeds.json").write_text(json.dumps({"speeds": groups}))
    argv = flags(tiny_model, samples, tmp_path / "run", "--enable_fsdp", "--max_train_step", "1")
    outcomes = process_group.run(partial(_with_own_speeds, argv, tmp_path), 2)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes[1].stderr


def _with_own_speeds(argv: list[str], folder: Path) -> int:
    """A run whose other ranks, on a machine of their own, do not have the file."""
    name = "speeds.json" if os.environ["RANK"] == "0" else "not_copied.json"
    return finetuning.main([*argv, "--network_speeds", str(folder / name)], ends_process=True)
