"""SAMSum: dialogues and their summaries (`id`, `dialogue`, `summary`), from the hub or from local files.

torchrun --nproc_per_node 2 finetuning.py --enable_fsdp --model_name M --dataset samsum_dataset
... --samsum_dataset.data_path my_dialogues/          (train.jsonl and validation.jsonl inside)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.datasets import FORMS, MASK_PROMPT, DataSource
from configs.setting import setting
from data.tokens.encoding import ONE_TEXT, Encode
from data.tokens.spans import TextSpan

HUB_NAME = "knkarthick/samsum"
PROMPT = "Summarize this dialog:\n{dialogue}\n---\nSummary:\n"


@dataclass(frozen=True)
class SamsumDataset(DataSource):
    """Dialogues and their summaries (--dataset samsum_dataset)."""

    data_path: str | None = setting(None, f"{FORMS}; unset: knkarthick/samsum from the hub", is_path=True)
    dialogue_column: str = setting("dialogue", "column with the dialogue, or whatever text is summarized")
    summary_column: str = setting("summary", "column with the summary")
    mask_prompt: bool = setting(True, MASK_PROMPT)


def get_samsum_dataset(
    dataset_config: SamsumDataset, tokenizer: Any, split: str, split_slice: str | None = None, encode: Encode = ONE_TEXT
) -> Any:
    """Tokenized examples; the summary and its end token are label tokens, the prompt is not."""
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    columns = (dataset_config.dialogue_column, dataset_config.summary_column)
    examples = load_split("samsum_dataset", dataset_config, split, split_slice, text_columns=columns, hub_name=HUB_NAME)
    prompt = PROMPT if encode.is_one_text else "{dialogue}"
    return tokenize_split(examples, tokenizer, partial(to_spans, columns=columns, prompt=prompt), encode=encode)


def to_spans(example: Mapping[str, Any], *, columns: tuple[str, str], prompt: str) -> list[TextSpan]:
    dialogue, summary = (example[name] for name in columns)
    return [TextSpan(prompt.format(dialogue=dialogue), False), TextSpan(summary, True)]
