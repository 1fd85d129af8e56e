"""Read a folder of torch.distributed.checkpoint without running code from it.

torch reads `.metadata` with pickle, and entries that are not tensors with `torch.load(weights_only=False)`, so a forged
folder could run anything. Here the index may only name the classes that such an index consists of, and entries that are
not tensors are never read.
"""

from __future__ import annotations

import collections
import pathlib
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded_tensor
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from utils.errors import ConfigError

_CLASSES = {
    metadata: (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    sharded_tensor: ("TensorProperties", "MEM_FORMAT_ENCODING"),  # what torch before 2.3 wrote
    filesystem: ("_StorageInfo", "_StoragePrefix"),
    collections: ("OrderedDict",),
    torch: ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    torch.serialization: ("_get_layout",),  # from a layout's name to the layout
    # The folder where the checkpoint was saved.
    pathlib: ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}
_ALLOWED: dict[tuple[str, str], Any] = {
    (module.__name__, name): getattr(module, name) for module, names in _CLASSES.items() for name in names
}
_ALLOWED |= {("pathlib._local", name): getattr(pathlib, name) for name in _CLASSES[pathlib]}  # Python 3.13


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index of tensors needs")
        return _ALLOWED[module, name]


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
            self._metadata = _read_index(Path(self.path))
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

    def read_part(self, index: metadata.MetadataIndex) -> torch.Tensor:
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
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{path}: {index.fqn} cannot be read ({reason}); copy the folder again") from error
        if not torch.is_tensor(part):
            raise ConfigError(f"{path}: {index.fqn} is not a tensor; copy the folder again")
        return part


def _read_index(folder: Path) -> Metadata:
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            index = _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no .metadata, so it is no sharded checkpoint; give one's folder") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error})") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise ConfigError(f"{path} is refused: {error or type(error).__name__}; copy the checkpoint again") from error
    try:
        _check_places(index, folder)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is refused: it is not an index of tensors ({error})") from error
    index.storage_meta = getattr(index, "storage_meta", None) or StorageMeta()
    return index


def _check_places(index: Metadata, folder: Path) -> None:
    """Check that every part of every tensor lies inside the folder, in a file that is long enough."""
    sizes: dict[str, int] = {}
    for place in index.storage_data.values():
        name, offset, length = place.relative_path, place.offset, place.length
        if PurePosixPath(name).name != name or name == ".." or min(offset, length) < 0:
            raise ValueError(f"it leads to {name!r}, outside the folder")
        if name not in sizes:
            file = folder / name
            if not file.is_file():
                raise ConfigError(f"{folder}: {name} is missing; copy the whole folder again")
            sizes[name] = file.stat().st_size
        if offset + length > sizes[name]:
            raise ConfigError(
                f"{folder}: {name} is cut off at {sizes[name]} bytes, and {offset + length} are needed; "
                "copy the whole folder again"
            )
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            for chunk in entry.chunks:
                if metadata.MetadataIndex(name, chunk.offsets) not in index.storage_data:
                    raise ValueError(f"it says of a part of {name} not where it is")
