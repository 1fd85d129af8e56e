"""Dataset functions, imported by file path: the built-in ones and the user's own in the same way.

`datasets/` must stay a plain folder: a package of that name would hide the Hugging Face library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from configs.datasets import BUILT_IN_FOLDER, CustomDataset, DataSource
from data.dataset_functions.user_collator import with_collator
from data.dataset_functions.user_errors import RAISED, failed
from data.dataset_functions.user_function import UserFunction
from data.dataset_functions.user_sources import is_of_users, user_sources
from data.files.contents import contents_of
from utils.errors import ConfigError
from utils.imported_files import import_file


def load_dataset_file(file: Path) -> ModuleType:
    """Import a file with a dataset function under a name of its own.

    Raises:
        ConfigError: if there is no such file, or importing it fails.
    """
    file = file.resolve()
    if not file.is_file():
        raise ConfigError(f"--dataset: there is no file {file}; give the path of a python file")
    # `datasets.map` in a user's function finds earlier results by the names of its functions.
    version = contents_of(user_sources([file])) if is_of_users(file) else ""
    try:
        return import_file(file, version)
    except RAISED as error:
        raise failed(f"--dataset: {file} could not be imported", error, file) from error


def find_dataset_function(name: str, dataset_config: DataSource) -> Callable[..., Any]:
    """The function `(dataset_config, tokenizer, split)` that returns the tokenized rows of a split.

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
    """The offered arguments for which a dataset function has parameters."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}
