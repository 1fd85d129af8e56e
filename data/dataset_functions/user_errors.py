"""Errors out of a user's dataset file: which line of theirs it was, and the part of the traceback that is theirs."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetGenerationError

from utils.errors import ConfigError, in_one_line

RAISED = (Exception, SystemExit, KeyboardInterrupt)  # by a user's code; Ctrl-C raises none (supervision/exit_status.py)
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PROJECT = Path(__file__).resolve().parents[2]


def file_of(function: Callable[..., Any]) -> Path:
    """The file with a dataset function, even if something wraps it; an empty path if Python does not know it."""
    own = inspect.unwrap(getattr(function, "func", function))
    if code := getattr(own, "__code__", None):
        return Path(code.co_filename)
    module = sys.modules.get(getattr(own, "__module__", ""))  # of a class
    return Path(getattr(module, "__file__", None) or "")


def failed(what: str, error: BaseException, file: Path) -> ConfigError:
    """The refusal for an exception from code of this file: its reason and line, and below it the calls that led there.

    Args:
        what: was done, as the message begins.
    """
    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__  # what the user's generator raised
    frames = traceback.extract_tb(error.__traceback__)
    first = next((place for place, frame in enumerate(frames) if _is(frame, file)), len(frames))
    reason = f"{type(error).__name__}: {in_one_line(error)}"
    theirs = frames[first:]
    lines = [frame for frame in theirs if _is(frame, file) or not _is_of_others(frame)]
    if not lines:
        return ConfigError(f"{what}: {reason}")
    details = "".join(traceback.StackSummary.from_list(theirs).format())
    return ConfigError(f"{what}: {reason} ({lines[-1].filename}:{lines[-1].lineno})", details=f"{details}{reason}")


def _is(frame: traceback.FrameSummary, file: Path) -> bool:
    return Path(frame.filename) == file


def _is_of_others(frame: traceback.FrameSummary) -> bool:
    """Whether it is a library's or this project's."""
    path = Path(frame.filename)
    return not path.is_absolute() or any(path.is_relative_to(folder) for folder in (*_LIBRARIES, _PROJECT))
