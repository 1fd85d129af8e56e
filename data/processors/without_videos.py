"""Processors that read images and videos, and sounds besides, without torchvision.

transformers reads videos with torchvision alone, and loads such a processor whole or not at all, with `backend="pil"`
never. So here it has no part for videos, nor one for sounds; their settings are kept, and saved again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, ProcessorMixin

# From its own file: the name in `transformers` asks for torchvision up to 5.17, whichever backend is wanted.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import get_video_processor_config

from data.processors.tokenizer_loading import read_tokenizer

_VIDEOS, _SOUNDS = "video_processor", "feature_extractor"
_LEFT_OUT = (_VIDEOS, _SOUNDS)


def load_without_videos(name: str, *, trust_remote_code: bool) -> Any:
    """The processor in a folder or on the hub, for images alone; None if it is none of images and videos.

    Raises:
        Exception: whatever transformers raises.
    """
    whole = _processor_class(name, trust_remote_code)
    names = [] if whole is None else whole.get_attributes()
    if _VIDEOS not in names or {*names} - {*_LEFT_OUT} != {"image_processor", "tokenizer"}:
        return None
    parts: dict[str, Any] = {
        "image_processor": AutoImageProcessor.from_pretrained(name, backend="pil"),
        "tokenizer": read_tokenizer(name, trust_remote_code=trust_remote_code),
        **dict.fromkeys(_LEFT_OUT),
    }
    settings, _ = whole.get_processor_dict(name)
    processor = for_images(whole).from_args_and_dict([parts[part] for part in names], settings)
    processor.video_settings = get_video_processor_config(name)
    processor.sound_settings = settings.get(_SOUNDS, {})
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
    """The class of a processor like `whole`, a transformers class, without its parts for videos and sounds."""

    class Processor(whole, _WithoutParts):
        video_settings: Mapping[str, Any] = MappingProxyType({})
        sound_settings: Mapping[str, Any] = MappingProxyType({})

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [part for part in super().get_attributes() if part not in _LEFT_OUT]

        def to_dict(self) -> dict[str, Any]:
            kept = {_VIDEOS: dict(self.video_settings), _SOUNDS: dict(self.sound_settings)}
            return super().to_dict() | {part: settings for part, settings in kept.items() if settings}

        def __reduce__(self) -> Any:  # for the loader's workers
            return _restored, (whole, vars(self))

    Processor.__name__ = whole.__name__  # it is saved
    return Processor


class _WithoutParts(ProcessorMixin):
    """Stands between a processor's class and transformers' own, which takes no part that it does not name."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **{name: part for name, part in named.items() if name not in _LEFT_OUT})


def _restored(whole: Any, state: dict[str, Any]) -> Any:
    processor = for_images(whole).__new__(for_images(whole))
    vars(processor).update(state)
    return processor
