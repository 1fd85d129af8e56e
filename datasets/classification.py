"""Texts and what they are: a class, several classes, or a number (`text`, `label`); and pairs of texts, as in GLUE.

python finetuning.py --task text_classification --model_name M --dataset classification_dataset
    --classification_dataset.data_path reviews.csv

A `label` is a name or a number of a class, a list of classes, or a number to predict (--problem_type).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from configs.datasets import DataSource
from configs.setting import setting
from data.tokens.encoding import ONE_TEXT, Encode
from data.tokens.spans import BadExample, TextSpan
from utils.errors import ConfigError

if TYPE_CHECKING:
    from data.splits.examples import SplitExamples

PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
"""Columns of a text and of a second one, as those of GLUE are called."""
ALONE = ("text", "sentence")


@dataclass(frozen=True)
class ClassificationDataset(DataSource):
    """Texts with a label (--dataset classification_dataset)."""

    HAS_LABELS: ClassVar[bool] = True

    text_column: str | None = setting(
        None, "column with the text", default_text="text or sentence, or the first of GLUE's pairs"
    )
    pair_column: str | None = setting(
        None, "column with a second text, which the tokenizer joins to the first", default_text="GLUE's names, if there"
    )
    label_column: str = setting("label", "column with the label: a class, a list of classes, or a number")

    def check(self, flag: str) -> None:
        if self.streaming:
            raise ConfigError(f"{flag}.streaming: classes are found by reading all labels; leave this out")
        if self.pair_column is not None and self.text_column is None:
            raise ConfigError(f"{flag}.pair_column: needs the column of the first text; add {flag}.text_column")


def get_classification_dataset(
    dataset_config: ClassificationDataset,
    tokenizer: Any,
    split: str,
    split_slice: str | None = None,
    encode: Encode = ONE_TEXT,
) -> Any:
    """Tokenized texts, each with its label as it was written (`data.tokens.labeled_texts`)."""
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    config = dataset_config
    named = tuple(filter(None, (config.text_column, config.pair_column)))
    known = () if named else tuple(dict.fromkeys([name for pair in PAIRS for name in pair] + [*ALONE]))
    examples = load_split(
        "classification_dataset",
        config,
        split,
        split_slice,
        text_columns=named,
        other_columns=(*known, config.label_column),
    )
    texts = named or _texts_there(examples)
    if config.label_column not in examples.columns:
        raise ConfigError(
            f"{examples.name} has no column {config.label_column}; it has {examples.columns_there}; name the right one "
            "with --classification_dataset.label_column"
        )
    examples = examples.with_columns(*texts, config.label_column)
    to_spans_of = partial(to_spans, texts=texts, label=config.label_column)
    return tokenize_split(examples, tokenizer, to_spans_of, encode=encode)


def _texts_there(examples: SplitExamples) -> tuple[str, ...]:
    """The columns of a text, or of two.

    Raises:
        ConfigError: if there are none of a known name.
    """
    there = {*examples.columns}
    pair = next((pair for pair in PAIRS if there.issuperset(pair)), None)
    alone = next(((name,) for name in ALONE if name in there), None)
    if found := pair or alone:
        return found
    raise ConfigError(
        f"{examples.name} has no column text; it has {examples.columns_there}; name the right one with "
        "--classification_dataset.text_column"
    )


def to_spans(example: Mapping[str, Any], *, texts: tuple[str, ...], label: str) -> list[TextSpan]:
    """The texts, without a loss, and the JSON of the label, with one."""
    from data.splits.optional_columns import optional_text
    from data.tokens.labeled_texts import fault_of_label

    value = example[label]
    if fault := fault_of_label(value):
        raise BadExample(f"column {label} {fault}")
    spans = [TextSpan(optional_text(example, name), False) for name in texts]
    if not any(span.text.strip() for span in spans):
        raise BadExample(f"column {texts[0]} is empty")
    return [*spans, TextSpan(json.dumps(value, ensure_ascii=False), True)]
