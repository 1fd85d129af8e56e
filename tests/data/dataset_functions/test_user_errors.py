"""An exception out of a user's file names their line, wherever it was raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.datasets import CustomDataset
from data.dataset_functions.importing import find_dataset_function
from data.pipeline import load_sequences
from utils.errors import ConfigError

START = """\
import datasets
def half(row): return 1 // (len(row) - 1)
def generate(): yield {"a": half([1])}
def get_custom_dataset(dataset_config, tokenizer, split):
"""


def refusal(file: Path, body: str) -> ConfigError:
    file.write_text(f"{START}    {body}\n")
    config = CustomDataset(file=str(file))
    function: Callable[..., Any] = find_dataset_function("custom_dataset", config)
    with pytest.raises(ConfigError) as caught:
        load_sequences(function, config, None, "train", split_slice=None, build=lambda rows, name: list(rows))
    return caught.value


@pytest.mark.parametrize(
    ("body", "reason", "line"),
    [
        ("return half([1])", "ZeroDivisionError: ", 2),
        ("return map(half, [[1]])", "ZeroDivisionError: ", 2),
        ("return datasets.Dataset.from_list([{'a': 1}]).map(half)", "ZeroDivisionError: ", 2),
        ("return datasets.Dataset.from_generator(generate)", "ZeroDivisionError: ", 2),
        ("return datasets.load_dataset('json', data_files='nosuch.json')", "FileNotFoundError: ", 5),
        ("return get_custom_dataset(1, 2, 3)", "RecursionError: ", 5),
        ("raise ValueError('one\\ntwo ' + 1000 * 'x')", "ValueError: one two xxx", 5),
    ],
)
def test_the_line_of_theirs_is_named(body: str, reason: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "my_data.py"
    error = refusal(file, body)
    message = str(error)
    assert message.startswith(f"dataset (get_custom_dataset, split 'train'): {reason}")
    assert message.endswith(f"({file}:{line})")
    assert len(message.splitlines()) == 1
    assert f'File "{file}", line 5' in error.details or line == 2
    assert f'File "{file}", line {line}' in error.details
    assert "pipeline.py" not in error.details
    assert len(error.details.splitlines()) < 120
