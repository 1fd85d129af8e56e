"""The tensors of a file of `torch.save`: a model's state_dict, or `state.pt` of an earlier version's checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpointing.exporting.stored_tensors import ReadTensors
from checkpointing.old_format.safe_reader import load_tensors
from policies.weights.stored import Entry
from utils.errors import ConfigError

_REMAP_BYTES = 64 << 20  # the pages read of a mapped file count as this process's memory until it is mapped anew


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
