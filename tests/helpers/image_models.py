"""Tiny random models of image and text with their processors, and pictures to caption."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from benchmarks.families.image_questions import COLOURS, COUNTS, SHAPES, SIDE, draw
from data.processors.without_videos import for_images
from tools.make_tiny_model import make_tokenizer

IMAGE_SIZE, PATCH = SIDE, 8
TEXT_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = TEXT_SIZES | {"intermediate_size": 48, "image_size": IMAGE_SIZE, "patch_size": PATCH}
LLAMA = TEXT_SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 256}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
needs_num2words = pytest.mark.skipif(find_spec("num2words") is None, reason="SmolVLM's processor needs num2words")
VIDEOS = {"video_processor_type": "Qwen2VLVideoProcessor", "max_frames": 7}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def captioned(number: int, seed: int = 0) -> list[tuple[Image.Image, str]]:
    """So many pictures and what they show: "two red circles"."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        count, colour, shape = (int(generator.integers(3)), *map(generator.choice, (list(COLOURS), SHAPES)))
        picture = draw(count + 1, str(colour), str(shape), generator)
        found.append((picture, f"{COUNTS[count]} {colour} {shape}{'s' if count else ''}"))
    return found


def save_pictures(
    folder: Path, number: int, seed: int = 0, split: str = "train", widths: Sequence[int] = (IMAGE_SIZE,)
) -> Path:
    """The pictures as files, with a JSON line for each: `image`, `text`. Returns the JSON file.

    Args:
        widths: of the pictures, in turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index, (picture, text) in enumerate(captioned(number, seed)):
        file = folder / f"{split}-{index}.png"
        picture.resize((widths[index % len(widths)], IMAGE_SIZE)).save(file)
        lines.append(json.dumps({"image": file.name, "text": text}))
    table = folder / f"{split}.jsonl"
    table.write_text("\n".join(lines) + "\n")
    return table


def caption_tokenizer(*more: str, **named: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the captions' words, with more special tokens."""
    texts = [text for _, text in captioned(200)]
    tokenizer = make_tokenizer(iter(texts), 400)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named,
    )
    tokenizer.add_tokens([transformers.AddedToken(token, special=True, normalized=False) for token in more])
    return tokenizer


def _square(**more: Any) -> dict[str, Any]:
    return {"size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE}} | more


def learner() -> tuple[Any, Any]:
    """A BLIP-2 of one layer each, with weights large enough that it learns from the first step on."""
    sizes, spread = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}, 0.15
    processor = transformers.Blip2Processor(
        transformers.BlipImageProcessorPil(**_square()), caption_tokenizer(), num_query_tokens=8
    )
    text = transformers.OPTConfig(
        **sizes | IDS,
        ffn_dim=128,
        dropout=0.0,
        max_position_embeddings=64,
        word_embed_proj_dim=64,
        init_std=spread,
        vocab_size=len(processor.tokenizer),
    )
    vision = sizes | {"intermediate_size": 128, "image_size": IMAGE_SIZE, "patch_size": PATCH}
    qformer = sizes | {"intermediate_size": 128, "encoder_hidden_size": 64, "cross_attention_frequency": 1}
    config = transformers.Blip2Config(
        vision_config=vision | {"initializer_range": spread},
        qformer_config=qformer | NO_DROPOUT | {"initializer_range": spread},
        text_config=text.to_dict(),
        num_query_tokens=8,
        image_token_index=processor.tokenizer.convert_tokens_to_ids("<image>"),
        initializer_range=spread,
    )
    return config, processor


def chat_learner() -> tuple[Any, Any]:
    """A Qwen2-VL of one layer of vision and two of text, with weights large enough that it learns from the first step
    on."""
    config, processor = _qwen2_vl()
    spread = {"initializer_range": 0.15}
    vision = {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "depth": 1, "num_heads": 4, "patch_size": PATCH}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 4}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = LLAMA | text | IDS | {"vocab_size": len(processor.tokenizer), "rope_parameters": rope}
    learner = transformers.Qwen2VLConfig(
        vision_config=vision | spread,
        text_config=text | spread,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=config.vision_start_token_id,
        vision_end_token_id=config.vision_end_token_id,
    )
    return learner, processor


