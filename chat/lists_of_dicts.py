"""A list of dicts that is stored as a dict of lists, as Arrow's older `Sequence` of dicts and tables are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.tokens.spans import BadExample


def listed(value: Any) -> Any:
    """The list of dicts that a dict of lists stands for; any other value as it is.

    Raises:
        BadExample: if the lists are of different lengths.
    """
    if not isinstance(value, Mapping):
        return value
    lists = {key: items for key, items in value.items() if items is not None}
    if not lists or not all(isinstance(items, list) for items in lists.values()):
        return value
    if len({len(items) for items in lists.values()}) > 1:
        sizes = ", ".join(f"{len(items)} of {key}" for key, items in lists.items())
        raise BadExample(f"a dict of lists in it has lists of different lengths ({sizes}); mend them")
    return [dict(zip(lists, items, strict=True)) for items in zip(*lists.values(), strict=True)]
