"""Make the paths among the settings absolute, before a user's code can change the working directory."""

import os
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Any

from configs.datasets import split_paths
from configs.run import SETTINGS, RunConfig

WRITTEN = (
    "train_config.output_dir",
    "train_config.dist_checkpoint_root_folder",
    "tracking_config.profiler_dir",
    "planning_config.dry_run_json",
)
"""Settings whose files a run creates. Any other path that does not exist may be a name on the hub."""


def make_paths_absolute(config: RunConfig, started_in: Path) -> RunConfig:
    """The config with every path in it absolute, `~` written out. A name on the hub stays a name.

    Args:
        started_in: the working directory at the start.
    """
    sections: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        section, field = name.split(".")
        value = config.value(name)
        # The name of a subfolder, and a word: neither is a path here.
        is_name = name == "train_config.dist_checkpoint_folder" or (name, value) == ("train_config.resume", "auto")
        if setting.is_path and isinstance(value, str) and value and not is_name:
            is_of_function = name == "custom_dataset.data_path" and config.custom_dataset.file is not None
            is_data = name.endswith(".data_path") and not is_of_function
            parts = split_paths(value) if is_data else [value]
            path = ",".join(_absolute(name, part, started_in, may_be_glob=is_data) for part in parts)
            sections[section] = replace(sections.get(section, config.section(section)), **{field: path})
    recipe = None if config.recipe is None else str(Path(started_in, os.path.expanduser(config.recipe)))
    return replace(config.with_sections(sections), recipe=recipe)


def _absolute(name: str, value: str, started_in: Path, *, may_be_glob: bool) -> str:
    # A file may be followed by its function's name: FILE.py:FUNCTION.
    file, colon, function = value.partition(":") if name == "custom_dataset.file" else (value, "", "")
    expanded = os.path.expanduser(file)
    path = str(Path(started_in, expanded))  # Path drops started_in if the file is absolute
    is_glob = may_be_glob and has_magic(expanded)
    return path + colon + function if name in WRITTEN or is_glob or os.path.exists(path) else value
