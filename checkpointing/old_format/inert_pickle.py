"""Read a pickle as plain data: nothing that it names is imported, called or changed.

`pickle.Unpickler` with a list of allowed classes is not enough: BUILD sets attributes of whatever it is given, a class
too, PUT with a large index allocates a table of that size, and a key of nested tuples overflows the stack when it is
hashed. Here a class is only a name, an object only its name with arguments and state, and a dict a list of pairs.
Memory and time grow with the bytes of the pickle alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MAX_NAME_BYTES = 1000


@dataclass(frozen=True, slots=True)
class PickledName:
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_ORDERED_DICT = PickledName("collections", "OrderedDict")


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object that unpickling would make: by a call with these arguments; then it would get this state."""

    made_by: PickledName
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(slots=True, eq=False)
class PickledDict:
    """A dict's items. Nothing is hashed."""

    pairs: list[tuple[Any, Any]]


class PickleRefusedError(ValueError):
    """The bytes are no pickle of plain data; the message is a clause that says why."""


def read_inert(data: bytes, is_allowed: Callable[[PickledName], bool], purpose: str) -> Any:
    """The pickle's contents: None, bool, int, float, str, tuple, list, and the classes above.

    Args:
        is_allowed: whether the pickle may name this. Nothing is done with the name.
        purpose: for the messages, as in "an index of tensors".

    Raises:
        PickleRefusedError: if it names anything else, or is damaged.
    """
    reader = _InertReader(data, is_allowed, purpose)
    try:
        return reader.read()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise PickleRefusedError(f"it is damaged at byte {reader.position}") from error


class _InertReader:
    """The state of reading: a stack, marks in it, and a memo, as the pickle module's documentation describes them."""

    def __init__(self, data: bytes, is_allowed: Callable[[PickledName], bool], purpose: str) -> None:
        self.data, self.position, self.is_allowed, self.purpose = data, 0, is_allowed, purpose
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        data, operations, stop = self.data, _OPERATIONS, ord(".")
        while (code := data[self.position]) != stop:
            self.position += 1
            operation = operations.get(code)
            if operation is None:
                raise PickleRefusedError(f"it has the opcode {code:#x}, which {self.purpose} does not need")
            operation(self)
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise PickleRefusedError(f"it is cut off: {count} bytes are promised at byte {self.position}")
        taken, self.position = self.data[self.position : end], end
        return taken

    def byte(self) -> int:
        value = self.data[self.position]
        self.position += 1
        return value

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self, count: int) -> None:
        self.stack.append(self.take(count).decode("utf-8", "surrogatepass"))

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + _MAX_NAME_BYTES)
        if end < 0:
            raise PickleRefusedError(f"it names a class without end at byte {self.position}")
        return self.take(end + 1 - self.position)[:-1].decode()

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items, self.stack[mark:] = self.stack[mark:], []
        return items

    def tuple_of(self, count: int) -> None:
        if count > len(self.stack):
            raise IndexError
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise PickleRefusedError("it appends to what is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, PickledDict) or len(items) % 2:
            raise PickleRefusedError("it sets items of what is no dict")
        target.pairs.extend(zip(items[::2], items[1::2], strict=True))

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleRefusedError("it names a class by what is no text")
        named = PickledName(module, name)
        if not self.is_allowed(named):
            raise PickleRefusedError(f"it asks for {str(named)[:200]}, which {self.purpose} does not need")
        self.stack.append(named)

    def make(self) -> None:
        arguments, maker = self.stack.pop(), self.stack.pop()
        if not isinstance(maker, PickledName) or not isinstance(arguments, tuple):
            raise PickleRefusedError("it calls what is no class")
        is_dict = maker == _ORDERED_DICT and not arguments
        self.stack.append(PickledDict([]) if is_dict else PickledObject(maker, arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, PickledObject) or target.state is not None:
            raise PickleRefusedError("it sets the state of what is no new object (of a class, say)")
        target.state = state

    def memoize(self, index: int) -> None:
        self.memo[index] = self.stack[-1]


def _pushes(make: Callable[[_InertReader], Any]) -> Callable[[_InertReader], None]:
    return lambda reader: reader.stack.append(make(reader))


_OPERATIONS: dict[int, Callable[[_InertReader], Any]] = {
    # frames and the version mean nothing here
    0x80: lambda r: r.take(1),  # PROTO
    0x95: lambda r: r.take(8),  # FRAME
    ord("("): lambda r: r.marks.append(len(r.stack)),
    # constants
    ord("N"): _pushes(lambda r: None),
    0x88: _pushes(lambda r: True),
    0x89: _pushes(lambda r: False),
    ord("J"): _pushes(lambda r: r.number("<i")),
    ord("K"): _pushes(lambda r: r.byte()),
    ord("M"): _pushes(lambda r: r.number("<H")),
    0x8A: _pushes(lambda r: int.from_bytes(r.take(r.byte()), "little", signed=True)),  # LONG1
    ord("G"): _pushes(lambda r: r.number(">d")),
    0x8C: lambda r: r.text(r.byte()),  # SHORT_BINUNICODE
    ord("X"): lambda r: r.text(r.number("<I")),
    0x8D: lambda r: r.text(r.number("<Q")),  # BINUNICODE8
    # containers
    ord(")"): _pushes(lambda r: ()),
    0x85: lambda r: r.tuple_of(1),
    0x86: lambda r: r.tuple_of(2),
    0x87: lambda r: r.tuple_of(3),
    ord("t"): _pushes(lambda r: tuple(r.since_mark())),
    ord("]"): _pushes(lambda r: []),
    ord("a"): lambda r: r.append([r.stack.pop()]),
    ord("e"): lambda r: r.append(r.since_mark()),
    ord("}"): _pushes(lambda r: PickledDict([])),
    ord("s"): lambda r: r.set_items([r.stack.pop(), r.stack.pop()][::-1]),
    ord("u"): lambda r: r.set_items(r.since_mark()),
    # names and objects
    ord("c"): lambda r: r.name(r.line(), r.line()),
    0x93: lambda r: r.name(*[r.stack.pop(), r.stack.pop()][::-1]),  # STACK_GLOBAL
    ord("R"): lambda r: r.make(),
    0x81: lambda r: r.make(),  # NEWOBJ
    ord("b"): lambda r: r.build(),
    # the memo
    0x94: lambda r: r.memoize(len(r.memo)),  # MEMOIZE
    ord("q"): lambda r: r.memoize(r.byte()),
    ord("r"): lambda r: r.memoize(r.number("<I")),
    ord("h"): _pushes(lambda r: r.memo[r.byte()]),
    ord("j"): _pushes(lambda r: r.memo[r.number("<I")]),
}
