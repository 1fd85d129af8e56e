"""Loads the tokenizer of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from configs.training import TrainConfig
from data.processors.sentencepiece_files import FILES, check_conversion, find_sentencepiece
from utils.errors import ConfigError
from utils.git_lfs import PULL, is_pointer
from utils.hub import check_on_hub, explain
from utils.printing import print_line
from utils.progress import shows_progress
from utils.rust_panics import RustPanicError, panics_as_errors

_TRIAL = "A text with 3 words.\n"
_MISTRALS_PATTERN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"


def load_tokenizer(train_config: TrainConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `--tokenizer_name`, or of the model if that is unset, with the tokens of `--add_special_tokens`.

    Raises:
        ConfigError: if none can be loaded, or it has no end token (answers would never end).
    """
    name = train_config.tokenizer_name or train_config.model_name
    flag = "--tokenizer_name" if train_config.tokenizer_name else "--model_name"
    if train_config.tokenizer_name and not Path(name).expanduser().is_dir():
        check_on_hub(flag, name, "model")
    sentencepiece_model = find_sentencepiece(name, flag)
    try:
        tokenizer = read_tokenizer(name, trust_remote_code=train_config.trust_remote_code)
    except Exception as error:
        files = (Path(name).expanduser() / file for file in ("tokenizer.json", *FILES))
        if pointer := next(filter(is_pointer, files), None):
            raise ConfigError(f"{flag}: {pointer} cannot be read: {PULL}") from error
        raise ConfigError(
            f"{flag}: no tokenizer could be loaded from {name!r} ({explain(error)}); give a folder or hub name that "
            "has one with --tokenizer_name"
        ) from error
    if sentencepiece_model is not None:
        check_conversion(tokenizer, sentencepiece_model, name, flag)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{flag}: the tokenizer of {name!r} has no end token (eos_token); answers would never end")
    if splits_unlike_mistral(tokenizer) and shows_progress():
        print_line(
            f"{flag}: tokenizer.json of {name!r} splits words by a pattern that transformers calls wrong for Mistral's "
            f"models; for the right tokens save AutoTokenizer.from_pretrained({name!r}, fix_mistral_regex=True) in a "
            "folder, and give that with --tokenizer_name"
        )
    add_special_tokens(tokenizer, train_config)
    tokenizer.template_date = train_config.template_date  # read by utils.template_date
    return tokenizer


def read_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that a tokenizer.json describes, also if mistral-common is installed and tekken.json is there.

    mistral-common's own has no size, no chat template and no special tokens in a text.

    Raises:
        Exception: whatever transformers raises; RustPanicError if its settings make it panic on every text.
        ValueError: if a special token is empty.
    """
    with panics_as_errors():
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, mistral_format=False)
    check_special_tokens(tokenizer)
    _try(tokenizer)
    return tokenizer


def check_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse empty special tokens, as in Llama's first conversions.

    No vocabulary has one: transformers then takes the id of unk_token, and looks for that without end if it is empty.

    Raises:
        ValueError: with the key.
    """
    empty = [key for key, token in tokenizer.special_tokens_map.items() if not token]
    if "" in tokenizer.extra_special_tokens:
        empty.append("extra_special_tokens")
    if empty:
        raise ValueError(f"{empty[0]} in tokenizer_config.json holds an empty token; name one there, or write null")


def _try(tokenizer: PreTrainedTokenizerBase) -> None:
    """Encode and decode a text.

    Raises:
        ValueError: if the tokenizer replaces an empty pattern, of which its Rust code makes a panic.
        RustPanicError: if it panics because of something else.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if (normalizer := getattr(backend, "normalizer", None)) is not None:
        state = json.loads(normalizer.__getstate__())
        steps = [state, *(state.get("normalizers") or [])]
        if any(step.get("pattern") in ({"String": ""}, {"Regex": ""}) for step in steps):
            raise ValueError("the pattern that its normalizer replaces is empty")
    try:
        with panics_as_errors():
            tokenizer.decode(tokenizer(_TRIAL)["input_ids"])
    except RustPanicError:
        raise
    except Exception:  # it may lack these letters, and the data not have them either
        return


def splits_unlike_mistral(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether transformers would mend the pattern of a Mistral tokenizer that an earlier version of it converted.

    It warns of each, those with the right pattern included, and only of models with a config.json of that time.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if getattr(backend, "fix_mistral_regex", None) is not False:
        return False
    state = json.loads(backend.pre_tokenizer.__getstate__())
    patterns = [part.get("pattern") or {} for part in state.get("pretokenizers", [state])]
    return not any(_MISTRALS_PATTERN in pattern.get("Regex", "") for pattern in patterns)


def add_special_tokens(tokenizer: PreTrainedTokenizerBase, train_config: TrainConfig) -> None:
    """Add the tokens that the tokenizer does not have.

    Raises:
        ConfigError: if one would not be read as one token.
    """
    if not (tokens := list(train_config.add_special_tokens)):
        return
    there = set(tokenizer.all_special_tokens)  # </s> stays the end token, and nothing else
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens if token not in there])
    for token in tokens:
        if (ids := tokenizer.encode(token, add_special_tokens=False)) != [tokenizer.convert_tokens_to_ids(token)]:
            raise ConfigError(
                f"--add_special_tokens: this tokenizer reads {token!r} as {len(ids)} tokens; give one like <|name|>"
            )


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor, or the tokenizer that it is."""
    return getattr(processor, "tokenizer", processor)


def added_token_ids(tokenizer: PreTrainedTokenizerBase, train_config: TrainConfig) -> tuple[int, ...]:
    """The ids of the tokens of `--add_special_tokens`, sorted."""
    ids = tokenizer.convert_tokens_to_ids(list(train_config.add_special_tokens))
    return tuple(sorted({*ids} if isinstance(ids, list) else {ids}))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of all special tokens, those of `--add_special_tokens` included."""
    return {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def num_rows_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding must have for this tokenizer; a pad token that comes last needs none."""
    return len(tokenizer) - (tokenizer.pad_token_id == len(tokenizer) - 1)
