"""What a file's keys become: settings of this tool, or a line that says why not. Every key has an end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from configs.names import find, flag
from configs.run import SETTINGS
from configs.values import convert
from tools.translate.source import Source, Tree, is_list_of_text
from utils.errors import ConfigError, in_one_line

Kind = Literal["set", "needless", "missing"]
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Outcome:
    """The end of one key: the setting it became, or the reason why it became none."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Given:
    """A setting's value, and the keys that it comes from; none if it is the other tool's default."""

    value: str | list[str]
    keys: tuple[str, ...]


Options = dict[str, tuple[str, str | list[str]]]
"""Settings of a dataset: by field, the key that says it and the value."""


@dataclass(frozen=True)
class DatasetPart:
    """One dataset of the file: where it is, its format here, and the settings of that format.

    Attributes:
        key: its key in the file.
        dataset: a name that --dataset knows.
        path: file, glob, folder or OWNER/NAME on the hub.
        options: of the dataset's own settings.
    """

    key: str
    dataset: str
    path: str
    options: Options = field(default_factory=dict)

    def values(self, *, without: tuple[str, ...] = ()) -> dict[str, str | list[str]]:
        """The values by field."""
        return {name: value for name, (_, value) in self.options.items() if name not in without}


@dataclass
class Translation:
    """The state of one translation. Rules read the source by `text`, `switch` and `value`, and end keys by `set`,
    `needless` and `missing`.

    Attributes:
        settings: by dotted name.
        outcomes: by key of the source.
        parts: datasets, which `tools.translate.data` puts together in the end.
        dataset_wide: (key, field, value): settings for every dataset that has such a field.
        fraction: (key, share) of the training rows for validation.
        ranks: torchrun's own flags, by name.
        files: texts to write beside the recipe, by setting.
        notes: lines about what differs though no key says it.
    """

    source: Source
    trains_adapter: bool
    settings: dict[str, Given] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    parts: list[DatasetPart] = field(default_factory=list)
    dataset_wide: list[tuple[str, str, str]] = field(default_factory=list)
    fraction: tuple[str, str] | None = None
    ranks: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """The value of a key; None if it is empty or missing."""
        return self.source.value(key)

    def text(self, key: str) -> str | None:
        """The plain value of a key; None if it is empty or missing.

        Raises:
            ConfigError: if it is a list or a mapping.
        """
        found = self.value(key)
        if found is not None and not isinstance(found, str):
            self.refuse(key, "is no plain value; give one")
        return found

    def switch(self, key: str) -> bool | None:
        """True or False; None if the key is empty or missing.

        Raises:
            ConfigError: if it is anything else.
        """
        found = self.text(key)
        if found is None:
            return None
        if found.lower() not in _TRUE + _FALSE:
            self.refuse(key, f"{found!r} is neither true nor false; give one of them")
        return found.lower() in _TRUE

    def number(self, key: str) -> float | None:
        """The number; None if the key is empty or missing.

        Raises:
            ConfigError: if it is anything else.
        """
        found = self.text(key)
        with suppress(ValueError):
            if found is None or math.isfinite(float(found)):
                return None if found is None else float(found)
        self.refuse(key, f"{found!r} is not a number; give one")

    def names(self, key: str) -> list[str]:
        """A list of plain values, or one that is cut at its commas; empty if the key is."""
        found = self.value(key)
        if isinstance(found, str):
            return [part.strip() for part in found.split(",") if part.strip()]
        if found is not None and not is_list_of_text(found):
            self.refuse(key, "is no list of plain values; give one")
        return [one for one in found or [] if one is not None]

    def mapping(self, key: str) -> Tree:
        """The mapping of a key; empty if it is.

        Raises:
            ConfigError: if it is anything else.
        """
        found = self.value(key)
        if found is not None and not isinstance(found, dict):
            self.refuse(key, "is no group of NAME: VALUE lines; give one")
        return found or {}

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise a ConfigError with the file and the line."""
        raise ConfigError(f"{self.source.where(key)}: {in_one_line(why)}")

    def add(self, part: DatasetPart) -> None:
        """Add a dataset. Its keys end when all datasets are put together."""
        self.parts.append(part)
        for key in (part.key, *(key for key, _ in part.options.values())):
            self.claim(key)

    def claim(self, key: str) -> None:
        """Hold a key back: it ends when all datasets are put together."""
        self.outcomes.setdefault(key, Outcome("missing", "no dataset is named"))

    def set(self, key: str, setting: str, value: str | list[str], *, ends: bool = True) -> None:
        """Give a setting its value from this key. `setting` is spelled as in flags.

        Args:
            ends: whether that is all that the key means.

        Raises:
            ConfigError: if the value is none of the setting's, or another key gave it another one.
        """
        dotted = find(setting)[0]
        try:
            convert(value, SETTINGS[dotted])
        except ValueError as error:
            self.refuse(key, f"{error} ({flag(dotted)})")
        before = self.settings.get(dotted)
        if before is not None and before.keys and before.value != value:
            self.refuse(key, f"sets {flag(dotted)}, as {' and '.join(before.keys)} does; leave one of them out")
        keys = before.keys if before is not None else ()
        self.settings[dotted] = Given(value, (*keys, key) if key not in keys else keys)
        if ends:
            self._end(key, "set", f"{flag(dotted)} {value if isinstance(value, str) else ','.join(value)}")

    def default(self, setting: str, value: str) -> None:
        """Give a setting the value that the other tool has without a key, unless a key gave it one."""
        dotted = find(setting)[0]
        if dotted not in self.settings:
            self.settings[dotted] = Given(value, ())

    def given(self, setting: str) -> str | list[str] | None:
        """The value of a setting so far; None if it has none."""
        found = self.settings.get(find(setting)[0])
        return None if found is None else found.value

    def widen(self, setting: str, value: list[str]) -> None:
        """Replace the value of a setting that several keys say together."""
        dotted = find(setting)[0]
        self.settings[dotted] = replace(self.settings[dotted], value=value)

    def take_back(self, setting: str, kind: Kind, why: str) -> None:
        """Leave a setting out again. Its keys end with this reason."""
        dropped = self.settings.pop(find(setting)[0], None)
        for key in dropped.keys if dropped else ():
            for leaf in self.source.leaves(key):
                self.outcomes[leaf] = Outcome(kind, why)

    def place_file(self, name: str, path: str) -> bool:
        """Name the file that holds the text of `files[name]` in the settings of this name. False if there are none."""
        having = [dotted for dotted in self.settings if dotted.endswith(f".{name}")]
        for dotted in having:
            self.settings[dotted] = replace(self.settings[dotted], value=path)
        return bool(having)

    def needless(self, key: str, why: str) -> None:
        """End a key, and those below it: a run here does without."""
        self._end(key, "needless", why)

    def missing(self, key: str, why: str) -> None:
        """End a key, and those below it: a run here cannot do this."""
        self._end(key, "missing", why)

    def _end(self, key: str, kind: Kind, text: str) -> None:
        for leaf in self.source.leaves(key):
            if leaf not in self.outcomes or leaf == key:
                self.outcomes[leaf] = Outcome(kind, text)


Rule = Callable[[Translation, str], None]
"""Ends a key, and perhaps those below it."""


@dataclass(frozen=True)
class Tool:
    """What there is to know of one tool.

    Attributes:
        name: as it is written.
        fits: whether a file is of this tool.
        trains_adapter: whether a file trains an adapter. Several values mean something else then.
        rules: by key without indices. A key without a rule is looked up by its name, in the tables of the hints.
        groups: keys of mappings whose names are looked up so, too.
        needless, missing: reasons for names that only this tool has.
        finish: called after all rules: what several keys together mean, and the tool's own defaults.
        has_references: whether its files have `${KEY}`.
    """

    name: str
    fits: Callable[[Tree], bool]
    trains_adapter: Callable[[Tree], bool]
    rules: Mapping[str, Rule]
    finish: Callable[[Translation], None]
    groups: tuple[str, ...] = ()
    needless: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    has_references: bool = False


def by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    """Reasons by name, from names (with spaces between them) by reason."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}
