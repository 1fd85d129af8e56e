"""The tensors of a checkpoint of any kind: names, shapes and dtypes at once, values one at a time.

No code from the files is run, no process group is needed, and only the tensor that is asked for is held in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from checkpointing.safe_reader import SafeFileSystemReader, load_tensors
from policies.weights.stored import Entry
from utils.errors import ConfigError

_PREFIX = "model."  # of the names of the model's tensors; the optimizer's begin with `optimizer.`
_REMAP_BYTES = 64 << 20  # the pages read of a mapped file count as this process's memory until it is mapped anew


class StoredTensors(Protocol):
    """A model's tensors, by their names in the model."""

    index: dict[str, Entry]
    files: list[Path]  # the files that hold them

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own on the CPU."""

    def are_equal(self, name: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two tensors have the same values in this dtype."""


class ReadTensors:
    """Tensors that are compared by reading them."""

    index: dict[str, Entry]

    def read(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def are_equal(self, name: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two tensors have the same values in this dtype."""
        if self.index[name].shape != self.index[other].shape:
            return False
        return torch.equal(self.read(name).to(dtype), self.read(other).to(dtype))


class ShardedTensors(ReadTensors):
    """A folder of torch.distributed.checkpoint with keys `model.NAME`, saved by any number of ranks.

    Raises:
        ConfigError: if it cannot be trusted, is not complete, or holds no such keys.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = SafeFileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self.index: dict[str, Entry] = {}
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if not key.startswith(_PREFIX) or not isinstance(entry, TensorStorageMetadata):
                continue
            self.index[key.removeprefix(_PREFIX)] = Entry(tuple(entry.size), entry.properties.dtype)
            self._chunks[key.removeprefix(_PREFIX)] = entry.chunks
        if not self.index:
            raise ConfigError(f"{folder} holds no tensors named {_PREFIX}*; is this a checkpoint of a model?")
        places = metadata.storage_data.items()
        names = {place.relative_path for key, place in places if key.fqn.removeprefix(_PREFIX) in self.index}
        self.files = sorted(folder / name for name in names)

    def read(self, name: str) -> torch.Tensor:
        entry = self.index[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in self._chunks[name]:
            part = self._reader.read_part(MetadataIndex(_PREFIX + name, chunk.offsets))
            if part.shape != chunk.sizes or part.dtype != entry.dtype:
                raise ConfigError(f"{self._reader.path}: a part of {name} is not what the index says; copy it again")
            if chunk.sizes == tensor.shape:
                return part
            ranges = zip(chunk.offsets, chunk.sizes, strict=True)
            tensor[tuple(slice(offset, offset + size) for offset, size in ranges)] = part
        return tensor


class PickledTensors(ReadTensors):
    """A file of `torch.save` that holds one flat dict of tensors.

    Args:
        prefix: of the keys that are the model's: "model." in our `state.pt`, "" in a model's own state_dict.

    Raises:
        ConfigError: if it is damaged, or holds anything but tensors and plain values.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.files, self._path, self._prefix = [path], path, prefix
        self._map()
        names = [key.removeprefix(prefix) for key in self._mapped if key.startswith(prefix)]
        if not names:
            raise ConfigError(f"{path} holds no tensors named {prefix}*; give the state_dict of a model")
        mapped = {name: self._mapped[prefix + name] for name in names}
        self.index = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in mapped.items()}

    def _map(self) -> None:
        self._mapped = {name: t for name, t in load_tensors(self._path).items() if torch.is_tensor(t)}
        self._num_read = 0

    def read(self, name: str) -> torch.Tensor:
        if self._num_read > _REMAP_BYTES:
            self._mapped.clear()
            self._map()
        tensor = self._mapped[self._prefix + name].clone(memory_format=torch.contiguous_format)
        self._num_read += tensor.nbytes
        return tensor
