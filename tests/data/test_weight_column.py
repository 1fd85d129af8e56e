"""A column of weights goes to the tokens of its rows, in every format, read whole or as a stream."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.flags import parse_flags
from data.pipeline import RunData, load_data
from data.sequences.causal import build_sequences
from resolving.inputs import column_notes
from tests.helpers.refusals import write_lines
from utils.errors import ConfigError

ROWS = [{"prompt": f"Say {i}.", "completion": f" It is {i}.", "quality": i / 4} for i in range(9)]
CHATS = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
    | {"quality": row["quality"]}
    for row in ROWS
]
TOKENS = [{"input_ids": [5, 6, 7 + i], "quality": row["quality"]} for i, row in enumerate(ROWS)]
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"


@pytest.fixture
def read(tiny_model: Path, tmp_path: Path) -> Any:
    def load(name: str, rows: list[dict[str, Any]], *flags: str) -> RunData:
        write_lines(tmp_path / "train.jsonl", rows)
        given = ["--model_name", "m", "--dataset", name, f"--{name}.data_path", str(tmp_path / "train.jsonl")]
        given += [f"--{name}.weight_column", "quality", "--run_validation", "False", *flags]
        config = parse_flags([*given, *(["--max_train_step", "2"] if "--streaming" in flags else [])])
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.chat_template = TEMPLATE
        build = partial(build_sequences)
        return load_data(
            config.train_config, config.sources, tokenizer, build_sequences=build, vocab_size=600, context_length=64
        )

    return load


@pytest.mark.parametrize("flags", [(), ("--streaming",)], ids=str)
@pytest.mark.parametrize(
    ("name", "rows"), [("instruction_dataset", ROWS), ("chat_dataset", CHATS), ("custom_dataset", TOKENS)]
)
def test_the_weight_of_a_row_is_that_of_its_tokens(
    name: str, rows: list[dict[str, Any]], flags: tuple[str, ...], read: Any
) -> None:
    data = read(name, rows, *flags)
    assert len(data.train) == len(rows)
    for sequence in data.train:
        wanted = rows[sequence.source_row]["quality"]
        assert sequence.of_tokens["token_weights"].tolist() == [wanted] * len(sequence.input_ids)


def test_a_column_that_is_not_there_and_a_weight_that_is_none_are_refused(read: Any) -> None:
    with pytest.raises(ConfigError, match=r"--instruction_dataset.weight_column: .* has no column 'quality'"):
        read("instruction_dataset", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(ConfigError, match=r"row 2.*: column quality holds -1, and a weight is a number of at least 0"):
        read("instruction_dataset", [ROWS[0], ROWS[1] | {"quality": -1}])


def test_weights_of_nothing_but_zeros_are_refused_unless_more_may_come(read: Any) -> None:
    config, zeros = parse_flags(["--model_name", "m"]), [row | {"quality": 0} for row in ROWS]
    with pytest.raises(ConfigError, match="the weight of every label token in the training data is 0, so nothing"):
        column_notes(config, read("instruction_dataset", zeros))
    (line,) = column_notes(config, read("instruction_dataset", zeros, "--streaming"))
    assert line.endswith("0 on average")
    assert column_notes(config, read("instruction_dataset", zeros[:8] + ROWS[8:]))
