"""Rows that are tokenized already (`input_ids`, optional `labels` and `attention_mask`), from a file of any kind.

python finetuning.py --model_name M --dataset custom_dataset --custom_dataset.data_path rows.jsonl

Without a column `labels`, every token is a label token. For an encoder-decoder `labels` holds the targets' tokens.
Columns that TRL writes (`completion_mask`, `assistant_masks`, `seq_lengths`) are read, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data.sequences.prepared_rows import PREPARED_COLUMNS, refusal_of_mask, unknown_mask
from data.sequences.token_columns import SAMPLE_WEIGHT, TOKEN_COLUMNS
from data.sequences.token_lists import whole_numbers, zeros_and_ones
from data.splits.examples import SplitExamples
from data.splits.reading import load_split
from data.tokens.encoding import ONE_TEXT, Encode
from data.tokens.spans import BadExample
from utils.errors import ConfigError

COLUMNS = ("input_ids", "labels", "attention_mask")


def get_tokenized_dataset(
    dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None, encode: Encode = ONE_TEXT
) -> Any:
    """The rows as they are, with arrays for lists; whoever makes sequences of them compares lengths and vocabulary."""
    others = (*COLUMNS, *PREPARED_COLUMNS, *TOKEN_COLUMNS)
    examples = load_split("custom_dataset", dataset_config, split, split_slice, other_columns=others)
    if "input_ids" not in examples.columns:
        raise ConfigError(
            f"{examples.name} has no column input_ids; it has {examples.columns_there}: give rows that are "
            "tokenized, a --dataset for such columns, or a function of yours that reads them (--custom_dataset.file)"
        )
    if name := unknown_mask(examples.all_columns):
        raise ConfigError(f"{examples.name}: {refusal_of_mask(name)}")
    if "labels" not in examples.columns and not encode.is_one_text:
        raise ConfigError(
            f"{examples.name} has no column labels, and an encoder-decoder learns targets of their own; add the token "
            "ids of each row's target"
        )
    examples.refuse_absent(COLUMNS[:2])
    examples.say_unread()
    return TokenizedRows(examples)


class TokenizedRows:
    """The rows of a split, in their order. A class, so that a stream can be pickled for a worker process."""

    def __init__(self, examples: SplitExamples) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for index, row in self.examples.numbered():
            try:
                yield self._read(row)
            except BadExample as error:
                self.examples.refusal(index, error)
                yield {"input_ids": [], "labels": []}

    def _read(self, row: Mapping[str, Any] | BadExample) -> Mapping[str, Any]:
        if isinstance(row, BadExample):
            raise row
        row = self.examples.with_text(row)
        if self.examples.weight_column is not None:
            row[SAMPLE_WEIGHT] = self.examples.take_weight(row)
        known = {name: value for name, value in row.items() if value is not None}
        has_labels = "labels" in self.examples.columns
        for name in ("input_ids", *(["labels"] if has_labels else [])):
            if not isinstance(known.get(name), Sequence) or isinstance(known[name], str):
                raise BadExample(f"column {name} is not a list of token ids")
            known[name] = whole_numbers(name, known[name])
        if "attention_mask" in known:
            known["attention_mask"] = zeros_and_ones("attention_mask", known["attention_mask"])
        if "labels" in known and not has_labels:  # of a stream, whose first rows have none
            raise BadExample("it has labels, and the first rows have none")
        return known if "labels" in known else known | {"labels": known["input_ids"]}
