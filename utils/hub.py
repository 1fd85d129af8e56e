"""The Hugging Face hub: one quick question before a library retries for most of a minute; its errors in short."""

from __future__ import annotations

from pathlib import Path

import datasets
from huggingface_hub import HfApi, try_to_load_from_cache

from utils.errors import ConfigError, in_one_line

TIMEOUT_SECONDS = 10.0


def check_on_hub(flag: str, name: str, kind: str) -> None:
    """Refuse a name that is neither in the local cache nor on the hub, or if the hub does not answer.

    Args:
        flag: the flag that gave the name, for the message. kind: "model" or "dataset".

    Raises:
        ConfigError: with the hub's reason.
    """
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
    """A library's error in a few words; for some only what to do."""
    if "trust_remote_code" in str(error):
        return "it needs code that came with it; if you trust that code, give --trust_remote_code"
    return f"{type(error).__name__}: {in_one_line(error)}"


def _is_cached(name: str, kind: str) -> bool:
    if kind == "model":
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    return (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()
