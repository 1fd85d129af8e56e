"""The tensors of a checkpoint of any kind: names, shapes and dtypes at once, values one at a time.

No code from the files is run, no process group is needed, and one tensor at a time is held in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from checkpointing.tensor_files import TensorFiles
from policies.weights.stored import Entry
from run_folder.checkpoint_folder import tensor_files
from utils.errors import ConfigError

_PREFIX = "model."  # of the names of the model's tensors; the optimizer's begin with `optimizer.`


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


class CheckpointTensors(ReadTensors):
    """The model's tensors, `model.NAME`, of a checkpoint that any number of ranks wrote.

    Raises:
        ConfigError: if it cannot be trusted, is not complete, or holds no such keys.
    """

    def __init__(self, folder: Path) -> None:
        self._state = _open_shards(folder)
        kinds = self._state.kinds.items()
        self.index = {name.removeprefix(_PREFIX): entry for name, entry in kinds if name.startswith(_PREFIX)}
        if not self.index:
            raise ConfigError(f"{folder} holds no tensors named {_PREFIX}*; is this a checkpoint of a model?")
        self.files = self._state.files_of(_PREFIX)

    def read(self, name: str) -> torch.Tensor:
        return self._state.read(_PREFIX + name)


class _Shards(Protocol):
    kinds: dict[str, Entry]

    def files_of(self, prefix: str) -> list[Path]: ...

    def read(self, name: str) -> torch.Tensor: ...


def _open_shards(folder: Path) -> _Shards:
    if paths := tensor_files(folder):
        try:
            return TensorFiles(paths)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from error
    from checkpointing.old_format.state import DcpState

    return DcpState(folder)
