"""How large images may be: what a processor takes, what it saves, and what tokens are cached under."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from configs.training import TrainConfig
from data.dataset_functions.function_key import function_key
from data.processors.image_reading import ImageReader
from data.processors.pixel_settings import with_pixel_settings
from data.processors.processor_loading import read_processor
from data.processors.written_images import ImageWriter
from tests.helpers.image_chats import chat_processor, save_chat_model
from utils.errors import ConfigError

LARGE = (300, 200)


def num_tokens(processor: Any) -> int:
    writer = ImageWriter.of(processor)
    return writer.num_tokens(writer.texts([LARGE])[0])


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(model_name="M", **settings)


def test_max_pixels_and_min_pixels_of_a_family_that_has_them(tmp_path: Path) -> None:
    found = []
    for settings in ({}, {"max_pixels": 4096}, {"max_pixels": 512}, {"max_pixels": 4096, "min_pixels": 4000}):
        processor = with_pixel_settings(chat_processor("qwen2_vl"), config(**settings))
        found.append(num_tokens(processor))
    assert found[1] > found[0] > found[2]
    assert found[3] >= found[1]


def test_they_are_saved_with_the_processor(tmp_path: Path) -> None:
    folder = save_chat_model("qwen2_vl", tmp_path)
    processor = with_pixel_settings(read_processor(str(folder), "--model_name"), config(max_pixels=4096))
    processor.save_pretrained(folder)
    assert num_tokens(read_processor(str(folder), "--model_name")) == num_tokens(processor) > 4


def test_other_settings_by_the_names_of_the_processor() -> None:
    processor = chat_processor("idefics3")
    before = num_tokens(processor)
    asked = config(image_processor=("size.longest_edge=128", "do_image_splitting=True"))
    assert num_tokens(with_pixel_settings(processor, asked)) > before
    asked = config(image_processor=("do_image_splitting=False",))
    assert num_tokens(with_pixel_settings(chat_processor("idefics3"), asked)) < before


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llava", {"max_pixels": 99}, "--max_pixels: CLIPImageProcessorPil makes images as large as its own settings"),
        ("llava", {"image_processor": ("nothing=1",)}, "--image_processor: 'nothing=1' is no setting of CLIP"),
        ("llava", {"image_processor": ("size.shortest_edge=x",)}, "is no setting of CLIPImageProcessorPil; it has"),
        ("llava", {"image_processor": ("do_resize=3",)}, "is no setting of"),
        ("qwen2_vl", {"min_pixels": 900, "max_pixels": 800}, "--min_pixels: 900 is more than max_pixels 800"),
        ("qwen2_vl", {"max_pixels": 100}, "--max_pixels: 100 is less than min_pixels 256 of Qwen2VLImageProcessorPil"),
        (
            "qwen2_vl",
            {"min_pixels": 9999},
            "--min_pixels: 9999 is more than max_pixels 1024 of Qwen2VL",
        ),
        ("qwen2_vl", {"image_processor": ("patch_size=16",)}, "patch_size is what the model's weights were made for"),
        ("gemma3", {"min_pixels": 9}, "give one of these with --image_processor NAME=VALUE: size="),
    ],
)
def test_what_a_processor_does_not_have_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_pixel_settings(chat_processor(name), config(**settings))
    assert message in str(refused.value)


def test_tokens_are_cached_under_the_settings_and_not_under_what_was_written_before() -> None:
    def key(writer: ImageWriter) -> str:
        return function_key(partial(print, ImageReader(writer, None)))

    one, other = (ImageWriter.of(chat_processor("qwen2_vl")) for _ in range(2))
    small = ImageWriter.of(with_pixel_settings(chat_processor("qwen2_vl"), config(max_pixels=512)))
    before = key(one)
    one.texts([LARGE])
    assert key(one) == before == key(other)
    assert key(small) != before
