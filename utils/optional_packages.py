"""Packages that only some runs need: whether they are there, and imports once a setting asks for them."""

from __future__ import annotations

import re
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from utils.errors import ConfigError, in_one_line

_ROOT = Path(__file__).resolve().parents[1]


def is_installed(package: str) -> bool:
    """Whether a package is installed, by its name on PyPI. It is not imported."""
    return any(True for _ in metadata.distributions(name=package))


def requirement(package: str) -> str:
    """The package with its versions, as a requirements*.txt of this project has it: "wandb>=0.29,<0.40".

    Only these files hold versions. The bare name if none of them has the package.
    """
    for file in sorted(_ROOT.glob("requirements*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            text = line.partition("#")[0].strip()
            if re.match(r"[\w.-]*", text)[0] == package:  # type: ignore[index]
                return text
    return package


def check_installed(flag: str, package: str) -> None:
    """Refuse a flag whose package is not installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    # By its metadata: a folder of that name, such as W&B's own for its runs, can be imported, too.
    if not is_installed(package):
        raise ConfigError(f"{flag}: needs the package {package}; pip install '{requirement(package)}'")


def import_optional(module: str, needed: str, remedy: str) -> ModuleType:
    """The module of an optional package.

    Args:
        needed, remedy: the beginning and the end of the refusal, around the reason.

    Raises:
        ConfigError: if it is not installed, or cannot be imported.
    """
    try:
        return import_module(module)
    except Exception as error:  # a library that does not fit this machine may raise anything
        reason = "it is not installed" if isinstance(error, ModuleNotFoundError) else in_one_line(error)
        raise ConfigError(f"{needed} ({reason}); {remedy}") from error


def import_torchao(flag: str) -> ModuleType:
    """torchao's module for float8 training.

    Raises:
        ConfigError: as `import_optional`.
    """
    return import_optional(
        "torchao.float8", f"{flag}: needs torchao", "pip install -r requirements-float8.txt, or leave the flag out"
    )


def import_bitsandbytes(flag: str) -> ModuleType:
    """bitsandbytes. Importing it takes time: it looks for a GPU's libraries.

    Raises:
        ConfigError: as `import_optional`.
    """
    from utils.compat import without_inductor  # imports torch

    with without_inductor():
        return import_optional(
            "bitsandbytes",
            f"{flag}: needs bitsandbytes",
            f"pip install '{requirement('bitsandbytes')}', or leave the flag out",
        )
