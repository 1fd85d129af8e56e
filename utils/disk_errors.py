"""Tell a disk that refuses a file from other errors."""

from __future__ import annotations

import re

# How Rust writes an error of the system: tokenizers raises it as a plain Exception, safetensors as one of its own.
_OF_RUST = re.compile(r"([^:()]+) \(os error \d+\)")


def disk_refusal(error: BaseException) -> str | None:
    """The words of an OSError, or those of the system in an error of Rust's; None for any other."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = _OF_RUST.search(str(error))
    return found[1].strip() if found else None
