"""The run that others are compared with, or begin as a copy of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import ProcessGroup
from tests.helpers.resuming import PLAIN, flags_of


@pytest.fixture(scope="session")
def whole(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank that was not interrupted. Nothing may write into it. Some modules have one of their own."""
    run = tmp_path_factory.mktemp("whole") / "run"
    process_group.train(flags_of(tiny_model, run, *PLAIN), 1)
    return run
