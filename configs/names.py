"""Find the settings that a flag names, and explain unknown names."""

from difflib import get_close_matches

from configs.hints import HINTS, VALUE_HINTS
from configs.needless import NEEDLESS
from configs.run import DATASETS, SECTIONS, SETTINGS

_DOTTED_BY_FIELD: dict[str, tuple[str, ...]] = {}
for _dotted in SETTINGS:
    _field = _dotted.split(".")[1]
    _DOTTED_BY_FIELD[_field] = (*_DOTTED_BY_FIELD.get(_field, ()), _dotted)

# Fields of several datasets, but for switches. Setting them in all datasets at once would be a guess.
_DATASET_FIELDS = {
    field
    for field, names in _DOTTED_BY_FIELD.items()
    if len(names) > 1 and names[0].split(".")[0] in DATASETS and not SETTINGS[names[0]].is_switch
}


def find(name: str) -> tuple[str, ...]:
    """The dotted names of the settings that `name` (dotted or bare) sets; empty if it is unknown."""
    if name in SETTINGS:
        return (name,)
    return () if name in _DATASET_FIELDS else _DOTTED_BY_FIELD.get(name, ())


def find_negated(name: str) -> tuple[str, ...]:
    """The boolean settings that `name`, written noflag or no_flag, sets to False; empty if it is unknown."""
    section, dot, field = name.rpartition(".")
    if not field.startswith("no"):
        return ()
    names = find(section + dot + field.removeprefix("no").removeprefix("_"))
    return names if all(SETTINGS[dotted].is_switch for dotted in names) else ()


def flag(dotted: str) -> str:
    """The flag as messages show it: "--lr", "--samsum_dataset.data_path", "--lora_config.r"."""
    section, field = dotted.split(".")
    return f"--{dotted}" if section in DATASETS or len(field) == 1 else f"--{field}"


def explain_unknown(name: str) -> str:
    """Why `name` is no setting, and what to write instead."""
    section, _, field = name.rpartition(".")
    if name in SECTIONS:
        first = next(dotted for dotted in SETTINGS if dotted.startswith(f"{name}."))
        return f"is a group of settings; set one of them, like --{first}"
    if name in _DATASET_FIELDS:
        return f"each dataset has its own; write --NAME.{name} with the NAME of --dataset"
    if name == "config":
        return "belongs on the command line; a recipe cannot name another recipe"
    if field in HINTS:
        return f"unknown flag; here it is {HINTS[field]}"
    if needless := NEEDLESS.get(name) or NEEDLESS.get(field):
        return f"unknown flag; leave it out: {needless}"
    near = _nearest(name) or (_nearest(field) if section else "")
    if section and (known := find(field)) and not near.endswith(f".{field}"):
        return f"unknown flag; did you mean {flag(known[0])}?"
    return f"unknown flag; did you mean --{near}?" if near else "unknown flag; --help lists them all"


def value_hint(dotted: str, raw: str | list[str]) -> str:
    """What to write instead of a value that other tools have for the setting, as a clause; empty if it is unknown."""
    hint = VALUE_HINTS.get(dotted.split(".")[1], {}).get(raw.lower()) if isinstance(raw, str) else None
    return f"; {hint}" if hint else ""


def _nearest(name: str) -> str:
    """The known name, dotted or bare, that `name` is probably a misspelling of; empty if none is near."""
    bare = [field for field in _DOTTED_BY_FIELD if field not in _DATASET_FIELDS]
    matches = get_close_matches(name, [*bare, *SETTINGS, "config", "help"], n=1, cutoff=0.7)
    return matches[0] if matches else ""
