"""Read a folder of torch.distributed.checkpoint without running code from it.

Earlier versions wrote such folders, and llama-recipes does. torch reads `.metadata` with pickle, and entries that are
not tensors with `torch.load(weights_only=False)`, so a forged folder could run anything. Here the index is read as
plain data (`tensor_index.py`), and entries that are not tensors are never read.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from checkpointing.old_format.tensor_index import read_index
from utils.errors import ConfigError, in_one_line


class SafeFileSystemReader(FileSystemReader):
    """A FileSystemReader for folders that need not be trusted. It reads `.metadata` once and keeps it.

    Call `read_metadata` before `dcp.load(state, storage_reader=reader)`: it raises ConfigError directly, while `load`
    wraps errors into CheckpointException, which is not an Exception.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._metadata = None

    def read_metadata(self, *_args: Any, **_settings: Any) -> Metadata:
        """The index of all tensors. Every place that it names is checked against the files.

        Raises:
            ConfigError: if it is missing, damaged or forged, or if a file is missing or cut off.
        """
        if self._metadata is None:
            self._metadata = read_index(Path(self.path))
        # As torch's own read_metadata does.
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors as torch does.

        Raises:
            ConfigError: if an entry is not a tensor; torch would unpickle it.
        """
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise ConfigError(
                    f"{self.path}: {item.storage_index.fqn} is not a tensor but a pickle, which is not read because it "
                    "could run code; is this a checkpoint of this model?"
                )
        return super().read_data(plan, planner)

    def read_part(self, index: MetadataIndex) -> torch.Tensor:
        """One stored part of a tensor, read from its file; `dcp.load` would hold it twice while copying it.

        Raises:
            ConfigError: if it is damaged.
        """
        place = self.read_metadata().storage_data[index]
        path = Path(self.path) / place.relative_path
        if getattr(place, "transform_descriptors", None):
            raise ConfigError(f"{path} is compressed; save the checkpoint without extensions of torch's writer")
        try:
            with open(path, "rb") as file:
                part: Any = torch.load(self._slice_file(file, place), map_location="cpu", weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"{path}: {index.fqn} cannot be read ({in_one_line(error)}); copy the folder again"
            ) from error
        if not torch.is_tensor(part):
            raise ConfigError(f"{path}: {index.fqn} is not a tensor; copy the folder again")
        return part


def load_tensors(path: Path | io.BytesIO) -> dict[str, Any]:
    """The dict that `torch.save` wrote into a file, its tensors mapped and not read. No code from it is run.

    Raises:
        ConfigError: if it is damaged, is no dict, or holds anything but tensors and plain values.
    """
    try:
        state = torch.load(path, map_location="cpu", mmap=isinstance(path, Path), weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise ConfigError(
            f"{path} cannot be read without running code from it, or is damaged ({in_one_line(error)}); "
            "give a file that torch.save made of the model's state_dict, of tensors alone"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ConfigError(f"{path} holds no tensors by their names; give the state_dict of a model")
    return state
