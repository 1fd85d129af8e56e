"""Dataset functions, imported by file path: the built-in ones and the user's own in the same way.

`datasets/` must stay a plain folder (a package of that name would hide the Hugging Face library). So a dataset file is
imported under a name made from its path. The import hook below lets spawned worker processes import it again: an
environment variable holds names and paths.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from configs.datasets import CustomDataset, DataSource
from data.dataset_functions.user_collator import with_collator
from data.dataset_functions.user_errors import RAISED, failed
from data.dataset_functions.user_function import UserFunction
from utils.errors import ConfigError

BUILT_IN_FOLDER = Path(__file__).resolve().parents[2] / "datasets"
_PATHS_VARIABLE = "FINETUNING_DATASET_FILES"
_PREFIX = "dataset_file_"


class _DatasetFileFinder(importlib.abc.MetaPathFinder):
    """Finds `dataset_file_*` modules by the paths in the environment."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        file = json.loads(os.environ.get(_PATHS_VARIABLE, "{}")).get(fullname)
        return importlib.util.spec_from_file_location(fullname, file) if file else None


if not any(type(finder).__name__ == "_DatasetFileFinder" for finder in sys.meta_path):
    sys.meta_path.append(_DatasetFileFinder())


def load_dataset_file(file: Path) -> ModuleType:
    """Import a file with a dataset function under a name of its own.

    Raises:
        ConfigError: if there is no such file, or importing it fails.
    """
    file = file.resolve()
    if not file.is_file():
        raise ConfigError(f"--dataset: there is no file {file}; give the path of a python file")
    name = f"{_PREFIX}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    paths = json.loads(os.environ.get(_PATHS_VARIABLE, "{}"))
    os.environ[_PATHS_VARIABLE] = json.dumps(paths | {name: str(file)})
    try:
        return importlib.import_module(name)
    except RAISED as error:
        raise failed(f"--dataset: {file} could not be imported", error, file) from error


def find_dataset_function(name: str, dataset_config: DataSource) -> Callable[..., Any]:
    """The function `(dataset_config, tokenizer, split)` that returns the tokenised rows of a split.

    Args:
        name: of the dataset, as in `--dataset`.

    Raises:
        ConfigError: if the file or the function does not exist.
    """
    if isinstance(dataset_config, CustomDataset) and dataset_config.file is not None:
        file, _, function_name = dataset_config.file.partition(":")
        function_name = function_name or "get_custom_dataset"
        path = Path(file).expanduser()
    elif isinstance(dataset_config, CustomDataset):
        path, function_name = BUILT_IN_FOLDER / "tokenized.py", "get_tokenized_dataset"
    else:
        path = BUILT_IN_FOLDER / f"{name.removesuffix('_dataset')}.py"
        function_name = f"get_{name}"
    module = load_dataset_file(path)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"--dataset: {path} has no function {function_name}; name one as file.py:function")
    if path.parent != BUILT_IN_FOLDER:
        function = UserFunction(function)
    if callable(get_data_collator := getattr(module, "get_data_collator", None)):
        function = with_collator(function, get_data_collator)
    return function


def accepted_options(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """Those of the offered arguments that a dataset function has parameters for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}
