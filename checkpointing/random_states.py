"""A rank's random states in a checkpoint: one JSON file per rank."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpointing.marks import KEY
from run_folder.checkpoint_folder import rng_file
from utils.errors import ConfigError, in_one_line
from utils.seeding import checked_rng_state
from utils.small_files import parse_json, read_bytes


class RngFile(NamedTuple):
    """A file of random states and its contents."""

    name: str
    data: bytes


def rng_bytes(state: Mapping[str, Any], mark: Mapping[str, Any]) -> bytes:
    """The file of a result of `utils.seeding.rng_state`: tensors are lists of whole numbers.

    Args:
        mark: says which checkpoint the file belongs to (`checkpointing.marks`).
    """
    return json.dumps({KEY: mark, **state}, default=torch.Tensor.tolist).encode()


def find_rng_file(folder: Path, rank: int) -> RngFile | None:
    """The rank's file in a checkpoint of this or of an earlier version; None if it has none."""
    # .pt: of versions before safetensors.
    for path in (folder / rng_file(rank), folder / f"rng-{rank:05d}.pt"):
        if path.is_file():
            return RngFile(path.name, read_bytes(path))
    return None


def parse_rng_file(file: RngFile) -> dict[str, Any]:
    """The random states, checked.

    Raises:
        ConfigError: if the file is not what a run writes.
    """
    try:
        return checked_rng_state(_from_pt(file.data) if file.name.endswith(".pt") else _from_json(file.data))
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            f"{file.name} holds no random states ({in_one_line(error)}); copy the checkpoint again, or give another"
        ) from error


def _from_json(data: bytes) -> dict[str, Any]:
    try:
        state = parse_json(data)
        state.pop(KEY, None)
        tensors = {name: torch.tensor(state[name], dtype=torch.uint8) for name in ("torch", "cuda") if name in state}
        name, keys, *rest = state["numpy"]
        return state | tensors | {"numpy": [name, torch.tensor(keys, dtype=torch.int64), *rest]}
    except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _from_pt(data: bytes) -> dict[str, Any]:
    from checkpointing.old_format.safe_reader import load_tensors

    return load_tensors(io.BytesIO(data))
