"""The images of a plan have as many patches as those of the run, and the largest of them for its memory."""

from __future__ import annotations

from typing import Any

import pytest

from data.batches.counts import ImageTokens
from tasks.image_meta_batch import image_meta_batch
from tasks.image_rows import GRIDS
from tasks.micro_batch import BatchShape
from tests.helpers.image_models import MODELS


@pytest.fixture(scope="module")
def model_config() -> Any:
    return MODELS["qwen2_vl"]()[0]


def features_of(model_config: Any, width: int, of_each: int) -> list[int]:
    """Features of each image of a row that is all images."""
    shape = BatchShape(1, (width,), images=ImageTokens(1.0, of_each, of_each), packed=True, by_offsets=True)
    batch = image_meta_batch(model_config, shape, longest=8)
    merged = model_config.vision_config.spatial_merge_size**2
    sizes = [size // merged for size in batch.inputs[GRIDS].prod(-1).tolist()]
    assert batch.num_image_features == sum(sizes)
    assert len(batch.inputs["pixel_values"]) == merged * sum(sizes)
    return sizes


@pytest.mark.parametrize(("width", "of_each"), [(2369, 4), (2369, 5), (8000, 256), (3136, 3136), (500, 3136), (70, 67)])
def test_a_row_has_its_features_and_no_larger_image(model_config: Any, width: int, of_each: int) -> None:
    sizes = features_of(model_config, width, of_each)
    assert sum(sizes) == pytest.approx(width, rel=0.02)
    if width / of_each <= 512:
        assert sizes[0] == pytest.approx(min(of_each, width), rel=0.02)
        assert len(sizes) == -(-width // of_each)


def test_very_many_images_are_fewer_larger_ones(model_config: Any) -> None:
    """Models loop over their images."""
    sizes = features_of(model_config, 60_000, 4)
    assert sum(sizes) == pytest.approx(60_000, rel=0.02)
    assert len(sizes) <= 513
