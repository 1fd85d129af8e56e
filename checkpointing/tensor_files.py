"""A checkpoint's tensors in safetensors files: each rank writes one, and reads what it needs of any number of them.

A part's place in its whole tensor stands in the header under the names that torch.distributed.checkpoint gives it, so
torch's HuggingFaceStorageReader reads the files, too. Why torch's writer is not used: docs/decisions.md, "Checkpoints
are safetensors".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from checkpointing.safetensors_format import bytes_of, header, ordered, write_all
from policies.weights.sources import local_part
from policies.weights.stored import DTYPES, Entry
from run_folder.checkpoint_folder import FileEntry, RunningChecksum
from utils.errors import ConfigError
from utils.inside import is_inside
from utils.local_tensors import local_tensor

_PLACES = "DCP_SHARDING_INFO"  # torch's key; its value has {name: {"saved_offsets": [...]}}, to which we add the shape


class Part(NamedTuple):
    """A tensor, or the part of it that one rank writes."""

    values: torch.Tensor
    offset: tuple[int, ...]  # of its first element in the whole tensor
    whole: tuple[int, ...]  # the shape of the whole tensor


def parts_to_write(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """This rank's parts. Of copies on several ranks one is written, on the rank that has the least to write so far.

    Every rank must give the same names in the same order: each computes the same choice, without asking the others.
    """
    loads: dict[int, list[int]] = {}  # bytes of each copy, by the number of copies
    parts = {}
    for name, tensor in tensors.items():
        number, num_copies = _copy_number(tensor)
        load = loads.setdefault(num_copies, [0] * num_copies)
        writer = load.index(min(load))
        load[writer] += tensor.numel() * tensor.element_size()
        if number != writer:
            continue
        values, place = local_part(tensor)
        # A rank whose shard is empty writes no part, but a tensor without elements must not be missing.
        if values.numel() or not tensor.numel():
            parts[name] = Part(local_tensor(values), tuple(cut.start for cut in place), tuple(tensor.shape))
    return parts


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """All of the tensors, none of them sharded, as this rank's parts."""
    return {name: Part(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in tensors.items()}


def _copy_number(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of this rank's copy of its part, and the number of copies. A mesh has all ranks of the run."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank(), dist.get_world_size()
    coordinate, number, num_copies = tensor.device_mesh.get_coordinate(), 0, 1
    assert coordinate is not None
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(dim)
            number, num_copies = number * size + coordinate[dim], num_copies * size
    return number, num_copies


def write_tensors(path: Path, parts: Mapping[str, Part], metadata: Mapping[str, str] | None = None) -> FileEntry:
    """Write a file that is on the disk when this returns; one tensor at a time is copied from a GPU.

    Args:
        metadata: further entries of its header.
    """
    entries = ordered({name: Entry(tuple(part.values.shape), part.values.dtype) for name, part in parts.items()})
    places = {name: {"saved_offsets": parts[name].offset, "shape": parts[name].whole} for name in entries}
    found = RunningChecksum()
    with open(path, "wb", buffering=0) as file:
        own = {"DCP_VERSION": "1.0", _PLACES: json.dumps(places, separators=(",", ":"))}
        start = header(entries, own | dict(metadata or {}))
        write_all(file, memoryview(start), found.add)
        for name in entries:
            write_all(file, bytes_of(parts[name].values.cpu()), found.add)
        os.fsync(file.fileno())
    return found.entry()


class _StoredPart(NamedTuple):
    path: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TensorFiles:
    """The tensors of a checkpoint that any number of ranks wrote: shapes and dtypes at once, values when asked for.

    Raises:
        ConfigError: if a file cannot be read, or the parts of a tensor do not make up the whole.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.kinds: dict[str, Entry] = {}
        self._parts: dict[str, list[_StoredPart]] = {}
        for path in paths:
            self._add(path)
        for name, parts in self._parts.items():
            if sum(math.prod(part.shape) for part in parts) != math.prod(self.kinds[name].shape) or _overlap(parts):
                raise ConfigError(f"the parts of {name} do not make up the whole; copy the whole checkpoint again")

    def _add(self, path: Path) -> None:
        if not is_inside(path.parent, path.name):
            raise ConfigError(f"{path.name} leads outside the folder; copy the whole checkpoint again")
        try:
            with safe_open(path, framework="pt") as file:
                places = json.loads((file.metadata() or {}).get(_PLACES, "{}"))
                for name in file.keys():  # noqa: SIM118 - a reader of files, not a dict
                    stored = file.get_slice(name)
                    shape, dtype = tuple(stored.get_shape()), DTYPES[stored.get_dtype()]
                    offset, whole = _checked_place(places.get(name), shape)
                    if self.kinds.setdefault(name, Entry(whole, dtype)) != (whole, dtype):
                        raise ValueError(f"{name} is another tensor than in the other files")
                    self._parts.setdefault(name, []).append(_StoredPart(path, offset, shape))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path.name} cannot be read ({error}); copy the whole checkpoint again") from error

    def files_of(self, prefix: str) -> list[Path]:
        """The files that hold tensors whose names begin so."""
        return sorted({part.path for name, parts in self._parts.items() if name.startswith(prefix) for part in parts})

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in memory of its own on the CPU."""
        tensor = torch.empty(self.kinds[name].shape, dtype=self.kinds[name].dtype)
        self.load({name: tensor})
        return tensor

    @torch.no_grad()
    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the targets, which may be sharded in any way. Only what this rank keeps is read."""
        needed: dict[Path, list[tuple[str, _StoredPart]]] = {}
        for name in targets:
            for part in self._parts[name]:
                needed.setdefault(part.path, []).append((name, part))
        for path, parts in needed.items():
            with safe_open(path, framework="pt") as file:
                for name, part in parts:
                    _copy_part(file, name, part, targets[name])


def _overlap(parts: Iterable[_StoredPart]) -> bool:
    """Whether two parts of a tensor have an element in common. Ranks cut few dimensions, so few are compared."""
    behind: list[_StoredPart] = []  # those that end, in the first dimension, behind the start of the next one
    for part in sorted((part for part in parts if math.prod(part.shape)), key=lambda part: part.offset):
        behind = [other for other in behind if _end(other)[:1] > part.offset[:1]]
        if any(_meet(part, other) for other in behind):
            return True
        behind.append(part)
    return False


def _meet(one: _StoredPart, other: _StoredPart) -> bool:
    starts = zip(one.offset, _end(one), other.offset, _end(other), strict=True)
    return all(start < other_end and other_start < end for start, end, other_start, other_end in starts)


def _end(part: _StoredPart) -> tuple[int, ...]:
    return tuple(start + size for start, size in zip(part.offset, part.shape, strict=True))


def _copy_part(file: Any, name: str, part: _StoredPart, target: torch.Tensor) -> None:
    """Copy what a stored part and this rank's part of the target have in common."""
    local, place = local_part(target)
    common = [
        slice(max(start, wanted.start), min(start + size, wanted.stop))
        for start, size, wanted in zip(part.offset, part.shape, place, strict=True)
    ]
    if any(cut.start >= cut.stop for cut in common):
        return
    there = tuple(slice(cut.start - start, cut.stop - start) for cut, start in zip(common, part.offset, strict=True))
    here = tuple(
        slice(cut.start - wanted.start, cut.stop - wanted.start) for cut, wanted in zip(common, place, strict=True)
    )
    is_whole = all(cut.stop - cut.start == size for cut, size in zip(common, part.shape, strict=True))
    local[here].copy_(file.get_tensor(name) if is_whole else file.get_slice(name)[there])


def _checked_place(place: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A part's offset in the whole tensor, and the shape of the whole; a tensor without a place is whole."""
    if place is None:
        return (0,) * len(shape), shape
    offset, whole = place["saved_offsets"], place["shape"]
    for numbers in (offset, whole):
        if not (isinstance(numbers, list) and len(numbers) == len(shape) and all(type(n) is int for n in numbers)):
            raise ValueError("a part's place is none")
    if any(start < 0 or start + size > end for start, size, end in zip(offset, shape, whole, strict=True)):
        raise ValueError("a part is outside of its tensor")
    return tuple(offset), tuple(whole)
