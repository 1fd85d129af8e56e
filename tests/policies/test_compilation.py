"""A layer that torch.compile cannot compile ends the run in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.generated import flags
from tests.helpers.no_compiler import without_compiler
from tests.helpers.processes import ProcessGroup


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["everywhere", "on rank 1 alone"])
def test_a_layer_that_does_not_compile_is_named_once_and_no_rank_is_left(
    ranks: tuple[int, ...], tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    argv = flags(tiny_model, samples, tmp_path / "run", "--compile", "--context_length", "64", "--max_train_step", "2")
    outcomes = process_group.run(without_compiler(argv, ranks), 2)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if line.startswith("error:")]
    (line,) = said
    assert "--compile: torch.compile failed on a layer" in line
    assert "/nowhere/c++" in line
    assert not any("Traceback" in outcome.stderr for outcome in outcomes)
