"""Read the recipe (the YAML file of --config) as raw strings, so that values are parsed like those of flags."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import yaml

from configs.names import find
from configs.run import SECTIONS, RunConfig
from utils.errors import ConfigError
from utils.small_files import read_text

RECIPES = Path(__file__).parent / "recipes"
"""The shipped recipes; --config takes their names for their paths."""

_MOST_BYTES = 2**20
Raw = str | list[str]


@cache
def recipe_names() -> tuple[str, ...]:
    """The names of the shipped recipes, those of subfolders like `litgpt/lora_bf16_4x4`, in order."""
    found = (path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))
    return tuple(sorted(found, key=lambda name: ("/" in name, name)))


def find_recipe(given: str) -> str:
    """The path of a recipe, given as a path or as the name of a shipped one; a file of that name goes first.

    Raises:
        ConfigError: if it is a name, and of neither.
    """
    path = os.path.expanduser(given)
    if given in recipe_names() and not os.path.isfile(path):
        return str(RECIPES / f"{given}.yaml")
    if given.endswith((".yaml", ".yml")) or os.path.lexists(path):
        return given
    ends = {name.rpartition("/")[2]: name for name in reversed(recipe_names())}
    near = get_close_matches(given.lower(), recipe_names(), n=1) or get_close_matches(given.lower(), ends, n=1)
    hint = f"did you mean {ends.get(near[0], near[0])}?" if near else f"recipes are {', '.join(short_recipes())}"
    raise ConfigError(f"--config: {given!r} is neither a file nor the name of a recipe; {hint}")


def recipe_for(config: RunConfig) -> str:
    """The name of the shipped recipe for a causal model trained like this."""
    train = config.train_config
    if "text_dataset" in train.datasets:
        return "text"
    if not train.use_peft:
        return "full"
    if config.quantization_config.quantization == "4bit":
        return "chat_qlora"
    return "chat_lora" if "chat_dataset" in train.datasets else "instruct_lora"


def short_recipes() -> tuple[str, ...]:
    """The names of the shipped recipes that stand in no subfolder."""
    return tuple(name for name in recipe_names() if "/" not in name)


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
