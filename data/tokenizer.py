"""The tokenizer of a run, and what its special tokens are used for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.run import RunConfig
from utils.errors import ConfigError
from utils.hub import check_on_hub, explain


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `--tokenizer_name`, else of the model. No token is added to it.

    Raises:
        ConfigError: where none can be loaded, or it has no end token (answers would never end).
    """
    train = config.train_config
    name = train.tokenizer_name or train.model_name
    flag = "--tokenizer_name" if train.tokenizer_name else "--model_name"
    if train.tokenizer_name and not Path(name).expanduser().is_dir():
        check_on_hub(flag, name, "model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=train.trust_remote_code)
    except Exception as error:
        raise ConfigError(
            f"{flag}: no tokenizer could be loaded from {name!r} ({explain(error)}); give a folder or hub name that "
            "has one with --tokenizer_name"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{flag}: the tokenizer of {name!r} has no end token (eos_token); answers would never end")
    return tokenizer


def num_rows_needed(tokenizer: Any) -> int:
    """Rows that an embedding must have for this tokenizer; a last token that only pads needs none."""
    return len(tokenizer) - (tokenizer.pad_token_id == len(tokenizer) - 1)


def padding_id(tokenizer: Any, vocab_size: int) -> int:
    """What fills the unused places of a batch: the pad token if the model has a row for it, else the end token.

    Padding is masked from attention and loss, so any id computes the same; a tokenizer without a pad token keeps
    having none, and the model's config is not touched: a new `pad_token_id` there would silently stop the
    gradient of that token's embedding (torch.nn.Embedding's `padding_idx`).
    """
    has_pad = tokenizer.pad_token_id is not None and tokenizer.pad_token_id < vocab_size
    return tokenizer.pad_token_id if has_pad else tokenizer.eos_token_id
