"""The names that people give to splits, alone or as a word of a file's name."""

from __future__ import annotations

import re

_ALIKE = (("train", "training"), ("validation", "valid", "val", "dev", "eval"), ("test",))

_WORD_ENDS = re.compile(r"[\W_]+|(?<=[a-z])(?=[A-Z])|(?<=\D)(?=\d)|(?<=\d)(?=\D)")


def names_of(split: str, is_default: bool) -> tuple[str, ...]:
    """A split's name, and those that mean the same if the user did not choose it."""
    alike = next((names for names in _ALIKE if split in names), ()) if is_default else ()
    return (split, *(name for name in alike if name != split))


def split_in_name(name: str) -> list[str]:
    """The splits that a file's name holds as a word, one name of each: `["train"]` of `samsum_train-00001`.

    A word also ends at a digit and before a capital letter, as in `captions_train2017` and `samsumTrain`.
    """
    words = {word.lower() for word in _WORD_ENDS.split(name)}
    return [next(name for name in names if name in words) for names in _ALIKE if words.intersection(names)]
