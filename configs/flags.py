"""Parse the command line, and the recipe it names, into a validated RunConfig. Nothing else reads flags."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import fire
from fire.decorators import SetParseFn

from configs.adaptation import adapt
from configs.adapter_validation import SECTIONS_OF_ADAPTERS
from configs.formats import DATASETS
from configs.names import explain_unknown, find, find_negated, flag, value_hint
from configs.recipe_file import Raw, find_recipe, read_recipe
from configs.run import SECTIONS, SETTINGS, RunConfig
from configs.validation import validate
from configs.values import NO_VALUE, convert, is_true
from utils.errors import ConfigError

SET_THE_SAME = (
    ("train_config.global_batch_size", "train_config.gradient_accumulation_steps"),
    ("train_config.warmup_steps", "train_config.warmup_ratio"),
    ("train_config.eval_every_steps", "train_config.evals_per_epoch"),
    ("train_config.step_timeout_seconds", "train_config.timeout_seconds"),
    ("fsdp_config.hsdp", "fsdp_config.sharding_strategy"),
)
"""Settings of which one command has one at most; a flag replaces a recipe's."""

ONLY_WITH = {
    "use_peft": ("peft_method", "peft_dtype", "from_peft_checkpoint"),
    "run_validation": (
        "eval_every_steps",
        "evals_per_epoch",
        "eval_before_training",
        "early_stopping_patience",
        "keep_best",
    ),
    "gradient_clipping": ("gradient_clipping_threshold",),
    "freeze_layers": ("num_freeze_layers",),
    "activation_offloading": ("num_offloaded_layers",),
}
"""Settings of train_config that have no meaning if the first is False; a flag that says so leaves out a recipe's."""


def parse_flags(argv: Sequence[str]) -> RunConfig:
    """The settings of a run, from its arguments without the program's name.

    Raises:
        ConfigError: for the first flag that is unknown, has a wrong type, or conflicts with another.
    """
    return build_config(collect_flags(argv))


def build_config(flags: Mapping[str, str]) -> RunConfig:
    """The settings of a run, from raw values by flag name, as `collect_flags` returns them.

    Raises:
        ConfigError: as `parse_flags` does.
    """
    flags, notes = dict(flags), list[str]()
    values: dict[str, Any] = {}
    recipe = flags.pop("config", None)
    if recipe == NO_VALUE:
        raise ConfigError("--config: needs a value (the path of a YAML file, or the name of a shipped recipe)")
    if recipe is not None:
        _refuse_other_encodings("--config", recipe)
        recipe = find_recipe(recipe)
        values |= _assign(read_recipe(recipe), f"{recipe}: ", notes)
    # Flags last: they override the recipe.
    by_flags = _assign(flags.items(), "--", notes)
    values = _without_other_choices(_without_overridden(values, by_flags, notes), by_flags, notes) | by_flags
    if not values.get("train_config.model_name"):
        raise ConfigError("--model_name: is required; give a model folder, or a name on the Hugging Face hub")
    sections = {
        section: config_class(
            **{name.split(".")[1]: value for name, value in values.items() if name.startswith(f"{section}.")}
        )
        for section, config_class in SECTIONS.items()
    }
    train = sections["train_config"]
    config = RunConfig(train, given=frozenset(values), notes=tuple(notes), recipe=recipe).with_sections(sections)
    config = adapt(config)
    validate(config)
    return config


