"""Panics of libraries written in Rust, as errors: pyo3 raises them past every `except Exception`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RustPanicError(Exception):
    """A library's Rust code gave up."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RustPanicError if Rust code called inside of this panics. It has printed a line of its own by then."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a module that cannot be imported
            raise
        raise RustPanicError(f"its Rust code panicked: {error}") from error