def _blip2(text: Callable[[int], Any]) -> tuple[Any, Any]:
    processor = transformers.Blip2Processor(
        transformers.BlipImageProcessorPil(**_square()), caption_tokenizer(), num_query_tokens=4
    )
    qformer = TEXT_SIZES | {"intermediate_size": 48, "encoder_hidden_size": 32, "cross_attention_frequency": 2}
    config = transformers.Blip2Config(
        vision_config=VISION,
        qformer_config=qformer | NO_DROPOUT,
        text_config=text(len(processor.tokenizer)).to_dict(),
        num_query_tokens=4,
        image_token_index=processor.tokenizer.convert_tokens_to_ids("<image>"),
    )
    return config, processor


def _opt(vocab_size: int) -> Any:
    return transformers.OPTConfig(
        **TEXT_SIZES | IDS,
        ffn_dim=48,
        dropout=0.0,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        vocab_size=vocab_size,
    )


def _t5(vocab_size: int) -> Any:
    return transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        initializer_factor=0.1,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
        vocab_size=vocab_size,
    )


def _llava() -> tuple[Any, Any]:
    tokenizer = caption_tokenizer("<image>")
    crop = {"crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE}, "size": {"shortest_edge": IMAGE_SIZE}}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(**crop),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template="{% for m in messages %}USER: {% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<image>\n{% else %}{{ c['text'] }}{% endif %}{% endfor %} ASSISTANT:{% endfor %}",
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**LLAMA | IDS, vocab_size=len(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return config, processor


def _gemma3() -> tuple[Any, Any]:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = caption_tokenizer(**named)
    image_id = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(**_square()), tokenizer, image_seq_length=4
    )
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=transformers.Gemma3TextConfig(
            **LLAMA | IDS, vocab_size=len(tokenizer), head_dim=8, query_pre_attn_scalar=8, sliding_window=64
        ),
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=image_id,
    )
    return config, processor


def _paligemma() -> tuple[Any, Any]:
    tokenizer = caption_tokenizer()
    image_processor = transformers.SiglipImageProcessorPil(**_square())
    image_processor.image_seq_length = (IMAGE_SIZE // PATCH) ** 2
    processor = transformers.PaliGemmaProcessor(image_processor, tokenizer)
    text = transformers.GemmaConfig(**LLAMA | IDS, vocab_size=len(tokenizer), head_dim=8)
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=32,
    )
    return config, processor


def _mllama() -> tuple[Any, Any]:
    tokenizer = caption_tokenizer("<|image|>", image_token="<|image|>")
    processor = transformers.MllamaProcessor(
        transformers.MllamaImageProcessorPil(**_square(), max_image_tiles=2), tokenizer
    )
    vision = VISION | {
        "num_global_layers": 1,
        "max_num_tiles": 2,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [1],
    }
    vision |= {"supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "attention_heads": 4}
    text = LLAMA | IDS | {"vocab_size": len(tokenizer), "cross_attention_layers": [1]}
    config = transformers.MllamaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<|image|>")
    )
    return config, processor


def _idefics1() -> tuple[Any, Any]:
    """Its text reads the image through cross-attention, behind gates that are closed in a new model."""
    tokenizer = caption_tokenizer("<image>", "<fake_token_around_image>")
    tokenizer.pad_token = "<unk>"
    processor = transformers.IdeficsProcessor(
        transformers.IdeficsImageProcessorPil(image_size=IMAGE_SIZE), tokenizer, image_size=IMAGE_SIZE
    )
    vision = VISION | {"embed_dim": VISION["hidden_size"]}
    config = transformers.IdeficsConfig(
        **TEXT_SIZES | IDS,
        vocab_size=len(tokenizer) - 2,
        additional_vocab_size=2,
        intermediate_size=48,
        max_position_embeddings=256,
        alpha_initializer="ones",
        vision_config={name: size for name, size in vision.items() if name != "hidden_size"},
    )
    return config, processor


def _git() -> tuple[Any, Any]:
    """A model that puts the image's positions in front of the text's."""
    tokenizer = caption_tokenizer(cls_token="<s>", sep_token="</s>")
    image_processor = transformers.CLIPImageProcessorPil(**_square(), do_center_crop=False)
    processor = transformers.GitProcessor(image_processor, tokenizer)
    config = transformers.GitConfig(
        vision_config=VISION, **TEXT_SIZES | NO_DROPOUT | IDS, intermediate_size=48, vocab_size=len(tokenizer)
    )
    return config, processor


def _idefics3() -> tuple[Any, Any]:
    return _idefics(transformers.Idefics3Config, transformers.Idefics3Processor, transformers.Idefics3ImageProcessorPil)


def _smolvlm() -> tuple[Any, Any]:
    """Its processor needs num2words."""
    config, processor = _idefics(
        transformers.SmolVLMConfig, for_images(transformers.SmolVLMProcessor), transformers.SmolVLMImageProcessorPil
    )
    processor.video_settings = VIDEOS
    return config, processor


def _idefics(config_class: Any, processor_class: Any, image_processor_class: Any) -> tuple[Any, Any]:
    tokenizer = caption_tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    image_processor = image_processor_class(
        size={"longest_edge": 2 * IMAGE_SIZE}, max_image_size={"longest_edge": IMAGE_SIZE}
    )
    videos = {} if processor_class is transformers.Idefics3Processor else {"video_processor": None}
    processor = processor_class(image_processor, tokenizer, **videos, image_seq_len=4)
    config = config_class(
        vision_config=VISION,
        text_config=transformers.LlamaConfig(**LLAMA | IDS, vocab_size=len(tokenizer)),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=2,
    )
    return config, processor


def _qwen(config_class: Any, processor_class: Any, vision: dict[str, Any]) -> tuple[Any, Any]:
    marks = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    tokenizer = caption_tokenizer(*marks)
    processor = for_images(processor_class)(
        transformers.Qwen2VLImageProcessorPil(patch_size=PATCH, min_pixels=256, max_pixels=IMAGE_SIZE**2),
        tokenizer,
        chat_template="{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}",
    )
    processor.video_settings = VIDEOS
    start, image, end, video = map(tokenizer.convert_tokens_to_ids, marks)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    config = config_class(
        vision_config=vision | {"depth": 2, "num_heads": 4, "patch_size": PATCH},
        text_config=LLAMA | IDS | {"vocab_size": len(tokenizer), "rope_parameters": rope},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return config, processor


def _qwen2_vl() -> tuple[Any, Any]:
    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    return _qwen(transformers.Qwen2VLConfig, transformers.Qwen2VLProcessor, vision)


def _qwen2_5_vl() -> tuple[Any, Any]:
    windows = {"window_size": 2 * PATCH, "fullatt_block_indexes": [1]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, **windows}
    return _qwen(transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLProcessor, vision)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "blip2_opt": lambda: _blip2(_opt),
    "blip2_t5": lambda: _blip2(_t5),
    "llava": _llava,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "mllama": _mllama,
    "git": _git,
    "idefics1": _idefics1,
    "idefics3": _idefics3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "smolvlm": _smolvlm,
    "learner": learner,
    "chat_learner": chat_learner,
}


def save_image_model(
    name: str, folder: Path, seed: int = 0, *, scale: float = 3.0, text_config: Mapping[str, Any] | None = None
) -> Path:
    """The model and its processor; random weights, large enough that what is seen changes what is said.

    Args:
        text_config: other values in the config of the language model.
    """
    config, processor = MODELS[name]()
    vars(config.get_text_config()).update(text_config or {})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            if parameter.dim() == 3:  # queries, which some begin as zeros
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
