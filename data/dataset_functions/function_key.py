"""A key of a function for caches: its code with what it closes over, the arguments of a partial, and values it uses.

Hugging Face's `Hasher` takes a function that can be imported for its name alone.
"""

from __future__ import annotations

import copy
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import datasets
import numpy as np
import xxhash
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from configs.datasets import CustomDataset, DataSource
from data.dataset_functions.user_sources import is_of_users, named_file, user_sources
from data.files.contents import contents_of
from utils.printing import print_line
from utils.progress import shows_progress

_SCALARS = (type(None), bool, int, float, complex, str, bytes, type(...))
_MOST_NAMES = 64  # of files that are looked for among the texts of one list
_COMMON = {field.name for field in fields(DataSource)}


def function_key(function: Callable[..., Any], tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """A digest that differs if the function would do something else.

    It holds the function's code; of a user's function also the modules that its file imports, and the files that they
    name. It holds values: arguments of a partial, defaults, what a closure or a bound object holds, and globals that
    the code uses.

    Args:
        tokenizer: has a key of its own already.
    """
    walk = _ValueDigest(tokenizer)
    try:
        walk.add(function)
    except RecursionError:
        walk.update(_never_again("objects that are nested too deep"))
    sources = user_sources(walk.sources)
    walk.update("files", *(file.name for file in sources), contents_of(sources))
    return walk.digest.hexdigest()


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all that token ids depend on. The library's own changes once the tokenizer is used."""
    if not tokenizer.is_fast:
        undated: Any = copy.copy(tokenizer)
        undated.template_date = None  # only some chat templates write it, which their own keys say
        return Hasher.hash(undated)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # the last call's setting; the next call sets its own
    backend.no_padding()
    return Hasher.hash([backend.to_str(), tokenizer.special_tokens_map, tokenizer.chat_template])


class _ValueDigest:
    """Adds values, and the values in them, to one digest."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.digest = xxhash.xxh3_128()
        self.sources: dict[Path, None] = {}  # files of Python with a user's code that was met
        self._places = {id(tokenizer): -1}  # of objects that were met, by id
        self._kept: list[Any] = [tokenizer]  # or an id could be given again

    def update(self, *texts: object) -> None:
        """Add short texts, each told from the next."""
        for text in texts:
            data = str(text).encode("utf-8", "surrogatepass")
            self.digest.update(f"{len(data)}:".encode() + data)

    def add(self, value: Any) -> None:
        """Add a value and all that is in it."""
        if isinstance(value, Enum):
            self.update("enum", type(value).__qualname__, value.name)
        elif type(value) in _SCALARS:
            self._add_scalar(value)
        elif id(value) in self._places:
            self.update("again", self._places[id(value)])
        else:
            self._places[id(value)] = len(self._places)
            self._kept.append(value)
            self.update(type(value).__module__, type(value).__qualname__)
            self._add_object(value)

    def _add_scalar(self, value: Any) -> None:
        self.update(type(value).__name__, repr(value))
        self._add_named([value])

    def _add_named(self, texts: Iterable[Any]) -> None:
        """Add what is in the files that these are names of: a user's function that was given one may read it."""
        if self.sources:
            files = [named_file(text) for text in islice(texts, _MOST_NAMES) if isinstance(text, str)]
            self.update(contents_of([file for file in files if file is not None]))

    def _add_object(self, value: Any) -> None:
        match value:
            case PreTrainedTokenizerBase():
                self.update(tokenizer_key(value))
                self._add_class(type(value))
            case DataSource():
                # Where the rows come from is in the key by itself; a user's function may read anything of it.
                left_out = () if isinstance(value, CustomDataset) else _COMMON
                names = [field.name for field in fields(value) if field.name not in left_out]
                self._add_items((name, object.__getattribute__(value, name)) for name in names)
            case datasets.Dataset():
                self.update(value._fingerprint)
            case np.ndarray() if not value.dtype.hasobject:
                self.update(value.dtype, value.shape)
                self.digest.update(np.ascontiguousarray(value).data)
            case Path():
                self._add_scalar(str(value))
            case re.Pattern():
                self.update(repr(value.pattern), value.flags)
            case partial():
                self._add_all(value.func, value.args, value.keywords)
            case FunctionType():
                self._add_function(value)
            case MethodType():
                self._add_all(value.__func__, value.__self__)
            case BuiltinFunctionType():
                owner = value.__self__
                self.update(value.__module__, value.__qualname__)
                self.add(None if isinstance(owner, ModuleType) else owner)
            case CodeType():
                self.update(value.co_name, value.co_code.hex(), *value.co_names)
                for constant in value.co_consts:  # the names of files among them are found in the source
                    is_nested = isinstance(constant, CodeType | frozenset)
                    self.add(constant) if is_nested else self.update(type(constant).__name__, repr(constant))
            case CellType():
                self._add_cell(value)
            case property() | staticmethod() | classmethod():
                self._add_all(*(getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel")))
            case MemberDescriptorType() | GetSetDescriptorType() | WrapperDescriptorType() | MethodWrapperType():
                self.update(value.__qualname__)
            case MethodDescriptorType() | ClassMethodDescriptorType():
                self.update(value.__qualname__)
            case ModuleType():
                self.update(value.__name__, getattr(value, "__version__", ""))
                self._is_users(value)
            case type():
                self._add_class(value)
            case list() | tuple() if {*map(type, value)} <= {*_SCALARS}:
                self.update(repr(value))
                self._add_named(value)
            case list() | tuple():
                self.update(len(value))
                self._add_all(*value)
            case Mapping() if {*map(type, value), *map(type, value.values())} <= {*_SCALARS}:
                self.update(repr(dict(value)))
                self._add_named(value.values())
            case Mapping():
                self.update(len(value))
                self._add_items(value.items())
            case set() | frozenset():
                self.update(*sorted(_digest_of(item) for item in value))
            case _:
                self._add_instance(value)

    def _add_all(self, *values: Any) -> None:
        for value in values:
            self.add(value)

    def _add_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        for name, value in items:
            self._add_all(name, value)

    def _add_cell(self, cell: CellType) -> None:
        try:
            self.add(cell.cell_contents)
        except ValueError:  # a variable that was not given a value yet
            self.update("empty")

    def _add_function(self, function: FunctionType) -> None:
        is_users = self._is_users(sys.modules.get(function.__module__), Path(function.__code__.co_filename))
        self.update(function.__module__ if not is_users else "", function.__qualname__)
        self._add_all(function.__code__, function.__defaults__, function.__kwdefaults__, *(function.__closure__ or ()))
        if is_users:
            names = [name for name in sorted(_names_in(function.__code__)) if name in function.__globals__]
            self._add_items((name, function.__globals__[name]) for name in names)
        if wrapped := vars(function).get("__wrapped__"):
            self.add(wrapped)

    def _add_class(self, kind: type) -> None:
        is_users = self._is_users(sys.modules.get(kind.__module__))
        self.update(kind.__module__ if not is_users else "", kind.__qualname__)
        if is_users:
            self._add_all(*kind.__bases__)
            self._add_items((name, item) for name, item in sorted(vars(kind).items()) if _is_written(name, item))

    def _add_instance(self, value: Any) -> None:
        self._add_class(type(value))
        if _is_ours(type(value)) and hasattr(value, "cache_key"):
            self.update(value.cache_key())
        elif self._is_users(sys.modules.get(type(value).__module__)) or _is_ours(type(value)):
            self._add_items(_attributes(value).items())
        elif wrapped := getattr(value, "__wrapped__", None):  # as of functools.cache
            self.add(wrapped)
        else:
            self.update(_library_key(value))

    def _is_users(self, module: ModuleType | None, file: Path | None = None) -> bool:
        """Whether a module is a user's; if so, its file is noted."""
        path = file or Path(getattr(module, "__file__", None) or "")
        is_users = path.is_file() and is_of_users(path)
        if is_users:
            self.sources[path] = None
        return is_users


def _digest_of(value: Any) -> str:
    walk = _ValueDigest()
    walk.add(value)
    return walk.digest.hexdigest()


def _names_in(code: CodeType) -> set[str]:
    """The global names that code uses, that of functions in it too."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    of_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    try:
        return of_slots | object.__getattribute__(value, "__dict__")
    except AttributeError:
        return of_slots


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _is_written(name: str, item: Any) -> bool:
    """Whether an attribute of a class stands in its code; a dataclass has methods that Python made."""
    function = getattr(item, "__func__", item)
    if isinstance(function, FunctionType):
        return Path(function.__code__.co_filename).is_file()
    return not name.startswith("__") and name != "_abc_impl"


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("chat", "configs", "data", "utils")


def _library_key(value: Any) -> str:
    """A digest of a library's object; another one each time if the library knows none."""
    try:
        return Hasher.hash(value)
    except Exception:  # of whatever an object does while it is pickled
        return _never_again(f"a {type(value).__qualname__}")


def _never_again(what: str) -> str:
    """A digest that no other run has: tokens are then made again, rather than taken from other code's."""
    if shows_progress():
        print_line(f"tokens are made again by each run: the dataset's function uses {what}, which has no digest")
    return secrets.token_hex(16)
