"""Tiny models of images and text of the families that people fine-tune today, with processors of their own kind.

Their configs are transformers' defaults, which are those of a published model, with smaller sizes. Kept are the order
of layers, norms, position encodings, windows, how patches are merged and where features enter the text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForImageTextToText

from benchmarks.families.image_grids import (
    QWEN_IMAGE,
    glm4v,
    glm4v_moe,
    glm46v,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
)
from benchmarks.families.image_parts import (
    PATCH,
    SIDE,
    TEXT,
    TOWER,
    chat_template,
    hf,
    ids_of,
    square,
    tokenizer_with,
)
from benchmarks.families.random_weights import make_random_model
from data.processors.without_videos import for_images


class ImageFamily(NamedTuple):
    """A family.

    Attributes:
        model: the published model whose settings are transformers' defaults of the config's class.
        make: returns the config and the processor.
        placeholder: what the chat template writes for an image.
        needs: a package that its processor needs, besides Pillow.
    """

    model: str
    make: Callable[[], tuple[Any, Any]]
    placeholder: str
    needs: str | None = None


def save_family(family: ImageFamily, folder: Path) -> None:
    """Save the tiny model and its processor."""
    config, processor = family.make()
    processor.chat_template = chat_template(family.placeholder)
    make_random_model(AutoModelForImageTextToText, config).save_pretrained(folder)
    processor.save_pretrained(folder)


def _gemma3() -> Any:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = tokenizer_with(**named)
    processor = hf.Gemma3Processor(hf.Gemma3ImageProcessorPil(**square()), tokenizer, image_seq_length=4)
    start, end, image = ids_of(tokenizer, list(named.values()))
    kinds = ["sliding_attention", "full_attention"]
    text: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16, "layer_types": kinds}
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=hf.Gemma3TextConfig(**TEXT | text, vocab_size=len(tokenizer)),
        mm_tokens_per_image=4,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_index=image,
    )
    return config, processor


def _gemma4() -> Any:
    named = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    named |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
    tokenizer = tokenizer_with(**named)
    tokenizer.pad_token = "<unk>"
    images = hf.Gemma4ImageProcessorPil(patch_size=PATCH, max_soft_tokens=70, pooling_kernel_size=2)
    processor = for_images(hf.Gemma4Processor)(None, images, tokenizer, None, image_seq_length=70)
    processor.video_settings = {"video_processor_type": "Gemma4VideoProcessor"}
    start, end, image, start_sound, end_sound, sound = ids_of(tokenizer, list(named.values()))
    text: dict[str, Any] = {"head_dim": 8, "global_head_dim": 8, "pad_token_id": 0, "sliding_window": 16}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "vocab_size": len(tokenizer)}
    text |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": len(tokenizer)}
    vision = {name: size for name, size in TOWER.items() if name != "image_size"}
    vision |= {"num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 64}
    config = hf.Gemma4Config(
        text_config=hf.Gemma4TextConfig(**TEXT | text),
        vision_config=hf.Gemma4VisionConfig(**vision),
        audio_config=None,
        boi_token_id=start,
        eoi_token_id=end,
        image_token_id=image,
        boa_token_id=start_sound,
        eoa_token_index=end_sound,
        audio_token_id=sound,
        video_token_id=ids_of(tokenizer, ["<|video|>"])[0],
    )
    return config, processor


def _idefics(config: str, processor: str, images: str) -> Any:
    tokenizer = tokenizer_with("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    whole = getattr(hf, processor)
    has_videos = "video_processor" in whole.get_attributes()
    image_processor = getattr(hf, images)(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    made = (for_images(whole) if has_videos else whole)(
        image_processor, tokenizer, **({"video_processor": None} if has_videos else {}), image_seq_len=4
    )
    if has_videos:
        made.video_settings = {"video_processor_type": "SmolVLMVideoProcessor"}
    built = getattr(hf, config)(
        vision_config=TOWER,
        text_config=hf.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        scale_factor=2,
        image_token_id=ids_of(tokenizer, ["<image>"])[0],
        pad_token_id=2,
    )
    return built, made


def _llava() -> Any:
    tokenizer = tokenizer_with("<image>")
    crop = {"crop_size": {"height": SIDE, "width": SIDE}, "size": {"shortest_edge": SIDE}}
    processor = hf.LlavaProcessor(
        hf.CLIPImageProcessorPil(**crop),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    (image,) = ids_of(tokenizer, ["<image>"])
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER),
        text_config=hf.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        image_token_index=image,
        image_token_id=image,
    )
    return config, processor


def _llava_next() -> Any:
    tokenizer = tokenizer_with("<image>")
    grid = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    crop = {"crop_size": {"height": SIDE, "width": SIDE}, "size": {"shortest_edge": SIDE}}
    processor = hf.LlavaNextProcessor(
        hf.LlavaNextImageProcessorPil(**crop, image_grid_pinpoints=grid),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    (image,) = ids_of(tokenizer, ["<image>"])
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER),
        text_config=hf.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        image_token_index=image,
        image_token_id=image,
        image_grid_pinpoints=grid,
    )
    return config, processor


def _llava_onevision() -> Any:
    tokenizer = tokenizer_with("<image>", "<video>")
    grid = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    processor = for_images(hf.LlavaOnevisionProcessor)(
        hf.LlavaOnevisionImageProcessorPil(**square(), image_grid_pinpoints=grid),
        tokenizer,
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
    )
    processor.video_settings = {"video_processor_type": "LlavaOnevisionVideoProcessor"}
    image, video = ids_of(tokenizer, ["<image>", "<video>"])
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=hf.Qwen2Config(**TEXT, vocab_size=len(tokenizer)),
        image_token_index=image,
        image_token_id=image,
        video_token_index=video,
        video_token_id=video,
        image_grid_pinpoints=grid,
    )
    return config, processor


_INTERN = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
_INTERN |= {"video_token": "<video>"}


def _internvl() -> Any:
    tokenizer = tokenizer_with(**_INTERN)
    size = {"height": SIDE, "width": SIDE}
    processor = for_images(hf.InternVLProcessor)(
        hf.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer,
        image_seq_length=4,
    )
    processor.video_settings = {"video_processor_type": "InternVLVideoProcessor"}
    vision = TOWER | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
    config = hf.InternVLConfig(
        vision_config=vision,
        text_config=hf.Qwen2Config(**TEXT, vocab_size=len(tokenizer)),
        image_token_id=ids_of(tokenizer, ["<IMG_CONTEXT>"])[0],
        image_seq_length=4,
    )
    return config, processor


_PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def _pixtral_processor(merged: int) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(*_PIXTRAL)
    images = hf.PixtralImageProcessorPil(size={"longest_edge": 2 * SIDE}, patch_size={"height": PATCH, "width": PATCH})
    return tokenizer, hf.PixtralProcessor(images, tokenizer, patch_size=PATCH, spatial_merge_size=merged)


def _mistral3() -> Any:
    tokenizer, processor = _pixtral_processor(2)
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**TOWER | {"image_size": 2 * SIDE, "head_dim": 8}),
        text_config=hf.MistralConfig(**TEXT, vocab_size=len(tokenizer), head_dim=8, sliding_window=None),
        image_token_index=ids_of(tokenizer, _PIXTRAL)[0],
        spatial_merge_size=2,
    )
    return config, processor


def _pixtral() -> Any:
    tokenizer, processor = _pixtral_processor(1)
    (image, *_) = ids_of(tokenizer, _PIXTRAL)
    config = hf.LlavaConfig(
        vision_config=hf.PixtralVisionConfig(**TOWER | {"image_size": 2 * SIDE, "head_dim": 8}),
        text_config=hf.MistralConfig(**TEXT, vocab_size=len(tokenizer), head_dim=8, sliding_window=None),
        image_token_index=image,
        image_token_id=image,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, processor


def _aya_vision() -> Any:
    names = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE")
    tokenizer = tokenizer_with(*names, "TILE_GLOBAL")
    tokenizer.pad_token = "<unk>"
    size = {"height": SIDE, "width": SIDE}
    processor = hf.AyaVisionProcessor(
        hf.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer,
        patch_size=PATCH,
        img_size=SIDE,
        downsample_factor=2,
    )
    config = hf.AyaVisionConfig(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=hf.Cohere2Config(**TEXT, vocab_size=len(tokenizer), head_dim=8, sliding_window=64),
        image_token_index=ids_of(tokenizer, ["<|IMG_PATCH|>"])[0],
        downsample_factor=2,
    )
    return config, processor


def _paligemma() -> Any:
    tokenizer = tokenizer_with()
    images = hf.SiglipImageProcessorPil(**square())
    images.image_seq_length = (SIDE // PATCH) ** 2
    processor = hf.PaliGemmaProcessor(images, tokenizer)
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=hf.GemmaConfig(**TEXT, vocab_size=len(tokenizer), head_dim=8),
        image_token_index=ids_of(tokenizer, ["<image>"])[0],
        projection_dim=32,
    )
    return config, processor


_GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"

IMAGE_FAMILIES: dict[str, ImageFamily] = {
    "qwen2_vl": ImageFamily("Qwen/Qwen2-VL-7B-Instruct", qwen2_vl, QWEN_IMAGE),
    "qwen2_5_vl": ImageFamily("Qwen/Qwen2.5-VL-7B-Instruct", qwen2_5_vl, QWEN_IMAGE),
    "qwen3_vl": ImageFamily("Qwen/Qwen3-VL-4B-Instruct", qwen3_vl, QWEN_IMAGE),
    "qwen3_vl_moe": ImageFamily("Qwen/Qwen3-VL-30B-A3B-Instruct", qwen3_vl_moe, QWEN_IMAGE),
    "gemma3": ImageFamily("google/gemma-3-4b-it", _gemma3, "<start_of_image>"),
    "gemma4": ImageFamily("google/gemma-4-E4B-it", _gemma4, "<|image|>"),
    "smolvlm": ImageFamily(
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        lambda: _idefics("SmolVLMConfig", "SmolVLMProcessor", "SmolVLMImageProcessorPil"),
        "<image>",
        "num2words",
    ),
    "idefics3": ImageFamily(
        "HuggingFaceM4/Idefics3-8B-Llama3",
        lambda: _idefics("Idefics3Config", "Idefics3Processor", "Idefics3ImageProcessorPil"),
        "<image>",
    ),
    "llava": ImageFamily("llava-hf/llava-1.5-7b-hf", _llava, "<image>"),
    "llava_next": ImageFamily("llava-hf/llava-v1.6-mistral-7b-hf", _llava_next, "<image>"),
    "llava_onevision": ImageFamily("llava-hf/llava-onevision-qwen2-7b-ov-hf", _llava_onevision, "<image>"),
    "internvl": ImageFamily("OpenGVLab/InternVL3-8B-hf", _internvl, "<IMG_CONTEXT>"),
    "mistral3": ImageFamily("mistralai/Mistral-Small-3.1-24B-Instruct-2503", _mistral3, "[IMG]"),
    "pixtral": ImageFamily("mistral-community/pixtral-12b", _pixtral, "[IMG]"),
    "glm4v": ImageFamily("zai-org/GLM-4.1V-9B-Thinking", glm4v, _GLM_IMAGE),
    "glm4v_moe": ImageFamily("zai-org/GLM-4.5V", glm4v_moe, _GLM_IMAGE),
    "glm46v": ImageFamily("zai-org/GLM-4.6V-Flash", glm46v, _GLM_IMAGE),
    "aya_vision": ImageFamily("CohereLabs/aya-vision-8b", _aya_vision, "<image>"),
    "paligemma": ImageFamily("google/paligemma2-3b-pt-224", _paligemma, "<image>"),
}
