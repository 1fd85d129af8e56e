"""The table of what tiny models of images learn: what counts as learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops

from benchmarks.families.image_questions import write_questions
from benchmarks.image_learning import has_learned, print_table, read_results


def row(both: float, swapped: float) -> dict[str, Any]:
    shares = {"colour": 1.0, "count": both, "both": both}
    return {"seed": 1, "steps": 250, "seconds": 30, "held_out": shares, "swapped": {**shares, "both": swapped}}


def test_twenty_points_over_chance_and_the_order_of_the_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"seeing": row(0.9, 0.1), "blind": row(0.2, 0.05), "careless": row(0.9, 0.8), "refused": {"error": "no"}}
    lines = [json.dumps({"family": name} | of) for name, of in rows.items()]
    (tmp_path / "learning.jsonl").write_text("\n".join(lines) + "\n")
    results = read_results(tmp_path / "learning.jsonl")
    assert results == rows
    assert [has_learned(results.get(name)) for name in (*rows, "missing")] == [True, False, False, False, False]
    print_table(results)
    assert "| seeing | 1 | 250 | 30 | 100 % | 90 % | 90 % | 10 % |" in capsys.readouterr().out


def test_swapped_questions_are_the_same_but_for_the_order_of_their_pictures(tmp_path: Path) -> None:
    tables = [write_questions(tmp_path / str(swapped), "train", 3, 1, swapped=swapped) for swapped in (False, True)]
    plain, swapped = ([json.loads(line) for line in table.read_text().splitlines()] for table in tables)
    for one, other in zip(plain, swapped, strict=True):
        assert one["messages"] == other["messages"]
        assert one["images"] == other["images"][::-1]
        files = [table.parent / one["images"][0] for table in tables]
        assert ImageChops.difference(*map(Image.open, files)).getbbox() is None
