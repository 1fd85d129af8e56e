"""The safetensors files of a checkpoint: any library reads them, and files that do not fit together are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpointing.tensor_files import Part, TensorFiles, write_tensors
from run_folder.checkpoint_folder import checksum
from utils.errors import ConfigError

WHOLE = torch.arange(24.0).reshape(6, 4)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Rows 0 and 1 in one file, 2 to 5 in another; a count in the first, bytes in the second."""
    count, states = torch.tensor(3, dtype=torch.int64), torch.arange(5, dtype=torch.uint8)
    (tmp_path / "copy").mkdir()
    files = [tmp_path / f"copy/rank-0000{rank}.safetensors" for rank in range(2)]
    first = {"w": Part(WHOLE[:2], (0, 0), (6, 4)), "step": Part(count, (), ())}
    second = {"states": Part(states, (0,), (5,)), "w": Part(WHOLE[2:], (2, 0), (6, 4))}
    assert [write_tensors(file, parts) for file, parts in zip(files, (first, second), strict=True)] == [
        checksum(file) for file in files
    ]
    return files


def test_parts_are_read_as_wholes_and_each_file_by_the_library(paths: list[Path]) -> None:
    files = TensorFiles(paths)
    assert torch.equal(files.read("w"), WHOLE)
    assert files.read("step") == 3
    assert files.read("states").tolist() == [0, 1, 2, 3, 4]
    assert {name: str(entry.dtype) for name, entry in files.kinds.items()} == {
        "w": "torch.float32",
        "step": "torch.int64",
        "states": "torch.uint8",
    }
    assert torch.equal(load_file(paths[1])["w"], WHOLE[2:])


def forge(path: Path, places: Any) -> None:
    """Write the file's tensors again, with other places."""
    text = places if isinstance(places, str) else json.dumps(places)
    save_file(load_file(path), path, metadata={"DCP_SHARDING_INFO": text})


W, STATES = {"saved_offsets": [2, 0], "shape": [6, 4]}, {"saved_offsets": [0], "shape": [5]}


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"states": STATES, "w": W | {"saved_offsets": [3, 0]}}, "a part is outside of its tensor"),
        ({"states": STATES, "w": W | {"saved_offsets": [-2, 0]}}, "a part is outside of its tensor"),
        ({"states": STATES, "w": W | {"saved_offsets": [2]}}, "a part's place is none"),
        ({"states": STATES, "w": W | {"saved_offsets": [2, 0.0]}}, "a part's place is none"),
        ({"states": STATES, "w": W | {"shape": "64"}}, "a part's place is none"),
        ({"states": STATES, "w": {"shape": [6, 4]}}, "saved_offsets"),
        ({"states": STATES, "w": W | {"shape": [7, 4]}}, "w is another tensor than in the other files"),
        ({"states": STATES | {"shape": [10**12]}, "w": W}, "the parts of states do not make up the whole"),
        ([], "cannot be read"),
        ("[" * 10**5, "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_places_that_no_run_writes_are_refused(places: Any, said: str, paths: list[Path]) -> None:
    forge(paths[1], {"states": STATES, "w": W})
    assert torch.equal(TensorFiles(paths).read("w"), WHOLE)
    forge(paths[1], places)
    with pytest.raises(ConfigError, match=said):
        TensorFiles(paths)


CUT_OTHERWISE = [
    ([(0, 0, 3, 4), (2, 0, 2, 4), (5, 0, 1, 4)], False),  # row 2 twice, row 4 never
    ([(0, 0, 6, 2), (0, 1, 6, 2)], False),
    ([(0, 0, 3, 2), (0, 2, 6, 2), (2, 0, 3, 2)], False),
    ([(0, 0, 6, 1), (0, 3, 6, 1), (0, 1, 2, 2), (4, 1, 2, 2), (2, 1, 2, 2)], True),
    ([(4, 0, 2, 4), (2, 0, 0, 4), (0, 0, 2, 4), (2, 0, 2, 4)], True),
]


@pytest.mark.parametrize(("cuts", "fit"), CUT_OTHERWISE)
def test_parts_of_the_right_size_must_not_overlap(
    cuts: list[tuple[int, int, int, int]], fit: bool, tmp_path: Path
) -> None:
    files = [tmp_path / f"rank-{rank:05d}.safetensors" for rank in range(len(cuts))]
    for file, (row, column, num_rows, num_columns) in zip(files, cuts, strict=True):
        values = WHOLE[row : row + num_rows, column : column + num_columns]
        write_tensors(file, {"w": Part(values, (row, column), (6, 4))})
    if fit:
        assert torch.equal(TensorFiles(files).read("w"), WHOLE)
    else:
        with pytest.raises(ConfigError, match="the parts of w do not make up the whole"):
            TensorFiles(files)


def test_a_file_that_is_missing_or_cut_off_or_elsewhere_is_refused(paths: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the parts of w do not make up the whole"):
        TensorFiles(paths[:1])
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"rank-00001\.safetensors cannot be read"):
        TensorFiles(paths)
    (tmp_path / "file").write_bytes(content)
    paths[1].unlink()
    paths[1].symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match="leads outside the folder"):
        TensorFiles(paths)


def test_wide_numbers_come_first_so_that_all_are_aligned(paths: list[Path]) -> None:
    with safe_open(paths[1], framework="pt") as file:
        assert file.offset_keys() == ["w", "states"]
    with safe_open(paths[0], framework="pt") as file:
        assert file.offset_keys() == ["step", "w"]
