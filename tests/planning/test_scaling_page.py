"""Each figure of docs/scaling.md's tables is what the formulas say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import planned_scaling
from tests.helpers.processes import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("table", ["speed_table", "group_table", "checkpoint_table"])
def test_the_tables_of_the_page_are_computed(table: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/scaling.md").read_text()
    for line in getattr(planned_scaling, table)(tmp_path).splitlines():
        assert line in page
