"""Dataset recipes, loaded by file path: built-in ones and the user's go through the same door.

`datasets/` must stay a plain folder (a package of that name would hide the Hugging Face library), so a recipe
is imported under a name made from its path. The finder below lets worker processes that are spawned rather
than forked import it again: the names travel in an environment variable.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from configs.run import RunConfig
from data.user_collator import with_collator
from utils.errors import ConfigError

BUILT_IN_FOLDER = Path(__file__).resolve().parent.parent / "datasets"
_PATHS_VARIABLE = "FINETUNING_RECIPE_PATHS"


class _RecipeFinder(importlib.abc.MetaPathFinder):
    """Finds `recipe_*` modules by the paths in the environment."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("recipe_"):
            return None
        file = json.loads(os.environ.get(_PATHS_VARIABLE, "{}")).get(fullname)
        return importlib.util.spec_from_file_location(fullname, file) if file else None


if not any(type(finder).__name__ == "_RecipeFinder" for finder in sys.meta_path):
    sys.meta_path.append(_RecipeFinder())


def load_recipe_module(file: Path) -> ModuleType:
    """Import a recipe file under a name of its own.

    Raises:
        ConfigError: where there is no such file, or running it fails.
    """
    file = file.resolve()
    if not file.is_file():
        raise ConfigError(f"--dataset: there is no recipe file {file}; give the path of a python file")
    name = f"recipe_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    paths = json.loads(os.environ.get(_PATHS_VARIABLE, "{}"))
    os.environ[_PATHS_VARIABLE] = json.dumps(paths | {name: str(file)})
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--dataset: {file} could not be imported ({type(error).__name__}: {error})") from error


def find_recipe(config: RunConfig, name: str | None = None) -> tuple[Callable[..., Any], Any, dict[str, str]]:
    """The recipe of a run.

    Args:
        name: one of the run's datasets; unset: the only one.

    Returns:
        The function `(dataset_config, tokenizer, split)`, its dataset config, and the names that the recipe gives
        its splits: `{"train": ..., "validation": ...}`.

    Raises:
        ConfigError: where the file or the function does not exist.
    """
    name = name or config.train_config.dataset
    dataset_config = getattr(config, name)
    if name == "custom_dataset":
        file, _, function_name = dataset_config.file.partition(":")
        function_name = function_name or "get_custom_dataset"
        path = Path(file).expanduser()
    else:
        path = BUILT_IN_FOLDER / f"{name.removesuffix('_dataset')}.py"
        function_name = f"get_{name}"
    splits = {"train": dataset_config.train_split, "validation": dataset_config.test_split}
    module = load_recipe_module(path)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"--{name}.file: {path} has no function {function_name}; name one as file.py:function")
    if callable(get_data_collator := getattr(module, "get_data_collator", None)):
        function = with_collator(function, get_data_collator)
    return function, dataset_config, splits
