"""Loads the processor of a model of image and text, and asks it for the model's inputs of one image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, PaliGemmaProcessor, PreTrainedTokenizerBase
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, cached_file

from configs.training import TrainConfig
from data.images.opening import import_pillow
from data.images.shapes import Size
from data.processors.pixel_settings import with_pixel_settings
from data.processors.sentencepiece_files import check_conversion, find_sentencepiece
from data.processors.tokenizer_loading import add_special_tokens, check_special_tokens, tokenizer_of
from data.processors.without_videos import load_without_videos
from utils.chat_rendering import render_chat
from utils.errors import ConfigError, in_one_line
from utils.hub import check_on_hub, explain
from utils.rust_panics import panics_as_errors

PLACE = "<image>"  # of an image in a text of LLaVA's form
BLANK_SIZE = (32, 32)  # pixels of the image of a batch without rows


def load_processor(train_config: TrainConfig) -> Any:
    """The processor of `--tokenizer_name`, or of the model if that is unset; images go through Pillow.

    Raises:
        ConfigError: if there is none, it cannot be loaded, or it makes no inputs of an image.
    """
    import_pillow()
    name = train_config.tokenizer_name or train_config.model_name
    flag = "--tokenizer_name" if train_config.tokenizer_name else "--model_name"
    if train_config.tokenizer_name and not Path(name).expanduser().is_dir():
        check_on_hub(flag, name, "model")
    processor = read_processor(name, flag, trust_remote_code=train_config.trust_remote_code)
    if processor.tokenizer.eos_token_id is None:
        raise ConfigError(f"{flag}: the tokenizer of {name!r} has no end token (eos_token); captions would never end")
    processor = with_pixel_settings(processor, train_config)
    _try(processor, name, flag)
    add_special_tokens(processor.tokenizer, train_config)
    processor.tokenizer.template_date = train_config.template_date
    return processor


def read_processor(name: str, flag: str, *, trust_remote_code: bool = False) -> Any:
    """The processor in a folder or on the hub, tried on a blank image.

    Raises:
        ConfigError: if there is none, it cannot be loaded, or it makes no inputs of an image.
    """
    sentencepiece_model = find_sentencepiece(name, flag)
    try:
        with panics_as_errors():
            processor = load_without_videos(name, trust_remote_code=trust_remote_code)
            if processor is None:
                processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code, backend="pil")
            if isinstance(tokenizer := tokenizer_of(processor), PreTrainedTokenizerBase):
                check_special_tokens(tokenizer)
    except Exception as error:
        remedy = "give a folder or hub name that has one with --tokenizer_name"
        for package in ("torchvision", "num2words"):
            if package in f"{error} {error.__context__}".lower():  # transformers' own may not name it
                source = "-r requirements-torchvision.txt" if package == "torchvision" else package
                remedy = f"the processor of this family needs {package}: pip install {source}"
        raise ConfigError(f"{flag}: no processor could be loaded from {name!r} ({explain(error)}); {remedy}") from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise ConfigError(
            f"{flag}: {name!r} has no processor for images, only a {type(processor).__name__}; copy the processor's "
            "files (preprocessor_config.json, processor_config.json) there, or name it with --tokenizer_name"
        )
    if sentencepiece_model is not None:
        check_conversion(processor.tokenizer, sentencepiece_model, name, flag)
    _try(processor, name, flag)
    return processor


def _try(processor: Any, name: str, flag: str) -> None:
    try:
        image_inputs(processor, blank_image(), prompt_text(processor, ""))
    except Exception as error:
        raise ConfigError(
            f"{flag}: the processor of {name!r} makes no inputs of an image ({in_one_line(error)}); give a newer one "
            "with --tokenizer_name"
        ) from error


def has_processor(name: str) -> bool:
    """Whether a folder, or a model on the hub, has the files of a processor for images."""
    files = (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME)
    try:
        return any(cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in files)
    except OSError:  # no folder, and the hub does not answer
        return False


def blank_image(size: Size = BLANK_SIZE) -> Any:
    return import_pillow().new("RGB", size)


def refusal_of_size(processor: Any, size: Size) -> str | None:
    """Why the processor takes no image of this size; None if it takes a blank one."""
    try:
        image_inputs(processor, blank_image(size), prompt_text(processor, ""))
    except Exception as error:  # each processor has its own
        return in_one_line(error)
    return None


def prompt_text(processor: Any, prompt: str) -> str:
    """The text before a caption: a user's turn with the image, if the processor has a chat template.

    Otherwise the prompt after the image's placeholder, which some processors write themselves. A prompt in LLaVA's form
    says by `<image>` where the image is, whatever the model's own token for it.
    """
    before, place, after = prompt.partition(PLACE) if prompt.count(PLACE) == 1 else ("", "", prompt)
    placeholder = getattr(processor, "image_token", None)
    placeholder = getattr(placeholder, "content", placeholder)
    if getattr(processor, "chat_template", None):
        texts = [[{"type": "text", "text": text}] if text else [] for text in (before, after)]
        content = [*texts[0], {"type": "image"}, *texts[1]]
        messages = [{"role": "user", "content": content}]
        # Not by the processor's own method: SmolVLM's asks its part for videos, which is left out.
        values = {**processor.tokenizer.special_tokens_map, "add_generation_prompt": True}
        return render_chat(processor.chat_template, messages, processor.tokenizer, **values)[0][0]
    writes_it_itself = hasattr(processor, "num_query_tokens")  # BLIP-2 and InstructBLIP
    if place and placeholder != PLACE:
        return f"{before}{'' if writes_it_itself else placeholder or ''}{after}"
    return prompt if writes_it_itself or not placeholder or placeholder in prompt else f"{placeholder}{prompt}"


def image_inputs(processor: Any, image: Any, text: str) -> dict[str, torch.Tensor]:
    """The model's inputs of one image and the text before its caption, a batch of one without padding.

    Raises:
        Exception: whatever the processor raises, and ValueError if it leaves the image out.
    """
    tokenizer = processor.tokenizer
    has_start = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)  # a chat template's
    options = {"add_special_tokens": False} if has_start else {}
    inputs = processor(images=[image], text=[text], return_tensors="pt", **options)
    if getattr(processor, "num_query_tokens", 0) is None:
        raise ValueError("processor_config.json has no num_query_tokens, so it writes no image tokens")
    # PaliGemma's processor adds labels of its own, of the prompt.
    return {name: value for name, value in inputs.items() if torch.is_tensor(value) and name != "labels"}


def learned_token_type(processor: Any) -> int:
    """The token type of text that is learned.

    For PaliGemma type 0 is the prefix, whose tokens see each other both ways, and type 1 the suffix, which is causal.
    For others type 1 is an image.
    """
    return int(isinstance(processor, PaliGemmaProcessor))


def num_end_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many tokens the tokenizer appends to a text by itself."""
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    starts = [start for start in range(len(whole) - len(plain) + 1) if whole[start : start + len(plain)] == plain]
    return len(whole) - starts[0] - len(plain) if starts else 0
