"""Values that are made when a test first asks for them: a selection of tests makes what it needs and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Made(dict[Any, Any]):
    """`Made(make)[a, b]` is `make(a, b)`, called once."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Any:
        self[key] = self._make(*key) if isinstance(key, tuple) else self._make(key)
        return self[key]
