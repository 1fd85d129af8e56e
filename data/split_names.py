"""The names that people give to splits, alone or as a word of a file's name."""

from __future__ import annotations

import re

_ALIKE = (("train", "training"), ("validation", "valid", "val", "dev", "eval"), ("test",))


def names_of(split: str, is_default: bool) -> tuple[str, ...]:
    """A split's name, and those that mean the same if the user did not choose it."""
    alike = next((names for names in _ALIKE if split in names), ()) if is_default else ()
    return (split, *(name for name in alike if name != split))


def split_in_name(name: str) -> list[str]:
    """The splits that a file's name holds as a word, one name of each: `["train"]` of `samsum_train-00001`."""
    words = set(re.split(r"[\W_]+", name.lower()))
    return [next(name for name in names if name in words) for names in _ALIKE if words.intersection(names)]
