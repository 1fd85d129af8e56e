"""How a setting is declared: a dataclass field that carries its own help, unit and limits."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Setting:
    """One setting as the parser, the validation and the help text see it."""

    name: str
    kind: Any  # the annotation, e.g. int, str | None, Literal["a", "b"], tuple[str, ...]
    default: Any  # MISSING where the user has to say
    help: str
    unit: str
    minimum: float | None
    maximum: float | None
    exclusive_minimum: float | None
    exclusive_maximum: float | None
    later: str
    later_values: tuple[Any, ...]
    bare: str
    unset: Any

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
    later: str = "",
    later_values: tuple[Any, ...] = (),
    bare: str = "",
    unset: Any = None,
) -> Any:
    """Declare a setting as a dataclass field.

    `later` marks what this version does not do yet and says what to do instead: it refuses `later_values`, or, where
    there are none, anything but the default. `bare` is the value that the flag has when it is given without one.
    `unset` is what a default of None stands for: a value, or words for the help text if it depends on other things.
    A `default` of `dataclasses.MISSING` makes the setting required.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "minimum": minimum,
        "maximum": maximum,
        "exclusive_minimum": exclusive_minimum,
        "exclusive_maximum": exclusive_maximum,
        "later": later,
        "later_values": later_values,
        "bare": bare,
        "unset": unset,
    }
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def settings_of(config_class: type) -> dict[str, Setting]:
    """The settings of a config dataclass by field name, in order of declaration."""
    kinds = get_type_hints(config_class)
    return {
        f.name: Setting(name=f.name, kind=kinds[f.name], default=f.default, **f.metadata) for f in fields(config_class)
    }
