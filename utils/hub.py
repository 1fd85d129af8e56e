"""One quick question to the Hugging Face hub, before a library asks it for most of a minute."""

from __future__ import annotations

from pathlib import Path

import datasets
from huggingface_hub import HfApi, try_to_load_from_cache

from configs.errors import ConfigError

TIMEOUT_SECONDS = 10.0


def check_on_hub(flag: str, name: str, kind: str) -> None:
    """Refuse a name that is neither in the local cache nor on a hub that answers.

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
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{flag}: {name!r} is no folder here, and the hub does not give it ({reason})") from error


def _is_cached(name: str, kind: str) -> bool:
    if kind == "model":
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    return (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()
