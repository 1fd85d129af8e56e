"""Values that a table stores otherwise than people wrote them: names of classes as numbers, numbers of 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import datasets
import numpy as np

from data.files.json_values import WrittenNumber

_SHORT_FLOATS = {"float16": np.float16, "float32": np.float32}

AsWritten = Mapping[str, Callable[[Any], Any]]
"""By column, what makes of a stored value the one that was written."""


def as_written(data: Any) -> dict[str, Callable[[Any], Any]]:
    """What to do with the values of a dataset's columns; of columns that are not named, nothing."""
    features = getattr(data, "features", None) or {}
    found = {name: _reader_of(feature) for name, feature in features.items()}
    return {name: reader for name, reader in found.items() if reader is not None}


def _reader_of(feature: Any) -> Callable[[Any], Any] | None:
    if isinstance(feature, datasets.ClassLabel) and feature.names:
        return _ClassName(tuple(feature.names))
    if isinstance(feature, datasets.Value) and feature.dtype in _SHORT_FLOATS:
        return _ShortFloat(feature.dtype)
    return None


class _ClassName:
    """The name of a class; of a number without one, the number. A class, so that a stream can be pickled."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, value: Any) -> Any:
        if value is None or value == -1:  # as the library writes a missing class
            return None
        return self.names[value] if 0 <= value < len(self.names) else value


class _ShortFloat:
    """A number with the digits that its 16 or 32 bits hold: 0.1, which is 0.10000000149011612 in 64."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __call__(self, value: Any) -> Any:
        return value if value is None else WrittenNumber(str(_SHORT_FLOATS[self.dtype](value)))
