"""The tensors of a checkpoint of any version, read onto this run's layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from checkpointing.tensor_files import TensorFiles
from policies.weights.sources import keep_part
from policies.weights.stored import Entry
from ranks.collectives import on_rank_zero
from run_folder.checkpoint_folder import tensor_files


class StoredState(Protocol):
    """A checkpoint's tensors: shapes and dtypes at once, values when asked for."""

    kinds: dict[str, Entry]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor on the CPU."""

    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the targets, which may be sharded in any way."""


def open_state(folder: Path, *, sent: bool) -> StoredState:
    """The tensors of a checkpoint's folder.

    Args:
        sent: whether rank 0 reads them and sends them to the others. Every rank must call this and `load` then.

    Raises:
        ConfigError: if a file is damaged.
    """
    if sent:
        return _SentState(folder)
    if paths := tensor_files(folder):
        return TensorFiles(paths)
    from checkpointing.old_format.state import open_old_state

    return open_old_state(folder)


class _SentState:
    """Rank 0 reads one tensor at a time and sends it to the ranks that do not see its disk."""

    def __init__(self, folder: Path) -> None:
        self._own: StoredState | None = None  # rank 0's
        self.kinds: dict[str, Entry] = on_rank_zero(lambda: self._open(folder))

    def _open(self, folder: Path) -> dict[str, Entry]:
        self._own = open_state(folder, sent=False)
        return self._own.kinds

    def read(self, name: str) -> torch.Tensor:
        shape, dtype = self.kinds[name]
        whole = torch.empty(shape, dtype=dtype) if self._own is None else self._own.read(name)
        dist.broadcast(whole, src=0)
        return whole

    @torch.no_grad()
    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            keep_part(target, self.read(name))
