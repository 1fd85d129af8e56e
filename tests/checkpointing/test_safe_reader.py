"""Forged or damaged checkpoint folders: no code from them runs, and one line says what is wrong."""

from __future__ import annotations

import contextlib
import pickle
import random
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as sharded_tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpointing.old_format.safe_reader import SafeFileSystemReader
from tests.helpers.checkpoints import Command
from utils.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tensors of several kinds, saved by torch."""
    state: dict[str, Any] = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones((), dtype=torch.int8)}
    dcp.save({"model": state | {"c": torch.randn(0, 2, dtype=torch.bfloat16)}}, checkpoint_id=tmp_path / "copy")
    return tmp_path / "copy"


def change_index(folder: Path, change: Any) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(change(index)))


def test_torch_loads_through_it_what_torch_saved(folder: Path) -> None:
    reader = SafeFileSystemReader(folder)
    index = reader.read_metadata().state_dict_metadata
    assert {name: tuple(entry.size) for name, entry in index.items()} == {
        "model.a": (3, 4),
        "model.b": (),
        "model.c": (0, 2),
    }
    state = {"model": {"a": torch.zeros(3, 4), "b": torch.zeros((), dtype=torch.int8)}}
    dcp.load(state, storage_reader=reader)
    assert torch.equal(state["model"]["a"], torch.arange(12.0).view(3, 4))
    assert state["model"]["b"] == 1


def test_the_index_is_parsed_once(folder: Path) -> None:
    reader = SafeFileSystemReader(folder)
    index = reader.read_metadata()
    (folder / ".metadata").unlink()
    state = {"model": {"a": torch.zeros(3, 4)}}
    dcp.load(state, storage_reader=reader)
    assert reader.read_metadata() is index
    assert state["model"]["a"].sum() == 66


def test_an_index_of_an_old_torch_is_read(folder: Path) -> None:
    def make_old(index: Metadata) -> Metadata:
        for entry in index.state_dict_metadata.values():
            assert isinstance(entry, TensorStorageMetadata)
            entry.properties = sharded_tensor.TensorProperties(dtype=entry.properties.dtype)  # type: ignore[assignment]
        del index.storage_meta, index.version
        return index

    change_index(folder, make_old)
    assert b"sharded_tensor" in (folder / ".metadata").read_bytes()
    index = SafeFileSystemReader(folder).read_metadata().state_dict_metadata
    assert index["model.c"].properties.dtype == torch.bfloat16


@pytest.mark.parametrize("where", ["alone", "in the index"])
def test_a_forged_index_runs_nothing(where: str, folder: Path, tmp_path: Path) -> None:
    command = Command(tmp_path / "witness")

    def forge(index: Metadata) -> Any:
        if where == "alone":
            return command
        index.planner_data = {"model.a": command}
        return index

    change_index(folder, forge)
    with pytest.raises(ConfigError, match=r"\.metadata is refused: it asks for posix\.system") as caught:
        SafeFileSystemReader(folder).read_metadata()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "witness").exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "witness").exists(), "the forgery does nothing: the test shows nothing"


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "builtins.getattr", "torch.load", "torch.hub.load", "torch.distributed.checkpoint.metadata.os"],
)
def test_nothing_else_that_could_run_code_is_found(name: str, folder: Path) -> None:
    module, _, attribute = name.rpartition(".")
    (folder / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(ConfigError, match=r"is refused: it asks for "):
        SafeFileSystemReader(folder).read_metadata()


def test_a_name_within_a_name_is_not_looked_up(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x10Size.__class__.x\x93.")
    with pytest.raises(ConfigError, match="is refused: it asks for"):
        SafeFileSystemReader(folder).read_metadata()


FORGED_STATE = b"}\x8c\x07witness\x88s"  # {"witness": True}
METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
ATTACKS = {
    "the state of a class is set": b"cpathlib\nPosixPath\nN" + FORGED_STATE + b"\x86b.",  # as (None, slots)
    "the state of torch's own class is set": b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    + FORGED_STATE
    + b"b.",
    "an object gets its state twice": b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}b"
    + FORGED_STATE
    + b"b.",
    "a call with wrong arguments": b"ctorch\nSize\nK\x07\x85R.",
    "a call of what was called": b"ctorch\nSize\n)R)R.",
    "a call without a tuple": b"ctorch\nSize\n]R.",
    "an item of a class": b"cpathlib\nPosixPath\nK\x01K\x02s.",
    "a memo of gigabytes": b"Nr\xff\xff\xff\xff.",
    "a text of exabytes": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "what was never put into the memo": b"h\x07.",
    "tuples 200,000 deep": b"N" + b"\x85" * 200_000 + b".",
    "a key that overflows the stack when hashed": b"}N" + b"\x85" * 200_000 + b"Ns.",
    "a mark that is not there": b"t.",
    "an opcode of persistent objects": b"Px\n.",
    "an extension's code": b"\x82\x01.",
    "a name without end": b"c" + b"x" * 100_000,
    "nothing": b"",
}


def test_what_a_pickle_could_do_to_the_reader_is_not_done(tmp_path: Path) -> None:
    """Each is refused in one line; the classes that it names are as they were."""
    for kind, attack in ATTACKS.items():
        (tmp_path / ".metadata").write_bytes(attack)
        with pytest.raises(ConfigError, match=r"\.metadata is refused: it .*; copy the checkpoint again$") as caught:
            SafeFileSystemReader(tmp_path).read_metadata()
        assert "\n" not in str(caught.value), kind
    assert not hasattr(PosixPath, "witness")
    assert not hasattr(Metadata, "witness")


def test_what_many_tensors_share_costs_no_more_than_its_bytes(folder: Path) -> None:
    """A list of parts that thousands of tensors name, which no writer makes, is not copied thousands of times."""

    def share(index: Metadata) -> Metadata:
        entry = index.state_dict_metadata["model.a"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks = entry.chunks * 5000
        index.state_dict_metadata |= {f"model.a{number}": entry for number in range(5000)}
        return index

    change_index(folder, share)
    with pytest.raises(ConfigError, match="more parts than it has room for"):
        SafeFileSystemReader(folder).read_metadata()


def test_a_tensor_that_is_said_to_be_larger_than_its_file_is_not_made(folder: Path) -> None:
    def enlarge(index: Metadata) -> Metadata:
        entry = index.state_dict_metadata["model.a"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.size = entry.chunks[0].sizes = torch.Size([2**40, 4])
        return index

    change_index(folder, enlarge)
    with pytest.raises(ConfigError, match=r"a part of model\.a is said to be larger than what is stored of it"):
        SafeFileSystemReader(folder).read_metadata()


def test_a_place_that_is_none_is_refused(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    for field in ("offset", "length", "relative_path"):
        for value in (None, -1, 2**80, [3], (3,), "nowhere"):
            index = pickle.loads(whole)
            for place in index.storage_data.values():
                setattr(place, field, value)
            (folder / ".metadata").write_bytes(pickle.dumps(index))
            with pytest.raises(ConfigError, match=r"\.metadata is refused: it is not an index|nowhere is missing"):
                SafeFileSystemReader(folder).read_metadata()


def test_a_shard_that_is_a_link_to_another_run_is_refused(folder: Path, tmp_path: Path) -> None:
    """The folder itself may be reached by a link."""
    (tmp_path / "link").symlink_to(folder)
    assert SafeFileSystemReader(tmp_path / "link").read_metadata().state_dict_metadata
    (tmp_path / "other").mkdir()
    (folder / "__0_0.distcp").rename(tmp_path / "other/__0_0.distcp")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "other/__0_0.distcp")
    with pytest.raises(ConfigError, match=r"it leads to '__0_0\.distcp', outside the folder"):
        SafeFileSystemReader(folder).read_metadata()


def test_an_entry_that_is_a_pickle_is_not_read(tmp_path: Path) -> None:
    """torch itself would run it, whatever type of entry the caller expects."""
    dcp.save({"model": {"a": Command(tmp_path / "witness")}}, checkpoint_id=tmp_path / "copy")
    reader = SafeFileSystemReader(tmp_path / "copy")
    assert set(reader.read_metadata().state_dict_metadata) == {"model.a"}
    with pytest.raises(CheckpointException, match=r"model\.a is not a tensor but a pickle"):
        dcp.load({"model": {"a": torch.zeros(1)}}, storage_reader=reader)
    assert not (tmp_path / "witness").exists()
    with contextlib.suppress(CheckpointException):
        dcp.load({"model": {"a": torch.zeros(1)}}, checkpoint_id=tmp_path / "copy")
    assert (tmp_path / "witness").exists(), "the forgery does nothing: the test shows nothing"


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "sub/__0_0.distcp", "..", ".", "", "a\0b", "../copy/__0_0.distcp"]
)
def test_no_file_outside_the_folder_is_opened(name: str, folder: Path) -> None:
    def lead_astray(index: Metadata) -> Metadata:
        for place in index.storage_data.values():
            place.relative_path = name
        return index

    change_index(folder, lead_astray)
    with pytest.raises(ConfigError, match=r"is refused: .* outside the folder"):
        SafeFileSystemReader(folder).read_metadata()


def test_a_missing_index_a_missing_file_and_a_short_file_are_told_apart(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"__0_0\.distcp is cut off at {len(whole) - 1} bytes, and {len(whole)} are"):
        SafeFileSystemReader(folder).read_metadata()
    file.unlink()
    with pytest.raises(ConfigError, match=r"__0_0\.distcp is missing"):
        SafeFileSystemReader(folder).read_metadata()
    (folder / ".metadata").unlink()
    with pytest.raises(ConfigError, match=r"holds no \.metadata"):
        SafeFileSystemReader(folder).read_metadata()


def test_damage_anywhere_in_the_index_is_a_refusal_or_another_index_never_a_crash(folder: Path) -> None:
    whole, chance = (folder / ".metadata").read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 1, 4])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (folder / ".metadata").write_bytes(damaged[: chance.choice([len(damaged), chance.randrange(len(damaged))])])
        with contextlib.suppress(ConfigError):
            assert isinstance(SafeFileSystemReader(folder).read_metadata(), Metadata)
