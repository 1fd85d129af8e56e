"""The index of a folder of torch.distributed.checkpoint: `.metadata`, a pickle, read without unpickling it.

What it says is taken field by field, checked, and put into torch's classes here. So a forged index can only be another
index, of files in its own folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.old_format.inert_pickle import PickledDict, PickledName, PickledObject, read_inert
from utils.errors import ConfigError
from utils.inside import is_inside

_TORCH = "torch.distributed.checkpoint"
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {
    f"{_TORCH}.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    # Written by torch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    f"{_TORCH}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "collections": {"OrderedDict"},
    "torch": {"Size", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    # The folder where the checkpoint was saved; pathlib._local in Python 3.13.
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}
_MAX_DIMENSIONS = 64
_MAX_INDEX_BYTES = 2**31
_LEAST_PART_BYTES = 16  # of the index; a part takes more


def read_index(folder: Path) -> Metadata:
    """The index of all tensors. Every place that it names is checked against the files.

    Raises:
        ConfigError: if it is missing, damaged or forged, or if a file is missing or cut off.
    """
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_INDEX_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no .metadata, so it is no sharded checkpoint; give one's folder") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error})") from error
    try:
        index = _as_metadata(read_inert(data, _is_name_of_an_index, "an index of tensors"), len(data))
        _check_places(index, folder)
    except ValueError as error:
        raise ConfigError(f"{path} is refused: {error}; copy the checkpoint again") from error
    return index


def _is_name_of_an_index(name: PickledName) -> bool:
    return name.name in _NAMES.get(name.module, ())


def _as_metadata(read: Any, num_bytes: int) -> Metadata:
    fields = _fields(read, "Metadata")
    storage_data = {}
    for key, value in _pairs(fields.get("storage_data"), "storage_data"):
        storage_data[_index_of(key)] = _place(value)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    # A list that many tensors share would cost more to take over than its bytes.
    parts_left = num_bytes // _LEAST_PART_BYTES
    for name, value in _pairs(fields.get("state_dict_metadata"), "state_dict_metadata"):
        entry = entries[_text(name)] = _entry(value, parts_left)
        parts_left -= len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1
    return Metadata(entries, storage_data=storage_data, storage_meta=StorageMeta())


def _entry(value: Any, parts_left: int) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is_made_by(value, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list) or len(chunks) > parts_left:
        raise ValueError("it has no list of a tensor's parts, or more parts than it has room for")
    parts = [_fields(chunk, "ChunkStorageMetadata") for chunk in chunks]
    return TensorStorageMetadata(
        TensorProperties(dtype=_dtype(fields.get("properties"))),
        _size(fields.get("size")),
        [ChunkStorageMetadata(_size(part.get("offsets")), _size(part.get("sizes"))) for part in parts],
    )


def _dtype(properties: Any) -> torch.dtype:
    """The dtype, which is first in the state. The rest (layout, pinning and the like) does not change values."""
    state = properties.state if _is_made_by(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, PickledName) or dtype.module != "torch" or dtype.name not in _DTYPES:
        raise ValueError("it does not say the dtype of a tensor")
    return _DTYPES[dtype.name]


def _index_of(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields.get("fqn")),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _place(value: Any) -> _StorageInfo:
    fields = _fields(value, "_StorageInfo")
    transforms = fields.get("transform_descriptors")
    if transforms is not None and not (isinstance(transforms, list | tuple) and len(transforms) < _MAX_DIMENSIONS):
        raise ValueError("it does not say how a part is stored")
    return _StorageInfo(
        _text(fields.get("relative_path")),
        _count(fields.get("offset")),
        _count(fields.get("length")),
        None if transforms is None else [_text(transform) for transform in transforms],
    )


def _is_made_by(value: Any, name: str) -> bool:
    return isinstance(value, PickledObject) and value.made_by.name == name


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not _is_made_by(value, name) or value.arguments:
        raise ValueError(f"it is not an index of tensors (a {name} is missing)")
    return {_text(key): field for key, field in _pairs(value.state, name)}


def _pairs(value: Any, what: str) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, PickledDict):
        raise ValueError(f"it is not an index of tensors ({what} is missing)")
    return iter(value.pairs)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it is not an index of tensors (a name is missing)")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("it is not an index of tensors (a number is missing, or is none that a file can have)")
    return value


def _size(value: Any) -> torch.Size:
    sizes = value.arguments[0] if _is_made_by(value, "Size") and len(value.arguments) == 1 else None
    if not isinstance(sizes, tuple | list) or len(sizes) > _MAX_DIMENSIONS:
        raise ValueError("it is not an index of tensors (a shape is missing)")
    return torch.Size([_count(size) for size in sizes])


def _check_places(index: Metadata, folder: Path) -> None:
    """Check that the parts of every tensor make it up, and that each lies inside the folder, in a file long enough."""
    sizes: dict[str, int] = {}
    for place in index.storage_data.values():
        name, end = place.relative_path, place.offset + place.length
        if name not in sizes:
            sizes[name] = _size_of_file(folder, name)
        if end > sizes[name]:
            raise ConfigError(
                f"{folder}: {name} is cut off at {sizes[name]} bytes, and {end} are needed; copy the whole folder again"
            )
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        for chunk in entry.chunks:
            place = index.storage_data.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                raise ValueError(f"it does not say where a part of {name} is stored")
            _check_part(name, chunk, place, entry)
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise ValueError(f"the parts of {name} do not make up the whole")


def _check_part(name: str, chunk: ChunkStorageMetadata, place: _StorageInfo, entry: TensorStorageMetadata) -> None:
    """Refuse a part outside of its tensor, and one that would need more memory than it has bytes on the disk."""
    if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
        raise ValueError(f"a part of {name} has not the tensor's number of dimensions")
    num_elements = math.prod(chunk.sizes)
    ends = (offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
    if num_elements and any(end > whole for end, whole in zip(ends, entry.size, strict=True)):
        raise ValueError(f"a part of {name} is outside of it")
    if not place.transform_descriptors and num_elements * entry.properties.dtype.itemsize > place.length:
        raise ValueError(f"a part of {name} is said to be larger than what is stored of it")


def _size_of_file(folder: Path, name: str) -> int:
    """Bytes of a file, which must lie in the folder itself: neither a path nor a link may lead to another one's."""
    if PurePosixPath(name).name != name or not is_inside(folder, name):
        raise ValueError(f"it leads to {name[:200]!r}, outside the folder")
    file = folder / name
    if not file.is_file():
        raise ConfigError(f"{folder}: {name} is missing; copy the whole folder again")
    return file.stat().st_size
