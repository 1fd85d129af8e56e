"""Models of images and text by the names of their shapes, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.families.image_grids import QWEN_IMAGE, qwen2_5_vl, qwen_model
from benchmarks.families.image_parts import chat_template, hf

_PIXELS = (56 * 56, 28 * 28 * 16384)
# Qwen2.5-VL-7B-Instruct (Qwen team, 2025), from its published config.json
_QWEN2_5_TOWER: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN2_5_TEXT: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
# Qwen3-VL-4B-Instruct (Qwen team, 2025), from its published config.json
_QWEN3_TOWER: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "out_hidden_size": 2560,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
_QWEN3_TEXT: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    "tie_word_embeddings": True,
}
_HALF_TOWER = {"depth": 16, "fullatt_block_indexes": [7, 15]}
IMAGE_SHAPES: dict[str, Any] = {
    "tiny": qwen2_5_vl,
    "qwen2.5-vl-7b": lambda: qwen_model(
        hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLProcessor, _QWEN2_5_TOWER, _QWEN2_5_TEXT, _PIXELS
    ),
    "qwen2.5-vl-7b-half-the-layers": lambda: qwen_model(
        hf.Qwen2_5_VLConfig,
        hf.Qwen2_5_VLProcessor,
        _QWEN2_5_TOWER | _HALF_TOWER,
        _QWEN2_5_TEXT | {"num_hidden_layers": 14},
        _PIXELS,
    ),
    "qwen3-vl-4b": lambda: qwen_model(
        hf.Qwen3VLConfig, hf.Qwen3VLProcessor, _QWEN3_TOWER, _QWEN3_TEXT, (256 * 256, 4096 * 4096)
    ),
}
"""Functions that return config and processor."""


def make_image_shape(folder: Path, shape: str) -> None:
    """Write a model folder with the shape's config.json and a processor of its kind, but no weights."""
    config, processor = IMAGE_SHAPES[shape]()
    processor.chat_template = chat_template(QWEN_IMAGE)
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
