"""Imports bitsandbytes if a flag asks for it, and not before, since it looks for a GPU's libraries."""

from __future__ import annotations

from types import ModuleType

from utils.errors import ConfigError, in_one_line


def import_bitsandbytes(flag: str) -> ModuleType:
    """The package, for the flag that needs it.

    Raises:
        ConfigError: if it is not installed, or cannot be imported.
    """
    try:
        import bitsandbytes
    except Exception as error:  # a library that does not fit this machine may raise anything
        reason = "it is not installed" if isinstance(error, ModuleNotFoundError) else in_one_line(error)
        raise ConfigError(
            f"{flag}: needs bitsandbytes ({reason}); pip install 'bitsandbytes>=0.50', or leave the flag out"
        ) from error
    return bitsandbytes
