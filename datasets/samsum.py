"""SAMSum: dialogues and their summaries (`id`, `dialogue`, `summary`), from the hub or from local files.

torchrun --nproc_per_node 2 finetuning.py --enable_fsdp --model_name M --dataset samsum_dataset
... --samsum_dataset.data_path my_dialogues/          (train.jsonl and validation.jsonl inside)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from data.splits.reading import load_split
from data.tokenizing import tokenize_split
from data.tokens.encoding import ONE_TEXT, Encode
from data.tokens.loss_mask import TextSpan

HUB_NAME = "knkarthick/samsum"
PROMPT = "Summarize this dialog:\n{dialogue}\n---\nSummary:\n"


def get_samsum_dataset(
    dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None, encode: Encode = ONE_TEXT
) -> Any:
    """Tokenised examples; the summary and its end token are label tokens, the prompt is not."""
    columns = (dataset_config.dialogue_column, dataset_config.summary_column)
    examples = load_split("samsum_dataset", dataset_config, split, split_slice, text_columns=columns, hub_name=HUB_NAME)
    prompt = PROMPT if encode.is_one_text else "{dialogue}"
    return tokenize_split(examples, tokenizer, partial(to_spans, columns=columns, prompt=prompt), encode=encode)


def to_spans(example: Mapping[str, Any], *, columns: tuple[str, str], prompt: str) -> list[TextSpan]:
    dialogue, summary = (example[name] for name in columns)
    return [TextSpan(prompt.format(dialogue=dialogue), False), TextSpan(summary, True)]
