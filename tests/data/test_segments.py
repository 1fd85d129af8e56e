"""Text in parts: joined as they are, nothing added, and learned where their label is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from tests.helpers.refusals import write_lines
from tests.helpers.tokenizers_of_kinds import byte_level
from utils.errors import ConfigError

SegmentsDataset = DATASETS["segments_dataset"]
PARTS = [{"text": "Rain? ", "label": False}, {"text": "No", "label": 1}, {"text": ".", "label": 0}]


def rows(file: Path, **settings: Any) -> list[tuple[str, str]]:
    """The text of each row, and its label tokens."""
    config, tokenizer = SegmentsDataset(str(file), **settings), byte_level()
    found = find_dataset_function("segments_dataset", config)(config, tokenizer, "train")
    learned = [[label for label in row["labels"] if label != -100] for row in found]
    return [
        (tokenizer.decode(row["input_ids"]), tokenizer.decode(ids)) for row, ids in zip(found, learned, strict=True)
    ]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_parts_are_joined_as_they_are(as_text: bool, streaming: bool, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"parts": json.dumps(PARTS) if as_text else PARTS}])
    found = rows(tmp_path / "rows.jsonl", segments_column="parts", streaming=streaming)
    assert found == [("Rain? No.", "No")], "no start or end token"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ("Rain?", r"row 1: column segments is no JSON"),
        ([], r"row 1: column segments needs a list of parts"),
        ([*PARTS, {"text": "x"}], r"row 1: part 4 needs a text and a label that is true or false"),
        ([{"text": None, "label": True}], r"row 1: part 1 needs a text"),
    ],
)
def test_what_is_no_part_is_refused(parts: Any, reason: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"segments": parts}])
    with pytest.raises(ConfigError, match=reason):
        rows(tmp_path / "rows.jsonl")
    write_lines(tmp_path / "rows.jsonl", [{"text": "Rain?"}])
    with pytest.raises(ConfigError, match=r"has no column segments; it has text, .*--segments_dataset.segments_column"):
        rows(tmp_path / "rows.jsonl")
