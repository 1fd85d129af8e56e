"""The text of --help: flags with their type, default, unit and meaning."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import get_origin

from configs.names import explain_unknown, flag
from configs.recipe_file import short_recipes
from configs.run import SECTIONS, SETTINGS
from configs.setting import Setting
from configs.values import choices
from utils.errors import ConfigError

_ANY_DATA_PATH = "chat_dataset.data_path"  # shown as --NAME.data_path, for every dataset

FIRST_SETTINGS = (
    "train_config.model_name",
    "train_config.dataset",
    _ANY_DATA_PATH,
    "train_config.output_dir",
    "train_config.use_peft",
    "quantization_config.quantization",
    "train_config.enable_fsdp",
    "train_config.num_epochs",
    "train_config.lr",
    "train_config.batch_size_training",
    "train_config.gradient_accumulation_steps",
    "train_config.context_length",
    "train_config.eval_every_steps",
    "train_config.resume",
    "planning_config.dry_run",
)
"""The settings that most first runs set, as plain --help shows them."""

_WIDTH = 110
_COLUMN = 41  # where meanings start
_DATA_PATH = (
    "--NAME.data_path TEXT",
    "the data of dataset NAME: a file, a glob, several as a,b, a folder with train.* and validation.*, or OWNER/NAME "
    "on the hub [default: samsum_dataset and alpaca_dataset come from the hub, most others need it]",
)

_HEAD = """\
Fine-tune a Hugging Face model on one device, one machine or many.

  python finetuning.py --config chat_lora --model_name MODEL --chat_dataset.data_path chats.jsonl
  torchrun --nproc_per_node 4 finetuning.py --enable_fsdp --model_name MODEL --fsdp_config.optimizer SGD
  torchrun --nproc_per_node 4 finetuning.py --config recipe.yaml --lr 2e-5
"""
_RULES = """
Booleans: --flag, --flag True, --flag False, --noflag. Lists: a,b. Flags override the recipe, which overrides
the defaults. A flag may start with the name of its group: --fsdp_config.optimizer SGD. Without it,
mixed_precision and use_fp16 are set in both groups that have them. "unset" is a flag that is left out.
"""
_MORE = """
More:
  --help all                             every flag, by group
  --help lora_config                     the flags of one group, which are:
{groups}
  --help WORD                            every flag with WORD in its name or its meaning: --help memory"""


def wants_help(argv: Sequence[str]) -> bool:
    """Whether --help or -h stands anywhere on the command line."""
    return any(_is_help(argument) for argument in argv)


def help_text(argv: Sequence[str]) -> str:
    """The text for a command line with --help, in lines of at most 110 columns.

    Without a word after --help the settings that most first runs set; after `all` every flag; after the name of a group
    its flags; after another word each flag with that word in its name or its meaning.

    Raises:
        ConfigError: if no flag has the word.
    """
    words = _words(argv)
    if not words:
        indent = " " * _COLUMN
        groups = textwrap.fill(", ".join(SECTIONS), _WIDTH, initial_indent=indent, subsequent_indent=indent)
        first = [_entry(*_DATA_PATH) if name == _ANY_DATA_PATH else _setting_entry(name) for name in FIRST_SETTINGS]
        return "\n".join([_HEAD, *first, *_general(), _RULES.rstrip(), _MORE.format(groups=groups)])
    if "all" in words:
        return "\n".join([_HEAD + _RULES, *_general(), *_by_group(SETTINGS)])
    shown = {name for word in words for name in _with_word(word)}
    return "\n".join(_by_group(name for name in SETTINGS if name in shown)).lstrip("\n")


def _is_help(argument: str) -> bool:
    return argument.partition("=")[0] in ("--help", "-h")


def _words(argv: Sequence[str]) -> list[str]:
    """The words of --help=WORD or --help WORD WORD, with underscores for dashes; none for --help alone."""
    place = next(number for number, argument in enumerate(argv) if _is_help(argument))
    word = argv[place].partition("=")[2]
    words = [word] if word else [*takewhile(lambda following: not following.startswith("-"), argv[place + 1 :])]
    return [word.replace("-", "_") for word in words]


def _with_word(word: str) -> list[str]:
    """The dotted names of the settings that a word of --help asks for.

    Raises:
        ConfigError: if there is none.
    """
    if word in SECTIONS:
        return [name for name in SETTINGS if name.startswith(f"{word}.")]
    if word in SETTINGS:
        return [word]
    whole_word = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    shown = [
        name
        for name, setting in SETTINGS.items()
        if word.lower() in name.split(".")[1].lower() or whole_word.search(f"{setting.help} {setting.default_text}")
    ]
    if not shown:
        reason = explain_unknown(word).removeprefix("unknown flag; ")
        raise ConfigError(f"--help {word}: no flag has this word; {reason}")
    return shown


def _general() -> list[str]:
    return [
        _entry(
            "--config RECIPE",
            f"a YAML file of settings, with the same names, or a shipped recipe: {', '.join(short_recipes())}; "
            "docs/recipes.md lists all [default: none]",
        ),
        _entry("--help", "print this and exit"),
    ]


def _by_group(names: Iterable[str]) -> list[str]:
    """The entries of settings, each group under its name. Groups without any are left out."""
    lines, group = list[str](), ""
    for name in names:
        if group != (group := name.split(".")[0]):
            lines.append(f"\n{group}: {SECTIONS[group].__doc__}")
        lines.append(_setting_entry(name))
    return lines


def _setting_entry(name: str) -> str:
    setting = SETTINGS[name]
    details = [setting.unit, _default(setting)]
    if allowed := choices(setting.kind):
        details.insert(0, "one of " + ", ".join(map(str, allowed)))
    meaning = f"{setting.help} [{'; '.join(filter(None, details))}]"
    return _entry(f"{_label(name)} {_type_word(setting)}", meaning)


def _label(name: str) -> str:
    """The flag as listed in its group: with the group's name if another group has the same flag."""
    field = name.split(".")[1]
    is_shared = sum(other.endswith(f".{field}") for other in SETTINGS) > 1
    return f"--{name}" if is_shared else flag(name)


def _type_word(setting: Setting) -> str:
    if choices(setting.kind):
        return "CHOICE"
    if get_origin(setting.kind) is tuple:
        return "LIST"
    if setting.is_switch:
        return "BOOL"
    for kind, word in ((int, "INT"), (float, "FLOAT")):
        if setting.kind in (kind, kind | None):
            return word
    return "TEXT"


def _default(setting: Setting) -> str:
    """The default of a flag: the value, or words if a value does not say what a run does without it."""
    if setting.is_required:
        return "required"
    if setting.default_text:
        return f"default: {setting.default_text}"
    default = setting.stands_for if setting.default is None else setting.default
    if default is None:
        return "default unset"
    words = ",".join(default) if isinstance(default, tuple) else str(default)
    return f"default {words or 'empty'}"


def _entry(left: str, meaning: str) -> str:
    return textwrap.fill(
        meaning,
        _WIDTH,
        initial_indent=f"  {left} ".ljust(_COLUMN),
        subsequent_indent=" " * _COLUMN,
        break_on_hyphens=False,
    )
