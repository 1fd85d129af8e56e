"""The regular expressions of an adapter_config.json, tried on the names of a model before peft matches them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import peft
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from torch import nn

_SECONDS = 10.0  # milliseconds are usual
_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for name in names:
        re.fullmatch(pattern, name)
"""


def try_patterns(model: nn.Module, settings: peft.PeftConfig, seconds: float = _SECONDS) -> None:
    """Match the patterns in a process of their own, which can be ended: a match of (a+)+b takes years.

    Args:
        seconds: for all patterns of a setting.

    Raises:
        ValueError: if one takes longer, or is no regular expression.
    """
    names = [*(name for name, _ in model.named_modules()), *EMBEDDING_LAYER_NAMES]
    for setting, patterns in _patterns_of(settings).items():
        command, given = [sys.executable, "-I", "-c", _MATCH], json.dumps([patterns, names])
        try:
            subprocess.run(command, input=given, text=True, capture_output=True, timeout=seconds, check=True)
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"{setting} in adapter_config.json took over {seconds:g} s to match the names of the model's layers; "
                "write a simpler expression, or a list of names"
            ) from error
        except subprocess.CalledProcessError as error:
            last_line = error.stderr.strip().rpartition("\n")[2]
            raise ValueError(f"{setting} in adapter_config.json is no regular expression: {last_line}") from error


def _patterns_of(settings: peft.PeftConfig) -> dict[str, list[str]]:
    """The patterns by their setting, as peft completes them (`check_target_module_exists`, `get_pattern_key`)."""
    found: dict[str, list[str]] = {}
    for setting in ("target_modules", "exclude_modules"):
        value: Any = getattr(settings, setting, None)
        if isinstance(value, str):
            found[setting] = [value]
    for setting in ("rank_pattern", "alpha_pattern"):
        if keys := getattr(settings, setting, None):
            found[setting] = [rf"(.*\.)?({key})" for key in keys]
    if names := getattr(settings, "modules_to_save", None):
        found["modules_to_save"] = [rf"(^|.*\.){name}($|\..*)" for name in names]
    return found
