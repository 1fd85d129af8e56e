"""Tells a disk that refuses a file from other errors."""

from __future__ import annotations

import re

# How Rust prints a system error. tokenizers raises it as a plain Exception, safetensors as its own class.
_OF_RUST = re.compile(r"([^:()]+) \(os error \d+\)")


def disk_refusal(error: BaseException) -> str | None:
    """The system's words in an OSError or in an error from Rust; None for any other error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = _OF_RUST.search(str(error))
    return found[1].strip() if found else None
