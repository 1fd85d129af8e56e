"""Chat templates of models of image and text, in the form of their families' own, and conversations read with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.images.samples import ImageSample, ImageSamples
from data.pipeline import load_sequences
from data.tokens.labels import IGNORE_INDEX
from tasks.image_text import ImageText
from tests.helpers.image_models import MODELS, save_image_model

_ROLES = "{%% for m in messages %%}{{ '<s>' + m['role'] + '\n' }}%s{{ '</s>\n' }}{%% endfor %%}"
_PROMPT = "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
_PARTS = (
    "{%% if m['content'] is string %%}{{ m['content'] }}{%% else %%}{%% for c in m['content'] %%}"
    "{%% if c['type'] == 'image' %%}%s{%% elif 'text' in c %%}{{ c['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}"
)
# LLaVA's writes the images of a turn first, and takes no content that is a text.
_IMAGES_FIRST = (
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}"
)
TEMPLATES = {
    "qwen2_vl": _ROLES % (_PARTS % "<|vision_start|><|image_pad|><|vision_end|>") + _PROMPT,
    "qwen2_5_vl": _ROLES % (_PARTS % "<|vision_start|><|image_pad|><|vision_end|>") + _PROMPT,
    "chat_learner": _ROLES % (_PARTS % "<|vision_start|><|image_pad|><|vision_end|>") + _PROMPT,
    "gemma3": _ROLES % (_PARTS % "<start_of_image>") + _PROMPT,
    "idefics3": _ROLES % (_PARTS % "<image>") + _PROMPT,
    "smolvlm": _ROLES % (_PARTS % "<image>") + _PROMPT,
    "llava": _ROLES % _IMAGES_FIRST + _PROMPT,
}


def chat_processor(name: str) -> Any:
    """The processor of a tiny model, with its family's kind of template."""
    processor = MODELS[name]()[1]
    processor.chat_template = TEMPLATES[name]
    return processor


def save_chat_model(name: str, folder: Path, **options: Any) -> Path:
    """A tiny model with random weights, whose processor has a template."""
    save_image_model(name, folder, **options)
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    return folder


def read_chats(
    processor: Any, path: Path | str, *, context_length: int = 512, truncation: str = "right", **settings: Any
) -> ImageSamples:
    """The training samples of a file, as a run reads them."""
    config = DATASETS["chat_dataset"](data_path=str(path), **settings)
    model_config: Any = type("Config", (), {"get_text_config": lambda self: self})()
    train: Any = type("Train", (), {"max_text_length": 50})()
    reading = ImageText().make_reading(processor, model_config, train, (context_length,))

    def build(rows: Any, name: str) -> Any:
        return reading.build_sequences(rows, name=name, context_length=context_length, truncation=truncation)

    function = find_dataset_function("chat_dataset", config)
    samples = load_sequences(function, config, processor, "train", split_slice=None, build=build, encode=reading.encode)
    assert isinstance(samples, ImageSamples)
    return samples


def text_of(processor: Any, sample: ImageSample) -> str:
    """All tokens of a sample as text."""
    return str(processor.tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=False))


def learned_of(processor: Any, sample: ImageSample) -> list[str]:
    """The texts that are learned, one for each run of labels."""
    has_loss = np.concatenate([[False], sample.labels != IGNORE_INDEX, [False]])
    edges = np.flatnonzero(np.diff(has_loss.astype(int)))
    return [
        str(processor.tokenizer.decode(sample.labels[first:last].tolist(), skip_special_tokens=False))
        for first, last in zip(edges[::2], edges[1::2], strict=True)
    ]


def colours_of(sample: ImageSample) -> list[tuple[int, int, int]]:
    """The colour in the middle of each of its images, as the model's processor gets them."""
    return [image.getpixel((image.width // 2, image.height // 2)) for image in sample.open_images()]


def flat_picture(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 24)) -> Path:
    """A picture of one colour."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)
    return file
