"""Checkpoints of versions before safetensors: a folder of torch.distributed.checkpoint, or `state.pt` of torch.save."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from checkpointing.old_format.safe_reader import SafeFileSystemReader, load_tensors
from policies.weights.sources import keep_part
from policies.weights.stored import Entry
from run_folder.checkpoint_folder import OLD_FULL_FILE
from utils.errors import ConfigError


def open_old_state(folder: Path) -> DcpState | PtState:
    """The tensors of a checkpoint's folder.

    Raises:
        ConfigError: if it is damaged.
    """
    return PtState(folder / OLD_FULL_FILE) if (folder / OLD_FULL_FILE).is_file() else DcpState(folder)


class DcpState:
    """A folder of torch.distributed.checkpoint, of which each rank reads what it needs, without asking the others."""

    def __init__(self, folder: Path) -> None:
        self._reader = SafeFileSystemReader(folder)
        metadata = self._reader.read_metadata()
        entries = metadata.state_dict_metadata.items()
        self._chunks = {name: entry.chunks for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self.kinds = {
            name: Entry(tuple(entry.size), entry.properties.dtype)
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }

    def files_of(self, prefix: str) -> list[Path]:
        """The files that hold tensors whose names begin so."""
        metadata = self._reader.read_metadata()
        places = metadata.storage_data.items()
        names = {place.relative_path for key, place in places if key.fqn in self.kinds and key.fqn.startswith(prefix)}
        return sorted(Path(self._reader.path) / name for name in names)

    def read(self, name: str) -> torch.Tensor:
        entry = self.kinds[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in self._chunks[name]:
            part = self._reader.read_part(MetadataIndex(name, chunk.offsets))
            if part.shape != chunk.sizes or part.dtype != entry.dtype:
                raise ConfigError(f"{self._reader.path}: a part of {name} is not what the index says; copy it again")
            if chunk.sizes == tensor.shape:
                return part
            ranges = zip(chunk.offsets, chunk.sizes, strict=True)
            tensor[tuple(slice(offset, offset + size) for offset, size in ranges)] = part
        return tensor

    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
                dcp.load(dict(targets), storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # a BaseException with the tracebacks of all ranks
            cause, _ = next(iter(error.failures.values()))
            raise ConfigError(str(cause) or type(cause).__name__) from error


class PtState:
    """A file of torch.save, of which each rank reads its slices."""

    def __init__(self, path: Path) -> None:
        self._tensors = load_tensors(path)
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                raise ConfigError(f"{path.name}: {name} is no tensor with its values; copy the checkpoint again")
        self.kinds = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[name].contiguous()
        return tensor

    @torch.no_grad()
    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            keep_part(target, self._tensors[name])
