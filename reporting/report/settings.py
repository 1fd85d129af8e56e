"""The settings of runs side by side, from their run.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_MOST_CHARACTERS = 200
_MOST_NAMES = 2_000
_LEFT_OUT = ("settings.train_config.output_dir", "settings.train_config.overwrite", "settings.train_config.resume")
"""Settings that differ between any two runs and change no number."""


class SettingRow(NamedTuple):
    name: str
    values: list[str]  # by run; "" if the run does not say
    given: list[bool]  # by run: whether a flag or a recipe set it


def setting_rows(all_notes: Sequence[Mapping[str, Any]]) -> list[SettingRow]:
    """One row for each name in the runs' notes: settings by their flags, then resolved values and facts."""
    flat = [_flat(notes) for notes in all_notes]
    given = [_given(notes) for notes in all_notes]
    return [
        SettingRow(name.removeprefix("settings."), [of_run.get(name, "") for of_run in flat], _in_each(name, given))
        for name in dict.fromkeys(name for of_run in flat for name in of_run)
    ]


def differing(rows: Sequence[SettingRow]) -> list[SettingRow]:
    return [row for row in rows if len(set(row.values)) > 1 and f"settings.{row.name}" not in _LEFT_OUT]


def as_text(value: Any) -> str:
    """A value from a YAML or JSON file in one line. Long ones are cut: another's file may hold anything."""
    text = _text(value, depth=0)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _text(value: Any, depth: int) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple | dict) and depth > 1:
        return "…"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item, depth + 1) for item in value[:20]) + (", …]" if len(value) > 20 else "]")
    if isinstance(value, dict):
        items = list(value.items())[:20]
        return ", ".join(f"{_text(key, 2)}: {_text(item, depth + 1)}" for key, item in items)
    return str(value)[: 2 * _MOST_CHARACTERS]


def _in_each(name: str, given: Sequence[set[str]]) -> list[bool]:
    return [name.removeprefix("settings.") in of_run for of_run in given]


def _given(notes: Mapping[str, Any]) -> set[str]:
    names = notes.get("given")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _flat(notes: Mapping[str, Any]) -> dict[str, str]:
    """`settings.train_config.lr`, `resolved.precision`, `data.train.num_samples`, `versions.torch`, and so on."""
    found: dict[str, str] = {}
    settings = notes.get("settings")
    for section, fields in settings.items() if isinstance(settings, dict) else ():
        _add(found, f"settings.{section}", fields)
    for section in ("resolved", "model", "versions"):
        _add(found, section, notes.get(section))
    data = notes.get("data")
    for split in ("train", "validation"):
        of_split = data.get(split) if isinstance(data, dict) else None
        for name in ("num_samples", "num_tokens", "num_label_tokens", "num_rows"):
            if isinstance(of_split, dict) and name in of_split:
                found[f"data.{split}.{name}"] = as_text(of_split[name])
    for name in ("world_size", "git_commit"):
        if name in notes:
            found[name] = as_text(notes[name])
    found["devices"] = devices_text(notes)
    found.pop("model.load_seconds", None)
    return found


def _add(found: dict[str, str], section: str, fields: Any) -> None:
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if len(found) < _MOST_NAMES:
            found[f"{section}.{str(name)[:100]}"] = "" if value is None else as_text(value)


def device_groups(notes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of `devices`: one for each host and kind of device."""
    groups = notes.get("devices")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def num_machines(notes: Mapping[str, Any]) -> int:
    return max(1, len({as_text(group.get("host")) for group in device_groups(notes)}))


def devices_text(notes: Mapping[str, Any]) -> str:
    """ "8 x NVIDIA H200 (139.8 GiB), 2 machines"."""
    counts: dict[str, int] = {}
    for group in device_groups(notes):
        kind = f"{as_text(group.get('device'))} ({as_text(group.get('memory_gib'))} GiB)"
        ranks = group.get("ranks")
        counts[kind] = counts.get(kind, 0) + (len(ranks) if isinstance(ranks, list) else 1)
    machines = num_machines(notes)
    kinds = " + ".join(f"{count} x {kind}" for kind, count in counts.items())
    return kinds and kinds + (f", {machines} machines" if machines > 1 else "")
