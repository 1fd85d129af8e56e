"""Tensors that a DataLoader's worker sends: large ones in shared memory, small ones by value, the same bits."""

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tasks import sent_tensors
from tasks.micro_batch import TensorBatch

_LARGE = torch.arange(2**19, dtype=torch.float32)  # 2 MiB


@dataclass(frozen=True)
class _Batch(TensorBatch):
    pixels: torch.Tensor
    ids: torch.Tensor
    num_label_tokens: int = 1


class _Batches(IterableDataset):
    def __iter__(self) -> Iterator[_Batch]:
        for number in range(20):
            yield _Batch(_LARGE + number, torch.tensor([number]))


def _sent() -> list[_Batch]:
    return list(DataLoader(_Batches(), batch_size=None, collate_fn=lambda batch: batch, num_workers=1))


def _check(batches: list[_Batch]) -> None:
    assert len(batches) == 20
    for number, batch in enumerate(batches):
        assert torch.equal(batch.pixels, _LARGE + number)
        assert batch.ids.tolist() == [number]
        assert batch.num_label_tokens == 1


@pytest.fixture
def room(monkeypatch):
    """Sets how many bytes of shared memory must stay free."""
    return lambda num_bytes: monkeypatch.setattr(sent_tensors, "_LEFT_FREE_BYTES", num_bytes)


def test_a_large_tensor_is_shared_and_a_small_one_is_not(room):
    room(0)
    batches = _sent()
    _check(batches)
    assert all(batch.pixels.is_shared() and not batch.ids.is_shared() for batch in batches)


def test_what_was_shared_is_freed(room):
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("/dev/shm/torch")

    room(0)
    batches = _sent()
    assert mapped() == 20
    del batches
    assert mapped() == 0


def test_all_goes_by_value_where_shared_memory_is_small(room):
    room(2**60)
    batches = _sent()
    _check(batches)
    assert not any(batch.pixels.is_shared() for batch in batches)


def test_all_goes_by_value_where_torch_refuses_memory(room, monkeypatch):
    def refuse(self):
        raise RuntimeError("unable to allocate shared memory(shm) for file: No space left on device (28)")

    room(0)
    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    _check(_sent())


def test_all_goes_by_value_where_the_temporary_folder_has_a_long_name(room, monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 100)  # too long for a socket, by which torch hands over what is shared
    folder.mkdir()
    room(0)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    batches = _sent()
    _check(batches)
    assert not any(batch.pixels.is_shared() for batch in batches)
