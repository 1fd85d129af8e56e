"""Read another tool's file as text values by key, each with its line. Nothing in it is guessed or run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from utils.errors import ConfigError
from utils.small_files import read_text

_MOST_BYTES = 2**20
_NULLS = ("", "~", "null", "Null", "NULL")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_DEEPEST = 50
_OPEN = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSE = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
_MOST_REFERENCES = 10  # in a row: torchtune's files have one or two

Tree = dict[str, Any]
"""Values by name: text as it is written, None, a list, or another Tree."""


@dataclass(frozen=True)
class Source:
    """A file, or a command line, of another tool.

    Attributes:
        name: what messages call it.
        folder: where its own relative paths may begin, besides the working directory.
        lines: by key, as `model.lora_rank` or `datasets[0].path`; a command line has none.
    """

    name: str
    folder: Path
    tree: Tree
    lines: dict[str, int]

    def where(self, key: str) -> str:
        """The beginning of a message about this key."""
        line = f"line {self.lines[key]}: " if key in self.lines else ""
        return f"{self.name}: {line}{key}"

    def leaves(self, key: str = "") -> list[str]:
        """The keys of all values at or below a key. A list of plain values is one."""
        return list(_leaves(self.tree if not key else self.value(key), key))

    def value(self, key: str) -> Any:
        """The value of a key; None if it is not there, too."""
        found: Any = self.tree
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key):
            if name:
                found = found.get(name) if isinstance(found, dict) else None
            else:
                found = found[int(index)] if isinstance(found, list) and int(index) < len(found) else None
        return found


def below(key: str, name: str) -> str:
    """The key of a name in the mapping of a key; "" is the whole file."""
    return f"{key}.{name}" if key else name


def is_list_of_text(value: Any) -> bool:
    """Whether it is a list of plain values."""
    return isinstance(value, list) and all(one is None or isinstance(one, str) for one in value)


def _leaves(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from _leaves(one, below(key, name))
    elif isinstance(value, list) and not is_list_of_text(value):
        for index, one in enumerate(value):
            yield from _leaves(one, f"{key}[{index}]")
    elif key:
        yield key


def read_source(path: Path) -> Source:
    """The file's values.

    Raises:
        ConfigError: if it cannot be read, is no YAML mapping, or has anchors, dotted keys or a key twice.
    """
    name = str(path)
    try:
        text = read_text(path.expanduser(), most_bytes=_MOST_BYTES)
        depth = 0
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            depth += isinstance(token, _OPEN) - isinstance(token, _CLOSE)
            if depth > _DEEPEST:
                raise ConfigError(f"{name}: is nested too deeply; no training tool's file is")
            if isinstance(token, yaml.AnchorToken | yaml.AliasToken | yaml.TagToken):
                raise ConfigError(f"{name}: line {token.start_mark.line + 1}: {_WRITE_OUT[type(token)]}")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise ConfigError(f"{name}: is not a text file; give the path of a YAML file") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{name}: {line}not valid YAML ({error.problem}); mend it") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML ({' '.join(str(error).split())}); mend it") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}: holds no settings; give a file of NAME: VALUE lines")
    lines: dict[str, int] = {}
    return Source(name, path.expanduser().parent, _mapping(root, "", name, lines), lines)


_WRITE_OUT = {
    yaml.AnchorToken: "a YAML anchor (&NAME); write the value out where it is used",
    yaml.AliasToken: "a YAML alias (*NAME); write the value out here",
    yaml.TagToken: "a YAML tag (!NAME); write a plain value",
}


def _mapping(node: yaml.MappingNode, key: str, name: str, lines: dict[str, int]) -> Tree:
    found: Tree = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
            raise ConfigError(f"{name}: line {line}: a name is missing; write NAME: VALUE")
        spelled = key_node.value
        if re.search(r"[.\[\]]", spelled):
            raise ConfigError(f"{name}: line {line}: {spelled!r}: a name with a dot; write it nested, one name a line")
        if not spelled.isprintable():
            raise ConfigError(f"{name}: line {line}: {spelled!r}: a name is one line of text; mend it")
        if spelled in found:
            raise ConfigError(f"{name}: line {line}: {below(key, spelled)}: given twice; leave one of them out")
        found[spelled] = _value(value, below(key, spelled), name, lines)
        lines[below(key, spelled)] = line
    return found


def _value(node: yaml.Node, key: str, name: str, lines: dict[str, int]) -> Any:
    lines.setdefault(key, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, key, name, lines)
    if isinstance(node, yaml.SequenceNode):
        return [_value(one, f"{key}[{index}]", name, lines) for index, one in enumerate(node.value)]
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return None if is_plain and node.value in _NULLS else node.value


def with_references(source: Source) -> Source:
    """The file with the value of `KEY` in place of each `${KEY}`, as OmegaConf reads torchtune's.

    Raises:
        ConfigError: if there is no such key, or it refers to itself.
    """

    def filled(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: filled(one, below(key, name)) for name, one in value.items()}
        if isinstance(value, list):
            return [filled(one, f"{key}[{index}]") for index, one in enumerate(value)]
        for _ in range(_MOST_REFERENCES):
            if not isinstance(value, str) or not (found := _REFERENCE.search(value)):
                return value
            meant = source.value(found[1])
            if not isinstance(meant, str):
                raise ConfigError(f"{source.where(key)}: {found[0]} names no plain value of this file; write it out")
            value = value.replace(found[0], meant)
        raise ConfigError(f"{source.where(key)}: its ${{...}} refer to each other; write the value out")

    return replace(source, tree=filled(source.tree, ""))
