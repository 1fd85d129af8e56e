"""The text of --help: each flag with its type, default, unit and meaning."""

import textwrap
from typing import get_origin

from configs.names import flag
from configs.run import SECTIONS, SETTINGS
from configs.setting import Setting
from configs.values import choices

_WIDTH = 110
_COLUMN = 41  # where meanings start

_HEAD = """\
Fine-tune a Hugging Face model on one device, one machine or many.

  python finetuning.py --model_name MODEL --use_peft --output_dir outputs/first
  torchrun --nproc_per_node 4 finetuning.py --enable_fsdp --model_name MODEL --fsdp_config.optimizer SGD
  torchrun --nproc_per_node 4 finetuning.py --config recipe.yaml --lr 2e-5

Booleans: --flag, --flag True, --flag False, --noflag. Lists: a,b. "unset" says what leaving a flag out means.
A flag may start with the name of its group: --fsdp_config.optimizer SGD. Without it, mixed_precision and
use_fp16 are set in both groups that have them. Flags override the recipe, which overrides the defaults.
"""


def help_text() -> str:
    """All flags, grouped by section, in lines of at most 110 columns."""
    general = [
        _entry("--config FILE", "recipe: a YAML file of settings, with the same names [default unset]"),
        _entry("--help", "print this and exit"),
    ]
    parts = [_HEAD, *general]
    for section, config_class in SECTIONS.items():
        parts.append(f"\n{section}: {config_class.__doc__}")
        parts += [_setting_entry(name, setting) for name, setting in SETTINGS.items() if name.startswith(f"{section}.")]
    return "\n".join(parts) + "\n"


def _setting_entry(name: str, setting: Setting) -> str:
    details = [setting.unit, _default(setting)]
    if allowed := choices(setting.kind):
        details.insert(0, "one of " + ", ".join(allowed))
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
    if setting.is_required:
        return "required"
    default = setting.unset if setting.default is None else setting.default
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
