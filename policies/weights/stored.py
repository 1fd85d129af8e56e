"""The safetensors files of a model or adapter: their paths, and from their headers their tensors.

Training and export read them through this; no code from them is run.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from policies.mxfp4 import BLOCKS, SCALES, dequantize_mxfp4, names_in_mxfp4, plain_shape
from utils.errors import ConfigError
from utils.git_lfs import PULL, is_pointer
from utils.inside import leads_out
from utils.small_files import read_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_BLOCK_BYTES = 16 << 20  # compared at a time


class Entry(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def weight_files(name: str) -> list[Path]:
    """The safetensors files of a folder or of a model on the hub; none if it has none.

    Raises:
        ValueError: if their index is damaged, or names a file outside the folder.
        OSError: if a file is missing.
    """
    # None instead of an error for a missing file. A folder or hub model has one file, or an index of several.
    single = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [Path(single)]
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        return []
    _check_index(Path(index))
    return [Path(path) for path in get_checkpoint_shard_files(name, index)[0]]


def _check_index(path: Path) -> None:
    try:
        index = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON; copy it again") from error
    is_table = isinstance(index, dict) and isinstance(index.get("metadata", {}), dict)
    files = index.get("weight_map") if is_table else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{path} does not say which file holds which tensor (weight_map); copy it again")
    for tensor, file in files.items():
        if leads_out(file):
            raise ValueError(
                f"{path} leads outside its folder, to {file[:200]!r} for {tensor[:200]}; put the file into the folder"
            )


def read_entries(path: Path) -> dict[str, Entry]:
    """The tensors that a safetensors file holds.

    Raises:
        ConfigError: if it cannot be read, or holds a dtype that no unquantized model has.
    """
    entries = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a reader of files, not a dict
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in DTYPES:
                    raise ConfigError(
                        f"{path}: {name} is stored as {tensor.get_dtype()}, quantized or complex; give the "
                        "full-precision model"
                    )
                entries[name] = Entry(tuple(tensor.get_shape()), DTYPES[tensor.get_dtype()])
    except (OSError, SafetensorError) as error:
        remedy = PULL if is_pointer(path) else "copy it again"
        raise ConfigError(f"{path} cannot be read ({error}); {remedy}") from error
    return entries


class Stored(NamedTuple):
    """A tensor in safetensors files."""

    path: Path
    key: str
    scales: Path | None = (
        None  # of a tensor in MXFP4 the file with its scales; `key` and `path` are those of its blocks
    )

    @property
    def paths(self) -> set[Path]:
        return {self.path, self.scales} if self.scales else {self.path}

    def read(self, file: Any, part: tuple[slice, ...] = (), device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor or a part of it; it may be a view of the file.

        Args:
            file: `path`, opened.
            device: where MXFP4 is dequantized. Other tensors are on the CPU.
        """
        if self.scales is None:
            return _part(file, self.key, part)
        with safe_open(self.scales, framework="pt") as other:
            scales = _part(other, self.key.removesuffix(BLOCKS) + SCALES, part[:1])
            whole = dequantize_mxfp4(_part(file, self.key, part[:1]).to(device), scales.to(device))
        return whole[(slice(None), *part[1:])]


def _part(file: Any, key: str, part: tuple[slice, ...]) -> torch.Tensor:
    tensor: torch.Tensor = file.get_slice(key)[part] if part else file.get_tensor(key)
    return tensor


class SafetensorsTensors:
    """The tensors of safetensors files: names, shapes and dtypes at once, values one at a time.

    Tensors in MXFP4 count as those in bf16 that they stand for.

    Attributes:
        in_mxfp4: their names, and the files of their scales.

    Raises:
        ConfigError: if one cannot be read.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.files = sorted(paths)
        self.index: dict[str, Entry] = {}
        self.path_of: dict[str, Path] = {}
        for path in self.files:
            entries = read_entries(path)
            self.index |= entries
            self.path_of |= dict.fromkeys(entries, path)
        in_bytes = {name: entry.shape for name, entry in self.index.items() if entry.dtype == torch.uint8}
        self.in_mxfp4 = {name: self.path_of[name + SCALES] for name in names_in_mxfp4(in_bytes)}
        for name in self.in_mxfp4:
            del self.index[name + BLOCKS], self.index[name + SCALES]
            self.index[name] = Entry(plain_shape(in_bytes[name + BLOCKS]), torch.bfloat16)
            self.path_of[name] = self.path_of[name + BLOCKS]

    def place_of(self, name: str) -> Stored:
        key = name + BLOCKS if name in self.in_mxfp4 else name
        return Stored(self.path_of[name], key, self.in_mxfp4.get(name))

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own on the CPU."""
        with safe_open(self.path_of[name], framework="pt") as file:
            # get_tensor may be a view of the mapped file; a copy lets the file go.
            tensor = self.place_of(name).read(file)
            return tensor if name in self.in_mxfp4 else tensor.clone()

    def are_equal(self, name: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two tensors have the same values in this dtype. Rows are read until some differ."""
        entry = self.index[name]
        if entry.shape != self.index[other].shape:
            return False
        # A scalar has no rows to slice, and an empty tensor no bytes to divide by.
        if not entry.shape or not entry.nbytes:
            return torch.equal(self.read(name).to(dtype), self.read(other).to(dtype))
        num_rows = max(1, _BLOCK_BYTES * entry.shape[0] // entry.nbytes)
        path, other_path = self.path_of[name], self.path_of[other]
        with safe_open(path, framework="pt") as file, safe_open(other_path, framework="pt") as other_file:
            rows, others = file.get_slice(name), other_file.get_slice(other)
            return all(
                torch.equal(rows[first : first + num_rows].to(dtype), others[first : first + num_rows].to(dtype))
                for first in range(0, entry.shape[0], num_rows)
            )
