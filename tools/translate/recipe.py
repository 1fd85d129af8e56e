"""The recipe as text: settings with the keys that they come from, and the keys that became none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import yaml

from tools.translate.translation import Translation
from utils.wording import plural

_HEADINGS = {"needless": "needless here", "missing": "no counterpart"}
_WIDTH = 116


def start_command(translation: Translation, recipe: str) -> str:
    """The command that starts the run."""
    ranks = " ".join(f"--{name} {value}" for name, value in translation.ranks.items())
    sharded = translation.given("enable_fsdp") == "True"
    launcher = f"torchrun {ranks or '--nproc_per_node 4'}" if ranks or sharded else "python"
    model = "" if translation.given("model_name") else " --model_name M"
    return f"{launcher} finetuning.py --config {recipe}{model}"


def lines_of(translation: Translation) -> list[str]:
    """A line for each reason, with the keys that have it, and the notes."""
    lines = []
    for kind in ("needless", "missing"):
        for reason, keys in _by_reason(translation, kind).items():
            lines.append(f"{_HEADINGS[kind]}: {', '.join(keys)}: {reason}")
    lines += [f"note: {note}" for note in translation.notes]
    return [" ".join(line.split()) for line in lines]


def counted(translation: Translation) -> str:
    """How many keys ended in which way; a group, as a data set's, by its keys."""
    ends = [translation.outcomes[key].kind for key in translation.source.leaves()]
    return (
        f"{plural(len(ends), 'key')}: {ends.count('set')} set, {ends.count('needless')} needless here, "
        f"{ends.count('missing')} without a counterpart"
    )


def _by_reason(translation: Translation, kind: Literal["needless", "missing"]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in translation.source.leaves():
        outcome = translation.outcomes[key]
        if outcome.kind == kind:
            found.setdefault(outcome.text, []).append(key)
    return found


def recipe_text(translation: Translation, tool: str, recipe: str) -> str:
    """The text of a recipe for --config."""
    lines = [f"Translated from {translation.source.name} ({tool}) by `python -m tools.translate`. It starts so:"]
    lines += [f"  {start_command(translation, recipe)}", *lines_of(translation)]
    text = "".join(f"# {line}\n" for line in _wrapped(lines))
    sections: dict[str, list[str]] = {}
    for dotted, given in sorted(translation.settings.items(), key=lambda item: item[0].split(".")[0] != "train_config"):
        section, field = dotted.split(".")
        from_keys = ", ".join(given.keys) or f"{tool}'s default"
        sections.setdefault(section, []).append(f"  {field}: {_as_yaml(given.value)}  # {from_keys}\n")
    return text + "".join(f"{section}:\n{''.join(entries)}" for section, entries in sections.items())


def _as_yaml(value: str | list[str]) -> str:
    """A value on one line, in quotes if it needs some."""
    if isinstance(value, list):
        return f"[{', '.join(_as_yaml(one) for one in value)}]"
    # Words and numbers are plain: --config reads every scalar as text.
    plain = value != "" and all(one.isalnum() or one in "_./+-" for one in value) and value[0] not in "-."
    if plain:
        return value
    return yaml.safe_dump(value, default_style='"', width=float("inf"), allow_unicode=True).strip()


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Lines of at most 118 columns, cut between words; what goes on is indented."""
    cut: list[str] = []
    for line in lines:
        begin = line[: len(line) - len(line.lstrip())]
        now = ""
        for word in line.split():
            if now and len(begin) + len(now) + 1 + len(word) > _WIDTH:
                cut.append(begin + now)
                begin, now = "    ", word
            else:
                now = f"{now} {word}".strip()
        cut.append(begin + now)
    return cut
