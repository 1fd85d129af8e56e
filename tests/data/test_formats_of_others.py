"""The table of other tools' formats in docs/datasets.md, row by row: what is learned of such a file, or the refusal."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from configs.flags import parse_flags
from data.dataset_functions.importing import find_dataset_function
from data.tokens.labels import IGNORE_INDEX
from tests.helpers.chat_templates import CHATML, FAMILIES
from tests.helpers.documented import DATASETS
from tests.helpers.formats_of_others import FORMATS
from tests.helpers.processes import ROOT
from utils.errors import ConfigError

OWN_FUNCTION = ROOT / "tests/helpers/llama_recipes_dataset.py"
THOUGHTS = "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '')"
TEMPLATE = CHATML.replace("(message['content'] or '')", f"{THOUGHTS} + (message['content'] or '')")


@dataclass(frozen=True)
class Documented:
    """A row of the table."""

    tool: str
    form: str
    flags: str
    refusal: str | None

    @property
    def names(self) -> list[str]:
        """What the form's rows have."""
        return re.findall(r"`([^`]+)`", self.form)


def documented() -> Iterator[Documented]:
    (table,) = re.findall(r"\| from \| a row has \| how it is taken \|\n\|[-|]+\|\n((?:\|.*\n)+)", DATASETS.read_text())
    for line in table.splitlines():
        tool, form, how = (cell.strip() for cell in line.strip("|").split(" | "))
        found = re.fullmatch(r"`([^`]+)`(?:: refused, `([^`]+)`)?", how)
        assert found, line
        yield Documented(tool, form, found[1], found[2])


ROWS = list(documented())


def test_every_row_of_the_table_has_a_file_here_and_every_file_a_row() -> None:
    named = [(row.tool, row.form) for row in ROWS]
    assert len(named) == len(set(named))
    assert set(named) == set(FORMATS)


def written(folder: Path, rows: list[dict[str, Any]], is_csv: bool) -> Path:
    if not is_csv:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder / "rows.jsonl"
    with open(folder / "rows.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    return folder / "rows.csv"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.tool}: {row.form}")
def test_a_format_is_taken_as_the_table_says(row: Documented, tmp_path: Path) -> None:
    form = FORMATS[row.tool, row.form]
    flags = shlex.split(row.flags.replace("FILE.py", str(OWN_FUNCTION)))
    if form.rows:
        file = written(tmp_path, form.rows, "CSV" in row.form)
        text = file.read_text()
        assert not [name for name in row.names if name not in text and name != "roles_to_train:"]
        flags += [f"--{flags[1]}.data_path", str(file)]
    if flags[1] == "alpaca_dataset":
        flags += ["--alpaca_dataset.validation_fraction", "0"]  # or one row would be no training row
    config = parse_flags(["--model_name", "M", *flags])
    ((name, settings),) = config.dataset_configs.items()
    tokenizer = FAMILIES["ChatML"].tokenizer(TEMPLATE)
    function = find_dataset_function(name, settings)
    if row.refusal is not None:
        with pytest.raises(ConfigError, match=re.escape(row.refusal)):
            list(function(settings, tokenizer, "train"))
        return
    assert learned(function(settings, tokenizer, "train"), tokenizer) == form.learned


def learned(rows: Any, tokenizer: Any) -> list[list[str]]:
    """The label tokens of each row, decoded, those that stand together as one text."""
    found = []
    for row in rows:
        runs, last = list[list[int]](), None
        for place, label in enumerate(row["labels"]):
            if label != IGNORE_INDEX:
                runs += [[]] if last != place - 1 else []
                runs[-1].append(label)
                last = place
        found.append([tokenizer.decode(run) for run in runs])
    return found
