"""Declare settings: dataclass fields that carry their help, unit and limits."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_type_hints


@dataclass(frozen=True)
class Setting:
    """One setting, as the parser, the validation and the help text use it."""

    name: str
    kind: Any  # the annotation, e.g. int, str | None, Literal["a", "b"], tuple[str, ...]
    default: Any  # MISSING if the setting is required
    help: str
    unit: str
    minimum: float | None
    maximum: float | None
    exclusive_minimum: float | None
    exclusive_maximum: float | None
    bare: str
    stands_for: Any
    default_text: str
    is_path: bool

    @property
    def is_switch(self) -> bool:
        """Whether its values are True and False, and perhaps None."""
        return self.kind in (bool, bool | None)

    @property
    def is_required(self) -> bool:
        return self.default is MISSING


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive_minimum: float | None = None,
    exclusive_maximum: float | None = None,
    bare: str = "",
    stands_for: Any = None,
    default_text: str = "",
    is_path: bool = False,
    one_of: tuple[str, ...] = (),
) -> Any:
    """Declare a setting as a dataclass field.

    Args:
        default: `dataclasses.MISSING` makes the setting required.
        bare: the value of the flag if it is given without one.
        stands_for: the documented value of a setting that was left out, if its default is None. Checkpoints are
            compared by it; earlier versions saved it in place of None.
        default_text: what the default does, in the words of --help, if the value itself does not say it.
        is_path: it names a file or a folder, or it may.
        one_of: the values that a setting of type `str` may have; empty: any. A Literal, for values from a list.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "minimum": minimum,
        "maximum": maximum,
        "exclusive_minimum": exclusive_minimum,
        "exclusive_maximum": exclusive_maximum,
        "bare": bare,
        "stands_for": stands_for,
        "default_text": default_text,
        "is_path": is_path,
        "one_of": one_of,
    }
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def settings_of(config_class: type) -> dict[str, Setting]:
    """The settings of a config dataclass by field name, in order of declaration."""
    kinds, found = get_type_hints(config_class), dict[str, Setting]()
    for f in fields(config_class):
        metadata = dict(f.metadata)
        one_of = metadata.pop("one_of")
        kind = Literal[one_of] if one_of else kinds[f.name]
        found[f.name] = Setting(name=f.name, kind=kind, default=f.default, **metadata)
    return found
