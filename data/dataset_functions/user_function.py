"""A user's dataset function as llama-recipes has them: a function or a class, which may return a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import update_wrapper
from typing import Any

from data.dataset_functions.user_tokenizer import give_template_lists


class UserFunction:
    """Calls the function with a tokenizer as llama-recipes' files expect it; its rows can be iterated over.

    A class, so that a stream can be pickled for a worker process.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function, updated=())  # its name, and its parameters for inspect.signature

    def __call__(self, dataset_config: Any, tokenizer: Any, split: str, **options: Any) -> Any:
        give_template_lists(tokenizer)
        rows = self.function(dataset_config, tokenizer, split, **options)
        is_map_style = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
        return MapStyleRows(rows) if is_map_style and not isinstance(rows, Iterable) else rows


class MapStyleRows:
    """The items of a map-style `torch.utils.data.Dataset`, which has a length and items alone."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))
