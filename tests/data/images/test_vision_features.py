"""Files of what a vision encoder made of a picture: by the picture's bytes, whole, in any precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from data.images.opening import FilePart
from data.images.vision_features import NUM_TOKENS, PREFIX, FeatureStore, as_bits, blank_source, stand_in
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
        assert store.has(source)
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
        store.has(tmp_path / "b.png")


def test_stand_ins_say_where_pictures_are() -> None:
    tiles = torch.zeros(2, 3, 3, 4, 4)
    tiles[0, :2, 1, 2, 3] = -1
    assert stand_in(tiles).tolist() == [[[[[1]]], [[[1]]], [[[0]]]], [[[[0]]], [[[0]]], [[[0]]]]]
    assert stand_in(torch.ones(6, 12)).shape == (6, 1)
