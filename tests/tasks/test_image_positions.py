"""Positions with three axes are those that transformers computes of a sample."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.image_positions import GridPositions

IMAGE, TEXT = 7, 9
FAMILIES = {
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLModel),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLModel),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLModel),
    "glm4v": (transformers.Glm4vConfig, transformers.Glm4vModel),
}
TEXTS, SIDES = st.integers(1, 4), st.integers(1, 5)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.tuples(TEXTS, SIDES, SIDES), max_size=4), last=TEXTS)
def test_positions_of_a_sample_are_those_of_transformers(
    family: str, parts: list[tuple[int, int, int]], last: int
) -> None:
    config_class, model_class = FAMILIES[family]
    config = config_class(image_token_id=IMAGE)
    merged = config.vision_config.spatial_merge_size
    ids = torch.tensor(
        [i for text, height, width in parts for i in [TEXT] * text + [IMAGE] * height * width] + [TEXT] * last
    )
    grids = torch.tensor([[1, height * merged, width * merged] for _, height, width in parts], dtype=torch.int64)
    grids = grids.reshape(-1, 3)
    model = model_class.__new__(model_class)  # which reads its config alone
    torch.nn.Module.__init__(model)
    model.config = config
    wanted, _ = model.get_rope_index(
        ids[None], mm_token_type_ids=(ids[None] == IMAGE).int(), image_grid_thw=grids if len(grids) else None
    )
    found = GridPositions(IMAGE, merged).count(ids, grids)
    assert torch.equal(found, wanted[:, 0])
