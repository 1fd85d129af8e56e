"""Grammar: sentences and their corrections (`input`, `target`), as csv or another table.

python finetuning.py --model_name M --dataset grammar_dataset --grammar_dataset.data_path my_sentences/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.datasets import MASK_PROMPT, DataSource
from configs.setting import setting
from data.tokens.encoding import ONE_TEXT, Encode
from data.tokens.spans import TextSpan

PROMPT = "Correct this to standard English: {input}\n---\nCorrected: "


@dataclass(frozen=True)
class GrammarDataset(DataSource):
    """Sentences and their corrections (--dataset grammar_dataset)."""

    input_column: str = setting("input", "column with the sentence")
    target_column: str = setting("target", "column with its correction")
    mask_prompt: bool = setting(True, MASK_PROMPT)


def get_grammar_dataset(
    dataset_config: GrammarDataset,
    tokenizer: Any,
    split: str,
    split_slice: str | None = None,
    encode: Encode = ONE_TEXT,
) -> Any:
    """Tokenized examples; the correction and its end token are label tokens, the prompt is not."""
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    columns = (dataset_config.input_column, dataset_config.target_column)
    examples = load_split("grammar_dataset", dataset_config, split, split_slice, text_columns=columns)
    prompt = PROMPT if encode.is_one_text else "{input}"
    return tokenize_split(examples, tokenizer, partial(to_spans, columns=columns, prompt=prompt), encode=encode)


def to_spans(example: Mapping[str, Any], *, columns: tuple[str, str], prompt: str) -> list[TextSpan]:
    sentence, correction = (example[name] for name in columns)
    return [TextSpan(prompt.format(input=sentence), False), TextSpan(correction, True)]
