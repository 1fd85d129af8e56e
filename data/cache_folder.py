"""The folder in which Hugging Face's datasets keeps rows and tokens, and what is said if it cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path

import datasets

from utils.errors import ConfigError

_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOLCK)


def cache_folder() -> Path:
    """The folder in HF_DATASETS_CACHE, or one below HF_HOME."""
    return Path(datasets.config.HF_DATASETS_CACHE)


def not_kept(error: BaseException, what: str = "rows and tokens") -> ConfigError | None:
    """The refusal, if this error, or its cause, is of a cache that cannot be written; None for any other."""
    cause, folder = error.__cause__ or error, cache_folder()
    if not isinstance(cause, OSError):
        return None
    path = Path(str(cause.filename))
    is_full = cause.errno is None and str(cause).startswith("Not enough disk space")  # datasets has looked before
    if not (is_full or cause.errno in _OF_WRITING or folder in (path, *path.parents) or path in folder.parents):
        return None
    reason = "No space left on device" if is_full else cause.strerror or cause
    return ConfigError(
        f"{what} cannot be kept in {folder} ({reason}); make room there, or name another "
        "place with the variable HF_DATASETS_CACHE"
    )
