"""The settings of every dataset format, from the files of datasets/. They are loaded by path: datasets/ is no package.

At their top these files import from data/ only what imports no library, so flags are read before torch is.
"""

from configs.datasets import BUILT_IN_FOLDER, FORMATS, CustomDataset, DataSource
from utils.imported_files import import_file


def _settings_of(format: str) -> type[DataSource]:
    """The one settings class that a file of datasets/ defines."""
    module = import_file(BUILT_IN_FOLDER / f"{format}.py")
    (settings,) = (
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, DataSource) and found.__module__ == module.__name__
    )
    return settings


DATASETS: dict[str, type[DataSource]] = {
    **{f"{format}_dataset": _settings_of(format) for format in FORMATS},
    "custom_dataset": CustomDataset,
}
"""The settings classes of datasets by the names that --dataset knows."""


def dataset_of(config: DataSource) -> str:
    """The name that `--dataset` has for the dataset with these settings."""
    return next(name for name, settings in DATASETS.items() if isinstance(config, settings))
