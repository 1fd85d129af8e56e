"""SAMSum: dialogues and their summaries (`id`, `dialogue`, `summary`), from the hub or from local files.

torchrun --nproc_per_node 2 finetuning.py --enable_fsdp --model_name M --dataset samsum_dataset
... --samsum_dataset.data_path my_dialogues/          (train.jsonl and validation.jsonl inside)
"""

from __future__ import annotations

from typing import Any

from utils.data_files import load_split
from utils.tokenization import PromptAndAnswer, tokenize_pairs

HUB_NAME = "knkarthick/samsum"
PROMPT = "Summarize this dialog:\n{dialogue}\n---\nSummary:\n"


def get_samsum_dataset(dataset_config: Any, tokenizer: Any, split: str) -> Any:
    """Tokenised rows (`input_ids`, `labels`); the prompt is not learned, the summary and its end token are."""
    rows = load_split("samsum_dataset", dataset_config.data_path, HUB_NAME, split, columns=("dialogue", "summary"))
    return tokenize_pairs(
        rows, tokenizer, lambda row: PromptAndAnswer(PROMPT.format(dialogue=row["dialogue"]), row["summary"])
    )
