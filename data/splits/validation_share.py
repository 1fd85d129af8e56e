"""The share of the training examples that is set aside for validation, if there is no validation split."""

from __future__ import annotations

import numpy as np

from configs.datasets import DataSource
from data.files.kinds import ALL_KINDS
from data.splits.data_path import Hub, Place, locate
from utils.errors import ConfigError

AUTO_SHARE, AUTO_MOST = 0.05, 500  # of `auto`: a share, and the most examples
_SEED = 0  # fixed: another --seed must not move examples between training and validation


def validation_fraction(flag: str, dataset_config: DataSource) -> float:
    """The share of the training examples to evaluate on.

    Raises:
        ConfigError: if it was given and the training examples are a stream.
    """
    fraction = _share(dataset_config)
    if not dataset_config.streaming or not fraction:
        return fraction
    if _yields(dataset_config):
        return 0.0
    raise ConfigError(
        f"--{flag}.validation_fraction: a stream's length is unknown, so no share of it can be set aside; "
        f"give validation data of its own, or --run_validation False"
    )


def sets_rows_aside(flag: str, dataset_config: DataSource, place: Place) -> bool:
    """Whether a share of the training examples is the validation split.

    Raises:
        ConfigError: if a share was given and there is a validation split already.
    """
    fraction = validation_fraction(flag, dataset_config)
    if not fraction or not place.has_split(dataset_config.test_split):
        return fraction > 0
    if _yields(dataset_config):
        return False
    raise ConfigError(
        f"--{flag}.validation_fraction: {place} has the split {dataset_config.test_split}; leave this out to evaluate "
        f"on it, or name a split that is not there with --{flag}.test_split"
    )


def has_validation(flag: str, dataset_config: DataSource) -> bool:
    """Whether a built-in dataset has validation examples; on the hub the answer is yes, and loading them will tell."""
    place = locate(flag, dataset_config, "the/default", ALL_KINDS)
    return isinstance(place, Hub) or place.has_splits or validation_fraction(flag, dataset_config) > 0


def chosen_rows(name: str, flag: str, dataset_config: DataSource, num_rows: int, *, aside: bool) -> np.ndarray:
    """The rows that are set aside for validation, or the others, in their order: int64 [rows]."""
    count = max(1, round(num_rows * _share(dataset_config)))
    if dataset_config.validation_fraction == "auto":
        count = min(count, AUTO_MOST)
    if count >= num_rows:
        raise ConfigError(
            f"--{flag}.validation_fraction: {dataset_config.validation_fraction} of the {num_rows} rows there are "
            f"leaves none to train on; give more rows, a smaller share, or 0 ({name})"
        )
    chosen = np.zeros(num_rows, dtype=bool)
    chosen[np.random.default_rng(_SEED).permutation(num_rows)[:count]] = True
    return np.flatnonzero(chosen if aside else ~chosen)


def _share(dataset_config: DataSource) -> float:
    fraction = dataset_config.validation_fraction
    return AUTO_SHARE if fraction == "auto" else fraction


def _yields(dataset_config: DataSource) -> bool:
    """Whether the share applies only where it can: a default does, and auto; any other was asked for."""
    return dataset_config.validation_fraction in ("auto", type(dataset_config).validation_fraction)
