"""Python's bytecode of the libraries: whether it is there, or kept, and the user's cache folder for it if it is not."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from utils.compiled_code import user_cache_folder

FIRST_REAL_DATE = 631152000  # 1990: builders of images set the dates of all files to 1970 or 1980


def compiles_at_each_start(package: str) -> bool:
    """Whether a package has no bytecode, and none would be kept when it is imported. It is not imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or (bytecode := Path(cache_from_source(spec.origin))).exists():
        return False
    nearest = next(folder for folder in bytecode.parents if folder.exists())
    return sys.dont_write_bytecode or not os.access(nearest, os.W_OK)


def keep_bytecode(package: str = "torch") -> None:
    """Keep the bytecode of all modules in the user's cache folder if that of a package cannot be kept beside it.

    So in images whose packages were installed without it, for users who cannot write there, or under
    PYTHONDONTWRITEBYTECODE. Processes that this one starts do the same. Nothing changes if there is no such folder, or
    the user has named one (PYTHONPYCACHEPREFIX), or the files' dates would not tell a new version from an old one.
    """
    spec = find_spec(package)
    if sys.pycache_prefix is not None or spec is None or not compiles_at_each_start(package):
        return
    try:
        folder = user_cache_folder() / "finetuning" / "bytecode"
        folder.mkdir(parents=True, exist_ok=True)
        is_dated = os.stat(spec.origin or "").st_mtime >= FIRST_REAL_DATE
    except (OSError, RuntimeError):
        return
    if is_dated and os.access(folder, os.W_OK):
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
