"""A model's safetensors files, written one tensor at a time and read back through the library."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open

from checkpointing.safetensors_format import bytes_of, header, ordered, write_all
from policies.weights.stored import Entry, read_entries
from utils.errors import ConfigError, TrainingError
from utils.wording import plural

MAX_FILE_SIZE = "5GB"
_BLOCK_BYTES = 64 << 20  # read back at a time


def write_model_files(
    folder: Path,
    entries: dict[str, Entry],
    read: Callable[[str], torch.Tensor],
    advance: Callable[[int], object],
    *,
    stem: str = "model",
    max_file_size: int | str = MAX_FILE_SIZE,
) -> dict[str, str]:
    """Write tensors into files of at most that size, with an index if there are several, as save_pretrained does.

    Args:
        read: returns a tensor by name, in the shape and dtype of its entry; it is freed once it is written.
        advance: called with the number of bytes written.

    Returns:
        The SHA-256 of each tensor's bytes in memory, for `check_model_files`.
    """
    # The library wants tensors, and looks at their sizes alone.
    empty = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in entries.items()}
    split = split_torch_state_dict_into_shards(
        empty, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=max_file_size
    )
    digests: dict[str, str] = {}
    for file_name, names in split.filename_to_tensors.items():
        in_file = ordered({name: entries[name] for name in names})
        with open(folder / file_name, "wb", buffering=0) as file:
            file.write(header(in_file, {}))
            for name, entry in in_file.items():
                tensor = read(name)
                if (tuple(tensor.shape), tensor.dtype) != tuple(entry):
                    raise TrainingError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {entry}, as was planned")
                bytes_ = bytes_of(tensor)
                digests[name] = hashlib.sha256(bytes_).hexdigest()
                write_all(file, bytes_, lambda block: advance(len(block)))
                del tensor, bytes_
            os.fsync(file.fileno())
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return digests


def check_model_files(
    folder: Path, entries: dict[str, Entry], digests: dict[str, str], advance: Callable[[int], object]
) -> None:
    """Read every tensor back through the safetensors library and compare it, bit for bit, with what was in memory.

    Raises:
        TrainingError: if a tensor is missing, differs, or is one too many.
    """
    found = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            for name, entry in read_entries(path).items():
                digest = hashlib.sha256()
                for block in _blocks(path, name, entry):
                    digest.update(bytes_of(block))
                    advance(block.nbytes)
                if entries.get(name) != entry or digests[name] != digest.hexdigest():
                    raise TrainingError(
                        f"{path.name}: {name} is not on disk what it was in memory; is the disk failing?"
                    )
                found.add(name)
        except ConfigError as error:
            raise TrainingError(f"what was written cannot be read back: {error}") from error
    if missing := sorted(set(entries) - found):
        raise TrainingError(f"{missing[0]} was not written (missing: {plural(len(missing), 'tensor')})")


def _blocks(path: Path, name: str, entry: Entry) -> Iterator[torch.Tensor]:
    """A tensor's rows, some at a time. The file is mapped anew for each tensor, so that its pages do not add up."""
    with safe_open(path, framework="pt") as file:
        if entry.nbytes <= _BLOCK_BYTES:
            yield file.get_tensor(name)
            return
        rows = file.get_slice(name)
        num_rows = max(1, _BLOCK_BYTES * entry.shape[0] // entry.nbytes)
        for first in range(0, entry.shape[0], num_rows):
            yield rows[first : first + num_rows]
