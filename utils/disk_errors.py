"""Errors of a disk: told from others, and as refusals of a run that is about to start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from utils.errors import ConfigError

# How Rust prints a system error. tokenizers raises it as a plain Exception, safetensors as its own class.
_OF_RUST = re.compile(r"([^:()]+) \(os error \d+\)")


def disk_refusal(error: BaseException) -> str | None:
    """The system's words in an OSError or in an error from Rust; None for any other error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = _OF_RUST.search(str(error))
    return found[1].strip() if found else None


@contextmanager
def refused_by_disk(flag: str, place: Path) -> Iterator[None]:
    """A context whose OSErrors are ConfigErrors of one line.

    Args:
        place: named if the error names no file.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{flag}: {error.filename or place} cannot be read or written ({error.strerror or error}); mend that, and "
            "give the same command"
        ) from error
