"""Images in the columns of tables as they are stored: the library would decode each that is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets


def as_stored(feature: Any) -> Any:
    """A column's type, or a type in it, without decoding of images."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(as_stored(feature.feature))
    if isinstance(feature, Mapping):
        return {name: as_stored(part) for name, part in feature.items()}
    return [as_stored(part) for part in feature] if isinstance(feature, list) else feature


def with_stored_images(data: Any) -> Any:
    """A dataset of the library's with its images as they are stored."""
    changed = {name: as_stored(feature) for name, feature in (data.features or {}).items()}
    for name, feature in changed.items():
        if feature != data.features[name]:
            data = data.cast_column(name, feature)
    return data
