"""A command line with some of its flags changed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from configs.names import find, find_negated


def changed_flags(argv: Sequence[str], flags: Sequence[str], *, without: Sequence[str] = ()) -> list[str]:
    """The arguments `argv` with `flags` in place of whatever sets the same settings.

    A recipe's values need not be looked for: flags override them.

    Args:
        flags: names, each with its value, as on the command line.
        without: the names of flags to leave out, "--overwrite".
    """
    changed = {dotted for word in (*flags, *without) for dotted in _targets(word)}
    kept: list[str] = []
    keeps = True
    for word in argv:
        if word.startswith("--"):
            keeps = changed.isdisjoint(_targets(word))
        if keeps:
            kept.append(word)
    return [*kept, *flags]


def _targets(word: str) -> tuple[str, ...]:
    """The settings that a word of a command line sets; none if it is not a flag."""
    if not re.match("--[A-Za-z]", word):
        return ()
    name = word[2:].partition("=")[0].replace("-", "_")
    return find(name) or find_negated(name)
