"""Convert raw strings of flags and recipes to values, by the setting's type alone: nothing is guessed."""

import re
from decimal import Decimal
from difflib import get_close_matches
from functools import reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from configs.optimizers import OPTIMIZERS
from configs.paths import check_path
from configs.setting import Setting

NO_VALUE = "\0"
"""The raw value of a flag without a value. No real argument can contain a NUL."""

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_NONE = ("none", "null", "")
_MAX_WHOLE = 10**18  # fits into 64 bits, sums of a few included
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_DTYPES = {
    prefix + name: short
    for name, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"))
    for prefix in ("", "torch.")
}

# Other accepted spellings of some settings' values, in lower case.
_SPELLINGS: dict[str, dict[str, str]] = {
    "quantization": {**dict.fromkeys(_TRUE, "4bit"), **dict.fromkeys(_FALSE, "none")},
    "float8": dict.fromkeys(_FALSE, "none"),
    "resume": {**dict.fromkeys(_TRUE, "auto"), **dict.fromkeys((*_FALSE, *_NONE), "False"), "auto": "auto"},
    "from_peft_checkpoint": dict.fromkeys(_NONE, ""),
    "optimizer": {spelling: name for name, listed in OPTIMIZERS.items() for spelling in listed.spellings},
    **dict.fromkeys(
        ("momentum_dtype", "variance_dtype", "compute_dtype", "quant_storage", "peft_dtype", "reduce_dtype"), _DTYPES
    ),
}


class _TooLarge(ValueError):
    """A number that no setting takes."""


def is_true(raw: str | list[str]) -> bool:
    """Whether the raw value spells True."""
    return isinstance(raw, str) and raw.lower() in _TRUE


def convert(raw: str | list[str], setting: Setting) -> Any:
    """Convert `raw`, a string or a recipe's list of strings, to a value of `setting`.

    Raises:
        ValueError: with the reason, if `raw` has the wrong type or is out of range.
    """
    if raw == NO_VALUE:
        raw = "True" if setting.is_switch else setting.bare
        if not raw:
            raise ValueError(f"needs a value ({expected(setting.kind)})")
    if isinstance(raw, str):
        raw = _SPELLINGS.get(setting.name, {}).get(raw.lower(), raw)
    if "\0" in "".join(raw):
        raise ValueError("holds a NUL character, which no text can; leave it out")
    value = _convert(raw, setting.kind)
    if value == "" and setting.default != "" and not setting.is_required:
        raise ValueError(f"is empty; give {expected(setting.kind)}")
    if setting.is_path and isinstance(value, str):
        check_path(value)
    _check_range(value, setting)
    return value


def expected(kind: Any) -> str:
    """A description of the values of this type."""
    kind, optional = _without_none(kind)
    if _is_union(kind):
        words = " or ".join(map(expected, get_args(kind)))
    elif get_origin(kind) is Literal:
        words = ("one of " if len(get_args(kind)) > 1 else "") + ", ".join(map(str, get_args(kind)))
    elif get_origin(kind) is tuple:
        words = "a list like 0.7,0.3" if get_args(kind)[0] is float else "a list like a,b"
    else:
        words = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}[kind]
    return f"{words} or None" if optional else words


def choices(kind: Any) -> tuple[str, ...]:
    """The values that a Literal type allows; empty for other types."""
    kind, _ = _without_none(kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _without_none(kind: Any) -> tuple[Any, bool]:
    """`str | None` -> (str, True); any other type -> (itself, False)."""
    if not _is_union(kind):
        return kind, False
    kinds = [inner for inner in get_args(kind) if inner is not NoneType]
    return reduce(or_, kinds), NoneType in get_args(kind)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (UnionType, Union)


def _convert(raw: str | list[str], kind: Any) -> Any:
    kind, optional = _without_none(kind)
    if get_origin(kind) is tuple:
        return tuple(_convert(item, get_args(kind)[0]) for item in _items(raw))
    if not isinstance(raw, str):
        raise ValueError(f"a list is not {expected(kind)}")
    if optional and raw.lower() in (*_NONE, "auto" if kind is bool else ""):
        return None
    if _is_union(kind):
        return _first_that_fits(raw, get_args(kind))
    if get_origin(kind) is Literal:
        return _choice(raw, get_args(kind))
    if kind is str:
        return raw
    if kind is bool and raw.lower() in _TRUE + _FALSE:
        return raw.lower() in _TRUE
    if kind in (int, float) and _NUMBER.fullmatch(raw):
        number = Decimal(raw)  # exact, so that 1e3 is a whole number and 1e-3 is none
        if number and number.adjusted() > 18:  # before int() writes out a number like 1e9999
            raise _TooLarge(f"{raw!r} is too large")
        if kind is float:
            return float(raw)
        if number == number.to_integral_value():
            return int(number)
    raise ValueError(f"{raw!r} is not {expected(kind)}")


def _first_that_fits(raw: str, kinds: tuple[Any, ...]) -> Any:
    problem = ValueError(f"{raw!r} is not {' or '.join(map(expected, kinds))}")
    for kind in kinds:
        try:
            return _convert(raw, kind)
        except _TooLarge as error:
            problem = error
        except ValueError:
            continue
    raise problem


def _choice(raw: str, allowed: tuple[Any, ...]) -> Any:
    """The allowed value equal to `raw`, ignoring case."""
    by_lower_case = {str(value).lower(): value for value in allowed}
    if raw.lower() in by_lower_case:
        return by_lower_case[raw.lower()]
    near = get_close_matches(raw.lower(), by_lower_case, n=1)
    hint = f"; did you mean {by_lower_case[near[0]]}?" if near else ""
    raise ValueError(f"{raw!r} is not one of {', '.join(map(str, allowed))}{hint}")


def _items(raw: str | list[str]) -> tuple[str, ...]:
    """`a,b`, `[a, b]`, `['a', 'b']` or a recipe's list -> ("a", "b")."""
    if isinstance(raw, str):
        raw = raw.strip().removeprefix("[").removesuffix("]").split(",")
    items = tuple(item.strip().strip("'\"") for item in raw)
    if not items or not all(items):
        raise ValueError("an entry of the list is empty; write it like a,b")
    return items


def _check_range(value: Any, setting: Setting) -> None:
    if isinstance(value, tuple):
        for item in value:
            _check_range(item, setting)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    unit = f" ({setting.unit})" if setting.unit else ""
    if setting.minimum is not None and value < setting.minimum:
        raise ValueError(f"{value} is too small; give {setting.minimum} or more{unit}")
    if setting.exclusive_minimum is not None and value <= setting.exclusive_minimum:
        raise ValueError(f"{value} is too small; give more than {setting.exclusive_minimum}{unit}")
    maximum = _MAX_WHOLE if setting.maximum is None and isinstance(value, int) else setting.maximum
    if maximum is not None and value > maximum:
        raise ValueError(f"{value} is too large; give {maximum} or less{unit}")
    if setting.exclusive_maximum is not None and value >= setting.exclusive_maximum:
        raise ValueError(f"{value} is too large; give less than {setting.exclusive_maximum}{unit}")
