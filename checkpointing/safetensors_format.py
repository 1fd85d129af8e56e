"""The safetensors format, written one tensor at a time; the library's own writer needs a file's tensors in memory.

The format (https://huggingface.co/docs/safetensors) is: eight bytes with the length of a JSON header, the header with
each tensor's dtype, shape and place, and the tensors' bytes without gaps. Files are read back through the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch

from policies.weights.stored import DTYPES, Entry

_BLOCK_BYTES = 64 << 20  # written at a time
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def ordered(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries in the order of the file: wider numbers first, so that every tensor is aligned."""
    return dict(sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize))


def header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The start of a file; the tensors' bytes follow in the order of `entries`."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for name, entry in entries.items():
        end = start + entry.nbytes
        fields[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format's padding, so that the first tensor is aligned, too
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, not copied if it is contiguous."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def write_all(file: BinaryIO, data: memoryview, written: Callable[[memoryview], object]) -> None:
    """Write all of it into an unbuffered file.

    Args:
        written: called with each block, once the file has it.
    """
    for start in range(0, len(data), _BLOCK_BYTES):
        block = rest = data[start : start + _BLOCK_BYTES]
        while rest:  # a full disk may take a piece of it first
            rest = rest[file.write(rest) :]
        written(block)
