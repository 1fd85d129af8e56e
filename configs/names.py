"""Find the settings that a flag names, and explain unknown names."""

from collections.abc import Collection
from difflib import SequenceMatcher
from typing import NamedTuple

from configs.formats import DATASETS
from configs.hints import HINTS
from configs.other_values import value_hint as hint_of_value
from configs.run import SECTIONS, SETTINGS
from configs.unsupported_flags import UNSUPPORTED

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
    """The reason why `name` is not a setting, and what to write instead."""
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
    if reason := UNSUPPORTED.get(name) or UNSUPPORTED.get(field):
        return f"unknown flag; leave it out: {reason}"
    return f"unknown flag; {_guess(section, field) or '--help all lists every flag'}"


def value_hint(dotted: str, raw: str | list[str]) -> str:
    """A clause that says what to write instead of a value of other tools; empty if the value is unknown."""
    hint = hint_of_value(dotted.split(".")[1], raw) if isinstance(raw, str) else ""
    return f"; {hint}" if hint else ""


_LIKE = 0.7
_LIKE_IN_A_SECTION = 0.65  # a section has few names to confuse
_SHORTEST_BEGINNING = 3
_MOST_NAMES = 6  # more names are not a guess


class _Near(NamedTuple):
    """Known names that resemble an unknown one or begin with it, and their likeness to it, up to 1."""

    likeness: float
    names: list[str]


def _guess(section: str, field: str) -> str:
    """A clause that names the setting probably meant by an unknown name; empty without a guess.

    Names of other tools are misspelled, too: --learning_rat is their learning_rate, and that is --lr here.
    """
    if section and (guess := _guess_dotted(section, field)):
        return guess
    bare = [name for name in _DOTTED_BY_FIELD if name not in _DATASET_FIELDS]
    if field.startswith("no"):
        bare += [f"no{name}" for name in bare if find_negated(f"no{name}")]
    flags = _like([*bare, "config", "help"], field) or _like(SETTINGS, field, may_begin=False)
    of_datasets, of_others = _like(_DATASET_FIELDS, field), _like(HINTS, field, may_begin=False)
    nearest = max(filter(None, (flags, of_datasets, of_others)), key=lambda near: near.likeness, default=None)
    if nearest is None:
        return ""
    if nearest is of_others:
        return f"if {nearest.names[0]} is meant, here it is {HINTS[nearest.names[0]]}"
    return _did_you_mean(nearest.names, of_any_dataset=nearest is of_datasets)


def _guess_dotted(section: str, field: str) -> str:
    """The same, for a name in this section or in one with a similar name."""
    near = None if section in SECTIONS else _like(SECTIONS, section)
    sections = near.names if near else [section]
    if len(sections) > 1 and field in _DATASET_FIELDS:
        return _did_you_mean([field], of_any_dataset=True)
    found = []
    for one in sections:
        fields = [name.split(".")[1] for name in SETTINGS if name.startswith(f"{one}.")]
        if in_this := _like(fields, field, least=_LIKE_IN_A_SECTION):
            found += [f"{one}.{name}" for name in in_this.names]
    known = find(field)
    return _did_you_mean(found) or (f"did you mean {flag(known[0])}?" if known else "")


def _did_you_mean(names: list[str], *, of_any_dataset: bool = False) -> str:
    """The clause; empty without names."""
    flags = " or ".join(f"--NAME.{name}" if of_any_dataset else f"--{name}" for name in names)
    which = ", with the NAME of --dataset" if of_any_dataset else ""
    return f"did you mean {flags}{which}?" if names else ""


def _like(known: Collection[str], name: str, *, least: float = _LIKE, may_begin: bool = True) -> _Near | None:
    """The known names most similar to this one; None if there are none, or too many.

    Args:
        may_begin: whether names that begin with it count as the most similar.
    """
    if name in known:
        return _Near(1.0, [name])
    if may_begin and len(name) >= _SHORTEST_BEGINNING:
        begun = [one for one in known if one.startswith(name)]
        if 0 < len(begun) <= _MOST_NAMES:
            return _Near(1.0, begun)
    matcher, most, likest = SequenceMatcher(b=name, autojunk=False), least, list[str]()
    for one in known:
        matcher.set_seq1(one)
        # The first two are upper bounds of the third, and much cheaper.
        if matcher.real_quick_ratio() < most or matcher.quick_ratio() < most or (ratio := matcher.ratio()) < most:
            continue
        likest = [*(likest if ratio == most else []), one]
        most = ratio
    return _Near(most, likest) if 0 < len(likest) <= _MOST_NAMES else None
