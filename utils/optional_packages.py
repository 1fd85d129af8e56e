"""Packages that only some runs need: whether they are there, and imports if a setting asks for them, not before."""

from __future__ import annotations

from importlib import import_module, metadata
from types import ModuleType

from utils.errors import ConfigError, in_one_line


def is_installed(package: str) -> bool:
    """Whether a package of that name on PyPI is installed. It is not imported."""
    return any(True for _ in metadata.distributions(name=package))


def import_optional(module: str, needed: str, remedy: str) -> ModuleType:
    """The module of an optional package.

    Args:
        needed, remedy: the beginning and the end of the refusal; what is wrong with the package stands between them.

    Raises:
        ConfigError: if it is not installed, or cannot be imported.
    """
    try:
        return import_module(module)
    except Exception as error:  # a library that does not fit this machine may raise anything
        reason = "it is not installed" if isinstance(error, ModuleNotFoundError) else in_one_line(error)
        raise ConfigError(f"{needed} ({reason}); {remedy}") from error


def import_torchao(flag: str) -> ModuleType:
    """torchao's float8 training, for the flag that needs it.

    Raises:
        ConfigError: as `import_optional`.
    """
    return import_optional(
        "torchao.float8", f"{flag}: needs torchao", "pip install -r requirements-float8.txt, or leave the flag out"
    )


def import_bitsandbytes(flag: str) -> ModuleType:
    """bitsandbytes, which looks for a GPU's libraries, for the flag that needs it.

    Raises:
        ConfigError: as `import_optional`.
    """
    return import_optional(
        "bitsandbytes", f"{flag}: needs bitsandbytes", "pip install 'bitsandbytes>=0.50', or leave the flag out"
    )
