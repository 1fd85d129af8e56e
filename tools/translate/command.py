"""Read a command line of another tool as its file would be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tools.translate.source import Source, Tree, read_source
from utils.errors import ConfigError

_LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
_TRAINERS = ("sft", "dpo", "cpo", "orpo")  # of TRL, by their commands and scripts


def read_command(words: Sequence[str]) -> Source:
    """The flags of a command, by name. Flags of `accelerate launch` stand in the group `launch`.

    `--config FILE` of `trl` is read, and flags go before it.

    Raises:
        ConfigError: if a word is neither a flag nor its value.
    """
    # A backslash at the end of a line is what is left of one if a command is pasted into quotes.
    words = [word for word in words if word.strip() and word != "\\"]
    start = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    program = words[:start]
    launch: Tree = {}
    rest = list(words[start:])
    if program and Path(program[0]).name in _LAUNCHERS and not program[-1].endswith(".py"):
        own = next((at for at, word in enumerate(rest) if word.endswith(".py")), len(rest))
        launch, program, rest = _flags(rest[:own]), rest[own : own + 1], rest[own + 1 :]
    flags = _flags(rest)
    if program:
        trainer = next((name for name in _TRAINERS if name in Path(program[-1]).name), None)
        if trainer is None:
            raise ConfigError(f"command: {program[-1]} is not translated; `trl sft`, `trl dpo` and their scripts are")
        if trainer != "sft":
            flags["trainer"] = trainer
    config = flags.pop("config", None)
    name, folder, lines = "command", Path(), dict[str, int]()
    tree: Tree = {}
    if isinstance(config, str):
        source = read_source(Path(config))
        tree, name, folder, lines = dict(source.tree), source.name, source.folder, dict(source.lines)
        for flag in flags:
            lines = {key: line for key, line in lines.items() if not re.match(rf"{re.escape(flag)}(\W|$)", key)}
    tree |= flags
    if launch:
        tree["launch"] = launch
    return Source(name, folder, tree, lines)


def _flags(words: Sequence[str]) -> Tree:
    found: Tree = {}
    at = 0
    while at < len(words):
        word = words[at]
        if not word.startswith("--"):
            raise ConfigError(f"command: unexpected word {word!r}; flags start with --")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        at += 1
        taken = [value] if equals else []
        while not equals and at < len(words) and not re.match(r"--?[A-Za-z]", words[at]):
            taken.append(words[at])
            at += 1
        if name in found:
            raise ConfigError(f"command: --{name}: given twice; leave one of them out")
        found[name] = "true" if not taken else taken[0] if len(taken) == 1 else taken
    return found
