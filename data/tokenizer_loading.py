"""Loads the tokenizer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.training import TrainConfig
from utils.errors import ConfigError
from utils.hub import check_on_hub, explain


def load_tokenizer(train_config: TrainConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `--tokenizer_name`, or of the model if that is unset. No token is added to it.

    Raises:
        ConfigError: if none can be loaded, or it has no end token (answers would never end).
    """
    name = train_config.tokenizer_name or train_config.model_name
    flag = "--tokenizer_name" if train_config.tokenizer_name else "--model_name"
    if train_config.tokenizer_name and not Path(name).expanduser().is_dir():
        check_on_hub(flag, name, "model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=train_config.trust_remote_code)
    except Exception as error:
        raise ConfigError(
            f"{flag}: no tokenizer could be loaded from {name!r} ({explain(error)}); give a folder or hub name that "
            "has one with --tokenizer_name"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{flag}: the tokenizer of {name!r} has no end token (eos_token); answers would never end")
    return tokenizer


def num_rows_needed(tokenizer: Any) -> int:
    """Rows that an embedding must have for this tokenizer; a pad token that comes last needs none."""
    return len(tokenizer) - (tokenizer.pad_token_id == len(tokenizer) - 1)
