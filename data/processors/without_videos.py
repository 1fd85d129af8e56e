"""Processors that read images and videos, without torchvision.

transformers reads videos with torchvision alone, and loads such a processor whole or not at all, with `backend="pil"`
never. So here it has no part for videos; that part's settings are kept, and saved again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig

# From its own file: the name in `transformers` asks for torchvision up to 5.17, whichever backend is wanted.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import get_video_processor_config

from data.processors.tokenizer_loading import read_tokenizer

_VIDEOS = "video_processor"


def load_without_videos(name: str, *, trust_remote_code: bool) -> Any:
    """The processor in a folder or on the hub, for images alone; None if it is none of images and videos.

    Raises:
        Exception: whatever transformers raises.
    """
    whole = _processor_class(name, trust_remote_code)
    if whole is None or sorted(whole.get_attributes()) != ["image_processor", "tokenizer", _VIDEOS]:
        return None
    parts: dict[str, Any] = {
        "image_processor": AutoImageProcessor.from_pretrained(name, backend="pil"),
        "tokenizer": read_tokenizer(name, trust_remote_code=trust_remote_code),
        _VIDEOS: None,
    }
    settings, _ = whole.get_processor_dict(name)
    processor = for_images(whole).from_args_and_dict([parts[part] for part in whole.get_attributes()], settings)
    processor.video_settings = get_video_processor_config(name)
    return processor


def _processor_class(name: str, trust_remote_code: bool) -> Any:
    """The class of this model type's processor; None if transformers knows none, or there is no config.json."""
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # the folder may hold a processor alone
        return None
    return PROCESSOR_MAPPING.get(type(config), None)


@cache
def for_images(whole: Any) -> Any:
    """The class of a processor like `whole`, a transformers class, without its part for videos."""

    class Processor(whole):
        video_settings: Mapping[str, Any] = MappingProxyType({})

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [part for part in super().get_attributes() if part != _VIDEOS]

        def to_dict(self) -> dict[str, Any]:
            return super().to_dict() | ({_VIDEOS: dict(self.video_settings)} if self.video_settings else {})

        def __reduce__(self) -> Any:  # for the loader's workers
            return _restored, (whole, vars(self))

    Processor.__name__ = whole.__name__  # it is saved
    return Processor


def _restored(whole: Any, state: dict[str, Any]) -> Any:
    processor = for_images(whole).__new__(for_images(whole))
    vars(processor).update(state)
    return processor
