"""Tiny models whose images are grids of patches that merge: Qwen-VL's and GLM-V's."""

from __future__ import annotations

from typing import Any

from benchmarks.families.image_parts import EXPERTS, MROPE, PATCH, SIDE, TEXT, hf, ids_of, tokenizer_with
from data.processors.without_videos import for_images

_QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What Qwen-VL's chat templates write for an image."""


def qwen_model(
    config_class: Any,
    processor_class: Any,
    vision: dict[str, Any],
    text: dict[str, Any],
    pixels: tuple[int, int] = (256, 4 * SIDE**2),
) -> Any:
    """The config and the processor of a Qwen-VL of these sizes, and of tiny ones where none are given.

    Args:
        pixels: of an image, at least and at most.
    """
    tokenizer = tokenizer_with(*_QWEN)
    size = dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True))
    images = hf.Qwen2VLImageProcessorPil(patch_size=vision.get("patch_size", PATCH), size=size)
    processor = for_images(processor_class)(images, tokenizer)
    processor.video_settings = {"video_processor_type": "Qwen2VLVideoProcessor"}
    start, image, end, video = ids_of(tokenizer, _QWEN)
    config = config_class(
        vision_config={"depth": 2, "num_heads": 4, "patch_size": PATCH} | vision,
        text_config=TEXT | {"vocab_size": len(tokenizer), "rope_parameters": MROPE} | text,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return config, processor


def qwen2_vl() -> Any:
    vision: dict[str, Any] = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    return qwen_model(hf.Qwen2VLConfig, hf.Qwen2VLProcessor, vision, {})


def qwen2_5_vl() -> Any:
    vision: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
    vision |= {"window_size": 2 * PATCH, "fullatt_block_indexes": [1]}
    return qwen_model(hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLProcessor, vision, {})


_QWEN3_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
}
_QWEN3_TOWER |= {"deepstack_visual_indexes": [0]}


def qwen3_vl() -> Any:
    text = {"head_dim": 8}
    return qwen_model(hf.Qwen3VLConfig, hf.Qwen3VLProcessor, _QWEN3_TOWER, text)


def qwen3_vl_moe() -> Any:
    text = {"head_dim": 8} | EXPERTS
    return qwen_model(hf.Qwen3VLMoeConfig, hf.Qwen3VLProcessor, _QWEN3_TOWER, text)


_GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>")


def _glm(config_class: Any, processor: str, images: str, text: dict[str, Any]) -> Any:
    tokenizer = tokenizer_with(*_GLM)
    size = {"shortest_edge": 2 * 256, "longest_edge": 2 * 4 * SIDE**2}
    image_processor = getattr(hf, images)(patch_size=PATCH, size=size)
    made = for_images(getattr(hf, processor))(image_processor, tokenizer)
    made.video_settings = {"video_processor_type": "Glm4vVideoProcessor"}
    start, image, end, video, start_video, end_video = ids_of(tokenizer, _GLM)
    vision: dict[str, Any] = {"hidden_size": 32, "depth": 2, "num_heads": 4, "patch_size": PATCH, "image_size": SIDE}
    vision |= {"intermediate_size": 48, "out_hidden_size": 32}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    config = config_class(
        vision_config=vision,
        text_config=TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope} | text,
        image_token_id=image,
        video_token_id=video,
        image_start_token_id=start,
        image_end_token_id=end,
        video_start_token_id=start_video,
        video_end_token_id=end_video,
    )
    return config, made


def glm4v() -> Any:
    return _glm(hf.Glm4vConfig, "Glm4vProcessor", "Glm4vImageProcessorPil", {})


def glm46v() -> Any:
    text = {"model_type": "glm4v_text"}
    return _glm(hf.Glm46VConfig, "Glm46VProcessor", "Glm46VImageProcessorPil", text)


def glm4v_moe() -> Any:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
    text = experts | {"topk_group": 1, "head_dim": 8, "first_k_dense_replace": 1}
    return _glm(hf.Glm4vMoeConfig, "Glm4vProcessor", "Glm4vImageProcessorPil", text)
