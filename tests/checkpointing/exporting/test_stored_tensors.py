"""Tensors read, and files written, one tensor at a time agree with the libraries."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpointing.exporting.pickled_tensors import PickledTensors
from checkpointing.exporting.safetensors_file import check_model_files, write_model_files
from checkpointing.exporting.stored_tensors import CheckpointTensors, StoredTensors
from checkpointing.tensor_files import whole_tensors, write_tensors
from policies.weights.stored import DTYPES, Entry, SafetensorsTensors, read_entries
from tests.helpers.processes import ProcessGroup
from tests.helpers.shards import SHARDED, save_shards, whole
from utils.errors import ConfigError, TrainingError

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensor_kinds = st.dictionaries(
    st.text("abc.é_", min_size=1, max_size=8), st.tuples(shapes, st.sampled_from(list(DTYPES.values()))), min_size=1
)


def make_tensors(kinds: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Random bits, NaNs included."""
    generator = np.random.default_rng(0)
    tensors = {}
    for name, (shape, dtype) in kinds.items():
        count = int(np.prod(shape, dtype=int))
        if dtype == torch.bool:
            tensors[name] = torch.from_numpy(generator.integers(0, 2, count).astype(bool)).reshape(shape)
        else:
            bits = torch.from_numpy(generator.integers(0, 256, count * dtype.itemsize, dtype=np.uint8))
            tensors[name] = bits.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return tensors


def entries_of(tensors: dict[str, torch.Tensor]) -> dict[str, Entry]:
    return {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def nothing(num_bytes: int) -> None:
    pass


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=tensor_kinds, split=st.booleans())
def test_the_library_reads_what_was_written(kinds: Any, split: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, tensors = tmp_path_factory.mktemp("files"), make_tensors(kinds)
    size = 50 if split else "5GB"
    digests = write_model_files(folder, entries_of(tensors), tensors.__getitem__, nothing, max_file_size=size)
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())
    check_model_files(folder, entries_of(tensors), digests, nothing)
    assert SafetensorsTensors(folder.glob("*.safetensors")).index == entries_of(tensors)


def test_tensors_lie_where_their_numbers_may_begin(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(2)}
    write_model_files(tmp_path, entries_of(tensors), tensors.__getitem__, nothing)
    header = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    fields = json.loads(header[8 : 8 + length])
    assert length % 8 == 0
    assert fields.pop("__metadata__") == {"format": "pt"}
    for name, field in fields.items():
        assert field["data_offsets"][0] % tensors[name].dtype.itemsize == 0


@pytest.mark.parametrize("block_bytes", [64 << 20, 100])
def test_a_bit_that_changed_on_disk_is_found(block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpointing.exporting.safetensors_file._BLOCK_BYTES", block_bytes)
    tensors = {"a": torch.randn(40, 7), "b": torch.randn(300)}
    digests = write_model_files(tmp_path, entries_of(tensors), tensors.__getitem__, nothing)
    check_model_files(tmp_path, entries_of(tensors), digests, nothing)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(TrainingError, match="b is not on disk what it was"):
        check_model_files(tmp_path, entries_of(tensors), digests, nothing)
    path.write_bytes(whole[:-1])
    with pytest.raises(TrainingError, match="cannot be read back"):
        check_model_files(tmp_path, entries_of(tensors), digests, nothing)
    save_file({"a": tensors["a"]}, path)
    with pytest.raises(TrainingError, match="b was not written"):
        check_model_files(tmp_path, entries_of(tensors), digests, nothing)


KINDS = ["rank-00000.safetensors", "state.safetensors", "distcp", "state.pt", "plain.pt", "safetensors"]


def store(kind: str, folder: Path, tensors: dict[str, torch.Tensor]) -> StoredTensors:
    ours = {f"model.{name}": tensor for name, tensor in tensors.items()}
    ours |= {f"optimizer.state.{name}.exp_avg": torch.ones(3) for name in tensors}
    if kind == "distcp":
        dcp.save(ours, checkpoint_id=folder / "copy", no_dist=True)
        return CheckpointTensors(folder / "copy")
    if kind.endswith("e.safetensors") or kind.startswith("rank-"):
        write_tensors(folder / kind, whole_tensors(ours))
        return CheckpointTensors(folder)
    if kind == "safetensors":
        save_file(tensors, folder / "a.safetensors")
        return SafetensorsTensors([folder / "a.safetensors"])
    torch.save(ours if kind == "state.pt" else tensors, folder / kind)
    return PickledTensors(folder / kind, "model." if kind == "state.pt" else "")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_tensors(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpointing.exporting.pickled_tensors._REMAP_BYTES", 30)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    tensors = make_tensors({f"layer.{i}": ((3, i), dtype) for i, dtype in enumerate(dtypes)} | {"x": ((), dtypes[0])})
    stored = store(kind, tmp_path, tensors)
    assert stored.index == entries_of(tensors)
    for name in [*tensors, *reversed(tensors)]:
        assert same_bits(stored.read(name), tensors[name])
    stored.read("layer.1").zero_()  # it has its own memory: neither the file nor the next read changes
    assert same_bits(stored.read("layer.1"), tensors["layer.1"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_and_empty_shards_make_up_the_whole(
    world_size: int, process_group: ProcessGroup, tmp_path: Path
) -> None:
    process_group.train(partial(save_shards, str(tmp_path / "copy")), world_size)
    for format_ in ("distcp", "safetensors"):
        stored = CheckpointTensors(tmp_path / "copy" / format_)
        assert torch.equal(stored.read("same"), torch.arange(4.0))
        for dim, rows in SHARDED:
            assert torch.equal(stored.read(f"w{dim}{rows}"), whole(rows))
    parts = [load_file(file).keys() for file in (tmp_path / "copy/safetensors").iterdir()]
    assert sum("model.same" in names for names in parts) == 1, "copies are written once"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_off_is_refused(kind: str, tmp_path: Path) -> None:
    store(kind, tmp_path, {"a": torch.randn(1000)})
    path = next(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4000)
    path.write_bytes(path.read_bytes()[:2000])
    readers: dict[str, Any] = dict.fromkeys(KINDS[:3], lambda file: CheckpointTensors(file.parent))
    readers["safetensors"] = lambda file: SafetensorsTensors([file])
    with pytest.raises(ConfigError, match=r"cut off|cannot be read"):
        readers.get(kind, PickledTensors)(path)


def test_an_index_that_leaves_out_a_part_of_a_tensor_is_refused(tmp_path: Path) -> None:
    store("distcp", tmp_path, {"a": torch.randn(4, 4)})
    path = tmp_path / "copy/.metadata"
    index = pickle.loads(path.read_bytes())
    index.state_dict_metadata["model.a"].chunks[0].sizes = torch.Size([3, 4])
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(ConfigError, match=r"the parts of model\.a do not make up the whole"):
        CheckpointTensors(tmp_path / "copy")


def test_quantized_files_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="full-precision"):
        read_entries(tmp_path / "a.safetensors")
