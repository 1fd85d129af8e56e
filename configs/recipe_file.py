"""Read the recipe (the YAML file of --config) as raw strings, so that values are parsed like those of flags."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from configs.names import find
from configs.run import SECTIONS
from utils.errors import ConfigError
from utils.small_files import read_text

_MOST_BYTES = 2**20
Raw = str | list[str]


def read_recipe(path: str) -> list[tuple[str, Raw]]:
    """The names and raw values of a recipe, in the order of the file.

    A recipe is a mapping. Its keys are names as on the command line, bare or dotted, or sections with mappings.

    Raises:
        ConfigError: if the file cannot be read or is not such a mapping.
    """
    try:
        # Composed, not loaded: a dict would keep the last of two equal names, and both must be seen to refuse them.
        root = yaml.compose(read_text(Path(path).expanduser(), most_bytes=_MOST_BYTES), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}; give the path of a YAML file") from error
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise ConfigError(f"--config: {path!r} is not a text file; give the path of a YAML file") from error
    except RecursionError as error:
        raise ConfigError(f"--config: {path} is nested too deeply; write settings as NAME: VALUE lines") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config: {path} holds no settings; write them as NAME: VALUE lines")
    names = [key.value for key, _ in root.value]
    if "settings" in names and "command" in names:
        raise ConfigError(f"--config: {path} is a run's record, not a recipe; the `command` in it starts such a run")
    return list(_entries(root, "", path))


def _entries(mapping: yaml.MappingNode, section: str, path: str) -> Iterator[tuple[str, Raw]]:
    for key, value in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}: line {key.start_mark.line + 1}: a name is missing; write NAME: VALUE")
        name = section + key.value
        if isinstance(value, yaml.ScalarNode):
            yield name, value.value
        elif not section and name not in SECTIONS and not find(name.replace("-", "_")):
            yield name, ""  # an unknown name is refused later, whatever its value
        elif isinstance(value, yaml.SequenceNode):
            if not all(isinstance(item, yaml.ScalarNode) for item in value.value):
                raise ConfigError(f"{path}: {name}: an entry of the list is not a plain value; write it like [a, b]")
            yield name, [item.value for item in value.value]
        elif not section and name in SECTIONS:
            yield from _entries(value, f"{name}.", path)
        else:
            raise ConfigError(f"{path}: {name}: is not a group of settings; the groups are {', '.join(SECTIONS)}")
