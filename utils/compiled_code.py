"""The folder in which compiled code is kept for later starts: that of torch, of Triton and of flash-attn-4.

Left to themselves, torch and flash-attn-4 write below /tmp. A reboot empties that, and often the end of a job or of a
container; and another user may have made the folder of that name first.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from utils.errors import ConfigError

_PLACES = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention_4",
}
"""Variables that these libraries read, and folders within that of the project."""


def keep_compiled_code() -> str | None:
    """Let compiled code be kept in the user's cache folder, as far as no variable names another place.

    Call it before torch and transformers are imported: they import torch._dynamo, which makes its folder at once, and
    names it in the variable. It may be called again, for the line.

    Returns:
        A line to print if it cannot be kept there; then each library writes where it does by default.

    Raises:
        ConfigError: if the user named a folder that cannot be made, without which torch._dynamo cannot be imported.
    """
    _make_named_folder("TORCHINDUCTOR_CACHE_DIR")
    unset = [name for name in _PLACES if not os.environ.get(name)]
    if not unset:
        return None
    try:
        folder = user_cache_folder() / "finetuning"
        _check_usable(folder)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        where = getattr(error, "filename", None) or "the user's cache folder"
        for name in unset:
            os.environ.pop(name, None)  # torch takes an empty one for the working directory
        lost = "compiled code may be lost before the next start"
        return f"{lost}: it cannot be kept in {where} ({why}); set XDG_CACHE_HOME"
    os.environ.update({name: str(folder / _PLACES[name]) for name in unset})
    return None


def _make_named_folder(name: str) -> None:
    if folder := os.environ.get(name):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{name}: {folder} cannot be made ({error.strerror}), and torch needs it; name a folder that can, or "
                "leave the variable out"
            ) from error


def user_cache_folder() -> Path:
    """XDG_CACHE_HOME, or ~/.cache.

    Raises:
        RuntimeError: if the user has no home.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"  # the standard ignores relative ones


def _check_usable(folder: Path) -> None:
    """Make it, and lock a file there, as torch does; some network file systems cannot.

    Raises:
        OSError: if it cannot be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(error.errno, f"files cannot be locked: {error.strerror}", str(folder)) from error