def _without_other_choices(values: Mapping[str, Any], by_flags: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """A recipe's values without the settings of what a flag turned off or chose another for, such as a dataset."""
    without = {
        **_settings_of_other_datasets(values, by_flags),
        **_settings_of_other_adapters(by_flags),
        **_settings_of_other_quantization(by_flags),
        **{
            f"train_config.{field}": f"--{switch} False"
            for switch, fields in ONLY_WITH.items()
            for field in fields
            if by_flags.get(f"train_config.{switch}") is False
        },
    }
    left_out = {
        name: chosen
        for name in values
        for start, chosen in without.items()
        if name.startswith(start) and name not in by_flags
    }
    notes += [f"{flag(name)} of the recipe is left out with {chosen}" for name, chosen in left_out.items()]
    return {name: value for name, value in values.items() if name not in left_out}


def _settings_of_other_datasets(values: Mapping[str, Any], by_flags: Mapping[str, Any]) -> dict[str, str]:
    """Beginnings of the names of settings, and the flag that they do not go with."""
    chosen, own = by_flags.get("train_config.dataset"), values.get("train_config.dataset")
    if not chosen or not own:
        return {}
    names = {name.strip() for name in own.split(",")} - {name.strip() for name in chosen.split(",")}
    return {f"{name}.": f"--dataset {chosen}" for name in names}


def _settings_of_other_adapters(by_flags: Mapping[str, Any]) -> dict[str, str]:
    """As `_settings_of_other_datasets`."""
    sections = {method: f"{section}." for method, section in SECTIONS_OF_ADAPTERS.items()}
    if by_flags.get("train_config.use_peft") is False:
        return dict.fromkeys(sections.values(), "--use_peft False")
    if by_flags.get("train_config.from_peft_checkpoint"):
        return dict.fromkeys(sections.values(), "--from_peft_checkpoint")  # which keeps its own settings
    if method := by_flags.get("train_config.peft_method"):
        return {section: f"--peft_method {method}" for other, section in sections.items() if other != method}
    return {}


def _settings_of_other_quantization(by_flags: Mapping[str, Any]) -> dict[str, str]:
    """As `_settings_of_other_datasets`."""
    name = "quantization_config.quantization"
    if name not in by_flags or by_flags[name] == "4bit":
        return {}
    fields = ["quant_type", "use_double_quant", *([] if by_flags[name] else ["compute_dtype", "quant_storage"])]
    chosen = f"--quantization {by_flags[name] or False}"
    return {f"quantization_config.{field}": chosen for field in fields}


def collect_flags(argv: Sequence[str]) -> dict[str, str]:
    """Raw values by flag name, with underscores for dashes.

    Fire pairs names with values, but three of its habits are unwanted here. It reads `--lr --use_peft` as lr=True and
    any `--noX` as X=False, so a flag without a value gets an explicit NO_VALUE first. It lets the last of two equal
    flags win, so that is refused. It uses `-lr` and `--` itself, so these are refused.
    """
    marked: list[str] = []
    names: set[str] = set()
    for argument, following in zip(argv, [*argv[1:], None], strict=False):
        if re.match(r"-[A-Za-z]|---", argument):
            raise ConfigError(
                f"{argument}: flags start with two dashes; a value that starts with one is written --flag={argument}"
            )
        if argument.startswith("--"):
            name, equals, _ = argument[2:].partition("=")
            if not name:
                raise ConfigError(f"unexpected argument {argument!r}; flags start with -- and a name")
            if name.replace("-", "_") in names:
                raise ConfigError(f"--{name}: given twice; leave one of them out")
            names.add(name.replace("-", "_"))
            if not equals and (following is None or re.match(r"-[A-Za-z]|--", following)):
                argument += f"={NO_VALUE}"
        marked.append(argument)
    # The separator must be something that no argument can be: fire's own, "-", would split the command line.
    command = [*marked, "--", f"--separator={NO_VALUE}"]
    positional, flags = fire.Fire(_as_given, command=command, name="finetuning.py", serialize=lambda _: None)
    if positional:
        raise ConfigError(
            f"unexpected argument {positional[0]!r}; flags start with --, lists are written a,b, and globs in quotes"
        )
    return flags


@SetParseFn(str)
def _as_given(*positional: str, **flags: str) -> list[Any]:
    return [positional, flags]


def _refuse_unknown(names: Sequence[str], prefix: str) -> None:
    """Refuse names of no setting: the first in the error's line, the others below, for people who bring many.

    Raises:
        ConfigError: if there is one.
    """
    plain = {spelled: spelled.replace("-", "_") for spelled in names}
    unknown = [
        f"{prefix}{spelled}: {explain_unknown(name)}"
        for spelled, name in plain.items()
        if not find(name) and not find_negated(name)
    ]
    if unknown:
        more = f" ({len(unknown) - 1} more below)" if len(unknown) > 1 else ""
        if more and prefix != "--":
            file = prefix.removesuffix(": ")
            unknown.append(
                f"if {file} is a file of another tool, `python -m tools.translate {file}` makes a recipe of it"
            )
        raise ConfigError(f"{unknown[0]}{more}", details="\n".join(unknown[1:]))


def _without_overridden(values: Mapping[str, Any], by_flags: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """A recipe's values without those that would contradict a flag, which sets the same in another way."""
    overridden = {
        name: winner
        for names in SET_THE_SAME
        for winner in names
        for name in names
        if name in values and name not in by_flags and not (by_flags.get(winner) is None or by_flags[winner] is False)
    }
    notes += [f"{flag(winner)} replaces the recipe's {flag(name)}" for name, winner in overridden.items()]
    return {name: value for name, value in values.items() if name not in overridden}


def _refuse_other_encodings(label: str, raw: Raw) -> None:
    """Refuse a value that no file of a run could hold, such as a path of Latin-1.

    Raises:
        ConfigError: if it is not UTF-8.
    """
    for value in [raw] if isinstance(raw, str) else raw:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{label}: {value!r} is not UTF-8; rename the file or folder that it is") from error


def _assign(entries: Iterable[tuple[str, Raw]], prefix: str, notes: list[str]) -> dict[str, Any]:
    """Values by dotted name, from the names and raw values of one source. Its errors start with `prefix`."""
    entries = list(entries)
    _refuse_unknown([spelled for spelled, _ in entries], prefix)
    values: dict[str, Any] = {}
    for spelled, raw in entries:
        label = prefix + spelled
        name = spelled.replace("-", "_")
        targets = find(name)
        if not targets and (targets := find_negated(name)):
            if raw != NO_VALUE:
                raise ConfigError(f"{label}: takes no value; write {flag(targets[0])} True or False")
            raw = "False"
        _refuse_other_encodings(label, raw)
        for target in targets:
            if target in values:
                raise ConfigError(f"{label}: given twice; leave one of them out")
            try:
                values[target] = convert(raw, SETTINGS[target])
            except ValueError as error:
                raise ConfigError(f"{label}: {error}{value_hint(target, raw)}") from error
        if len(targets) > 1:
            sections = [target.split(".")[0] for target in targets]
            where = [sections[0], "all other datasets"] if {*sections} == {*DATASETS} else sections
            notes.append(f"--{name} set in {' and '.join(where)}")
        if targets == ("quantization_config.quantization",) and (raw == NO_VALUE or is_true(raw)):
            notes.append("quantization True means 4bit")
    return values
