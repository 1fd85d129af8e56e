"""benchmarks/gpu_matrix.py: which rows it has, how it judges them, and a few of them run on a CPU."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_matrix import main, outcome, verdict
from benchmarks.matrix.rows import AXES, NUM_STEPS, SAMPLES, MatrixRow, is_allowed, matrix, row_of
from benchmarks.matrix.run_workers import RankEnd, RunWorkers
from tests.helpers.forked_workers import start_forked
from tests.helpers.made import Made
from tests.helpers.processes import ROOT

FIGURES = {"steps": [[1, 1, 10], [0, 1, 10], [2, 1, 10]], "peak_bytes": 2**30}
EVENTS = [
    *({"event": "train", "step": step, "loss": 6.0 - step} for step in range(1, NUM_STEPS + 1)),
    {"event": "memory", "params_gib": 1.0, "grads_gib": 0.5, "optimizer_gib": 2.0},
    {"event": "eval", "loss": 3.0},
]
ROWS = Made(lambda compiles_slowly: matrix(compiles_slowly=compiles_slowly))


def ends(*statuses: int, text: str = "") -> list[RankEnd]:
    return [RankEnd(status, text if rank == 0 else "", FIGURES, {}) for rank, status in enumerate(statuses)]


@pytest.mark.parametrize(
    ("of_ranks", "ended", "line"),
    [
        (ends(2, 2, text="error: --x: no; y"), "refused", "--x: no; y"),
        (ends(2, -15, text="error: --x: no; y"), "refused", "--x: no; y"),
        (ends(2, 2, text="error: --x: no; y\nerror: again"), "failed", "exit statuses [2, 2], 2 error lines: again"),
        (ends(2, 2, text="Traceback\nerror: --x: no; y"), "failed", "exit statuses [2, 2], 1 error lines: --x: no; y"),
        (ends(0, -9, text="step 3"), "failed", "exit statuses [0, -9], 0 error lines: step 3"),
        (
            ends(1, 1, text="error: rank 1: --compile"),
            "failed",
            "exit statuses [1, 1], 1 error lines: rank 1: --compile",
        ),
    ],
)
def test_a_row_that_does_not_finish_is_refused_in_one_line_or_has_failed(
    of_ranks: list[RankEnd], ended: str, line: str
) -> None:
    assert outcome(of_ranks, []) == {"ended": ended, "line": line}


def test_a_row_that_finishes_has_its_figures() -> None:
    found = outcome(ends(0, 0), EVENTS)
    assert (found["ended"], found["losses"], found["eval_loss"]) == ("finished", [5.0, 4.0, 3.0, 2.0, 1.0, 0.0], 3.0)
    assert (found["recompiled"], found["peak_gib"], found["held_gib"]) == (2, 1.0, 3.5)
    assert outcome(ends(0, 0), EVENTS[1:])["ended"] == "failed", "a step is missing"


def test_a_row_is_right_if_its_losses_are_near_those_of_the_plain_run_of_the_same_data() -> None:
    plain_run = {"rows": "padded", "clipping": "yes", "evaluation": "yes"}
    row = row_of({"layout": "FULL_SHARD", "trained": "nf4", "precision": "fp16"} | plain_run)
    assert row.reference == MatrixRow(row_of({"trained": "LoRA"} | plain_run).values, unpacked_from="nf4")
    assert row.reference.reference == row.reference
    assert (row.packing, row.reference.packing, row.bound) == ("nf4", "nf4", pytest.approx(0.002 + 5e-4))
    in_bf16 = row_of({"layout": "NO_SHARD", "precision": "bf16-true", "optimizer": "8-bit"})
    assert in_bf16.reference == row_of({"precision": "bf16-true", "evaluation": "yes"})
    plain = {"ended": "finished", "losses": [4.0, 2.0], "eval_loss": 2.0}

    def judged(result: dict[str, Any]) -> tuple[str, float]:
        return verdict(row, {row.name: result, row.reference.name: plain})

    assert judged(plain | {"losses": [4.0, 2.002]}) == ("right", pytest.approx(0.001))
    assert judged(plain | {"losses": [4.2, 2.0]}) == ("wrong", pytest.approx(0.05))
    assert judged(plain | {"eval_loss": 2.5}) == ("wrong", pytest.approx(0.25))
    assert judged({"ended": "refused", "line": ""})[0] == "refused"
    assert verdict(row, {row.reference.name: plain})[0] == "not run yet"


@pytest.mark.slow
def test_every_pair_of_values_is_in_a_row_on_one_device_and_on_two() -> None:
    rows = ROWS[False]
    assert len(rows) >= 60
    axes = list(AXES)
    for is_one in (True, False):
        of_size = [row for row in rows if (row.num_ranks == 1) == is_one]
        held = {pair for row in of_size for pair in combinations(zip(axes, row.values, strict=True), 2)}
        layouts = [layout for layout in AXES["layout"] if (layout == "one") == is_one]
        values = [[("layout", layout) for layout in layouts]]
        values += [[(axis, value) for value in AXES[axis]] for axis in axes[1:]]
        assert held >= {(a, b) for first, second in combinations(values, 2) for a in first for b in second}
    assert all(len(row.flags(Path("M"), Path("O"), 512)) > 10 for row in rows)
    assert {row["trained"] for row in rows if not is_allowed(row)} == {"DoRA"}


@pytest.mark.slow
def test_the_table_of_the_page_has_every_row_and_all_are_right_or_refused() -> None:
    page = (ROOT / "docs/support.md").read_text().partition("## On a CPU")[2]
    lines = [line.strip("| ").split("|") for line in page.splitlines() if re.match(r"\| (one|\w+_SHARD|\w+_OP) ", line)]
    found = sorted([cell.strip() for cell in line][:8] for line in lines)
    assert [cells[:6] for cells in found] == sorted(list(row.values[:6]) for row in ROWS[True])
    assert {cells[7].partition(":")[0] for cells in found} == {"right", "refused"}


@pytest.mark.slow
def test_rows_run_on_a_cpu_and_a_call_goes_on_where_the_one_before_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By forks; new interpreters are started below."""
    monkeypatch.setattr(RunWorkers, "_start", start_forked)
    rows = [row for row in ROWS[True] if row["compiled"] == "no" and row["resumed"] == "yes"]
    chosen = [next(row for row in rows if row.num_ranks == ranks) for ranks in (1, 2)]
    results = tmp_path / "results.jsonl"
    argv = ["--device", "cpu", "--lanes", "2", "--results", str(results), "--rows", *(row.name for row in chosen)]
    assert main([*argv, "--minutes", "0"]) == 1
    assert not results.exists()
    assert main(argv) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert printed.count("| right |") == 2
    kept = results.read_text()
    assert {json.loads(line)["row"] for line in kept.splitlines()} >= {row.name for row in chosen}
    assert main(argv) == 0
    assert results.read_text() == kept, "what has a result is not run again"


@pytest.mark.slow
def test_a_process_that_dies_is_a_result_and_the_next_run_has_a_new_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that dies is a fork, the next a new interpreter."""
    (tmp_path / "dies.py").write_text(
        "import os, signal\ndef rows(config, tokenizer, split):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    row = row_of({"trained": "DoRA", "compiled": "yes"})
    workers = RunWorkers(1, tmp_path)
    flags = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run")]
    with monkeypatch.context() as forking:
        forking.setattr(RunWorkers, "_start", start_forked)
        (killed,) = workers.run([*flags, "--dataset", f"{tmp_path}/dies.py:rows"], 300)
    assert (killed.status, killed.figures) == (-9, {})
    (refused,) = workers.run(row.flags(tiny_model, tmp_path / "run", 128), 300)
    workers.close()
    assert outcome([refused], [])["ended"] == "refused"
    assert "--use_dora" in refused.text
    assert SAMPLES.is_dir()


def test_a_name_is_that_of_its_row() -> None:
    row = row_of({"trained": "int8", "resumed": "yes"})
    assert MatrixRow(tuple(row.name.split())) == row
