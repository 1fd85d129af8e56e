"""Columns that say in other tools whether a row is learned: no format reads them, so such rows are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.splits.learned_columns import refuse_unlearned
from data.tokens.spans import BadExample
from tests.helpers.chat_templates import FAMILIES
from tests.helpers.refusals import write_lines
from utils.errors import ConfigError

CHAT = {"messages": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No."}]}
ROWS = {
    "chat_dataset": CHAT,
    "alpaca_dataset": {"instruction": "Rain?", "output": "No."},
    "instruction_dataset": {"prompt": "Rain?", "completion": "No."},
    "text_dataset": {"text": "No rain."},
}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        pytest.param("weight", 10**400, id="more than a float"),
        *(("weight", 0), ("weight", 0.5), ("weight", "0.5"), ("sample_weight", 2), ("Train", "false"), ("loss", False)),
        *(("loss_mask", [0, 1]), ("lossMask", 0), ("trainable", False), ("masked", True), ("mask", "Assistant")),
        *(("is_masked", True), ("shouldTrain", False), ("do_not_train", 1), ("skip", "yes"), ("include", False)),
    ],
)
def test_a_value_that_says_not_to_learn_or_to_learn_in_part_is_refused(column: str, value: Any) -> None:
    with pytest.raises(BadExample, match=f"column {column} is .*, which seems to say whether the row is learned"):
        refuse_unlearned(column, value)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("weight", 1), ("weight", "1.0"), ("weight", "72 kg"), ("weight", None), ("loss", 1.83)),
        *(("loss", float("nan")), ("train", True), ("masked", False), ("mask", "User"), ("loss_mask", [])),
        *(("is_masked", False), ("should_train", True), ("do_not_train", 0), ("skip", "the introduction")),
    ],
)
def test_any_other_value_is_not_read(column: str, value: Any) -> None:
    refuse_unlearned(column, value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_the_row_is_named_in_every_format(name: str, streaming: bool, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [ROWS[name], ROWS[name] | {"weight": 0}])
    config = DATASETS[name](str(tmp_path / "rows.jsonl"), streaming=streaming)
    with pytest.raises(ConfigError, match=r"rows\.jsonl, row 2: column weight is 0"):
        list(find_dataset_function(name, config)(config, FAMILIES["ChatML"].tokenizer(), "train"))


def test_a_column_that_was_named_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "Anna's weight?", "weight": "0", "loss": 1.5}
    write_lines(tmp_path / "rows.jsonl", [row])
    config = DATASETS["instruction_dataset"](str(tmp_path / "rows.jsonl"), completion_column="weight")
    rows = find_dataset_function("instruction_dataset", config)(config, FAMILIES["ChatML"].tokenizer(), "train")
    assert len(rows) == 1
    assert "columns that are not read: loss\n" in capsys.readouterr().out
