"""The Hugging Face hub: a quick check of a name, before a library retries for most of a minute; short errors."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache

from utils.errors import ConfigError, in_one_line

TIMEOUT_SECONDS = 10.0
_MAY_BE_A_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def check_on_hub(flag: str, name: str, kind: str) -> None:
    """Refuse a name that is neither in the local cache nor on the hub, or if the hub does not answer.

    Args:
        flag: the flag that gave the name, for the message.
        kind: "model" or "dataset".
        name: not a folder here; perhaps a mistaken path.

    Raises:
        ConfigError: with the hub's reason. The hub is not asked for anything that cannot be a name.
    """
    path = Path(name).expanduser().absolute()
    if path.is_file():
        raise ConfigError(f"{flag}: {path} is a file; give its folder, {path.parent}")
    if not _MAY_BE_A_NAME.fullmatch(name):
        raise ConfigError(f"{flag}: there is no folder {path}")
    try:
        if _is_cached(name, kind):
            return
        api = HfApi()
        (api.model_info if kind == "model" else api.dataset_info)(name, timeout=TIMEOUT_SECONDS)
    except Exception as error:
        raise ConfigError(
            f"{flag}: {name!r} is no folder here, and the hub does not give it ({explain(error)})"
        ) from error


def explain(error: Exception) -> str:
    """A library's error in a few words; for some errors the remedy alone."""
    if "trust_remote_code" in str(error):
        return "it needs code that came with it; if you trust that code, give --trust_remote_code"
    if "backend tokenizer" in str(error):  # transformers lists what it would take, for some lines
        return "it has no tokenizer.json, and no other tokenizer's file that can be converted"
    return f"{type(error).__name__}: {in_one_line(error)}"


def _is_cached(name: str, kind: str) -> bool:
    if kind == "model":
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    import datasets  # takes a second; a name of a model does not need it

    return (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()
