"""The values of a generation_config.json: transformers looks at few of them before it generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

_COUNTS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences", "top_k"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)
_FACTORS = ("repetition_penalty", "encoder_repetition_penalty")  # logits are divided by them
_NUMBERS = (
    *("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "length_penalty"),
    *("guidance_scale", "max_time"),
)
_IDS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
)
_LARGEST = torch.iinfo(torch.int64).max


def check_values(settings: GenerationConfig) -> None:
    """Refuse values of a type, or of a size, with which `generate` would fail.

    Raises:
        ValueError: with the key and its value.
    """
    for name in _COUNTS:
        _check(settings, name, _is_integer, "an integer of 64 bits")
    for name in _NUMBERS:
        _check(settings, name, _is_number, "a number")
    for name in _FACTORS:
        _check(settings, name, lambda value: _is_number(value) and value > 0, "a number above 0")
    for name in _IDS:
        _check(settings, name, _is_id_or_list, "a token id or a list of them")
    _check(
        settings,
        "bad_words_ids",
        lambda value: isinstance(value, list) and all(map(_is_list_of_ids, value)),
        "a list of lists of token ids",
    )


def _check(settings: GenerationConfig, name: str, fits: Callable[[Any], bool], wanted: str) -> None:
    value = getattr(settings, name, None)
    if value is not None and not fits(value):
        raise ValueError(f"{name} is {value!r:.40}, not {wanted}; correct it there")


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= _LARGEST  # by type(): to isinstance, true is one


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_integer(value)


def _is_id_or_list(value: Any) -> bool:
    return _is_integer(value) or _is_list_of_ids(value)


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))
