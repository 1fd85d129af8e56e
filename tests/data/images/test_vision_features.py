"""Files of what a vision encoder made of a picture: by the picture's bytes, whole, in any precision."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.images.opening import FilePart
from data.images.samples import ImageSamples
from data.images.vision_features import (
    NUM_TOKENS,
    PREFIX,
    FeatureStore,
    as_bits,
    blank_source,
    digest_of,
    pictures_of,
    stand_in,
)
from data.tokens.spans import BadExample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_come_back_bit_for_bit_wherever_the_picture_is(dtype: torch.dtype, tmp_path: Path) -> None:
    store, picture = FeatureStore(tmp_path / "kept"), blank_source(Image.new("RGB", (9, 7), (1, 2, 3)))
    store.folder.mkdir()
    features = torch.randn(5, 3).to(dtype)
    store.write(picture, {PREFIX + "pooler_output": features, NUM_TOKENS: torch.tensor(5)})
    file, archive = tmp_path / "a.png", tmp_path / "a.tar"
    file.write_bytes(picture)
    archive.write_bytes(b"more" + picture + b"more")
    for source in (picture, file, FilePart(archive, 4, len(picture))):
        assert store.has(digest_of(source))
        found = store.read(source)
        assert torch.equal(found[PREFIX + "pooler_output"], as_bits(features))
        assert torch.equal(found[PREFIX + "pooler_output"].view(dtype), features)
        assert int(found[NUM_TOKENS]) == 5


def test_a_picture_without_a_file_and_a_broken_one_are_named(tmp_path: Path) -> None:
    store, picture = FeatureStore(tmp_path / "kept"), tmp_path / "a.png"
    Image.new("RGB", (9, 7)).save(picture)
    with pytest.raises(BadExample, match=r"vision features are not in .*kept; start the run again"):
        store.read(picture)
    picture.write_bytes(picture.read_bytes()[:-30])
    with pytest.raises(BadExample, match=r"a\.png cannot be read"):
        store.read(picture)
    with pytest.raises(BadExample, match=r"b\.png cannot be read"):
        store.read(tmp_path / "b.png")


def test_files_that_a_killed_run_was_writing_are_removed_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    store, picture = FeatureStore(tmp_path), blank_source(Image.new("RGB", (9, 7)))
    FeatureStore(tmp_path / "not made yet").remove_stale()
    store.write(picture, {PREFIX + "pooler_output": torch.ones(5, 3), NUM_TOKENS: torch.tensor(5)})
    (kept,) = tmp_path.iterdir()
    stale, live = tmp_path / "ab.safetensors.01234567.tmp", tmp_path / "cd.safetensors.89abcdef.tmp"
    for file, days in ((kept, 9), (stale, 2), (live, 0)):
        file.touch()
        os.utime(file, (time.time() - 86400 * days,) * 2)
    store.remove_stale()
    assert {*tmp_path.iterdir()} == {kept, live}


def test_a_broken_file_is_computed_again_and_not_trained_on(tmp_path: Path) -> None:
    """A machine that crashed may leave a file empty or cut."""
    store, picture = FeatureStore(tmp_path), blank_source(Image.new("RGB", (9, 7)))
    store.write(picture, {PREFIX + "pooler_output": torch.ones(5, 3), NUM_TOKENS: torch.tensor(5)})
    (file,) = tmp_path.iterdir()
    for contents in (file.read_bytes()[:-3], b""):
        file.write_bytes(contents)
        assert not store.has(digest_of(picture))
        with pytest.raises(BadExample, match="start the run again, which computes them"):
            store.read(picture)


def test_shares_are_each_picture_once_and_pictures_are_read_when_asked_for() -> None:
    read = list[int]()

    class Rows:
        def sources(self, key: int) -> list[bytes]:
            read.append(key)
            return [bytes([key])]

    def samples(number: int) -> ImageSamples:
        ids = np.zeros(number, np.int32)
        offsets = np.arange(number + 1)
        places = np.tile(np.array([[0, 1]]), (number, 1))
        return ImageSamples(
            ids,
            ids,
            offsets,
            offsets,
            np.arange(number),
            places=places,
            place_offsets=offsets,
            keys=np.arange(number),
            store=Rows(),
        )

    parts = [samples(7), None, samples(2)]
    found = [list(pictures_of(parts, share, 3)) for share in range(3)]
    assert [[int(source[0][0]) for source in of] for of in found] == [[0, 1], [2, 3, 0], [4, 5, 6, 1]]
    read.clear()
    next(iter(pictures_of(parts, 1, 3)))
    assert read == [2]


def test_stand_ins_say_where_pictures_are() -> None:
    tiles = torch.zeros(2, 3, 3, 4, 4)
    tiles[0, :2, 1, 2, 3] = -1
    assert stand_in(tiles).tolist() == [[[[[1]]], [[[1]]], [[[0]]]], [[[[0]]], [[[0]]], [[[0]]]]]
    assert stand_in(torch.ones(6, 12)).shape == (6, 1)
