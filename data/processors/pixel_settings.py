"""How large a processor lets images be: `--max_pixels`, `--min_pixels`, and its own settings by their names.

They are saved with the processor, so a server that loads the trained model sees images in the same sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from configs.training import TrainConfig
from utils.errors import ConfigError, in_one_line

_OF_WEIGHTS = ("patch_size", "merge_size", "temporal_patch_size")


def with_pixel_settings(processor: Any, train_config: TrainConfig) -> Any:
    """The processor with the sizes of images that were asked for.

    Raises:
        ConfigError: if it has no such setting, or does not take the value.
    """
    limits = {name: value for name in ("min_pixels", "max_pixels") if (value := getattr(train_config, name))}
    own = processor.image_processor
    if limits and not _has_pixel_limits(own):
        raise ConfigError(
            f"--{next(iter(limits))}: {type(own).__name__} makes images as large as its own settings say, and has no "
            f"limit of pixels; give one of these with --image_processor NAME=VALUE: {_described(own)}"
        )
    _check_limits(limits, own)
    changed = own.to_dict()
    for pair in train_config.image_processor:
        name, equals, value = pair.partition("=")
        if name in _OF_WEIGHTS and equals:
            raise ConfigError(f"--image_processor: {name} is what the model's weights were made for; leave it out")
        if not equals or not _set(changed, name.split("."), value):
            raise ConfigError(
                f"--image_processor: {pair!r} is no setting of {type(own).__name__}; it has {_described(own)}"
            )
    if limits or train_config.image_processor:
        flag = "image_processor" if train_config.image_processor else next(iter(limits))
        try:
            processor.image_processor = type(own).from_dict(changed, **limits)
        except Exception as error:  # each processor has its own
            raise ConfigError(f"--{flag}: {type(own).__name__} does not take it ({in_one_line(error)})") from error
    return processor


def _check_limits(limits: Mapping[str, int], own: Any) -> None:
    """
    Raises:
        ConfigError: if images would have more pixels at least than at most.
    """
    size = own.to_dict().get("size") or {}
    saved = {"min_pixels": size.get("shortest_edge") or 0, "max_pixels": size.get("longest_edge") or float("inf")}
    least, most = ({**saved, **limits}[name] for name in ("min_pixels", "max_pixels"))
    if not limits or least <= most:
        return
    wrong, other = ("min_pixels", most) if "min_pixels" in limits else ("max_pixels", least)
    than = f"more than max_pixels {other}" if wrong == "min_pixels" else f"less than min_pixels {other}"
    whose = "" if len(limits) == 2 else f" of {type(own).__name__}"
    remedy = "give less" if wrong == "min_pixels" else "give more, or --min_pixels, too"
    raise ConfigError(f"--{wrong}: {limits[wrong]} is {than}{whose}; {remedy}")


def _has_pixel_limits(image_processor: Any) -> bool:
    """Whether a family scales images to a number of pixels, as Qwen2-VL's does."""
    kwargs = getattr(type(image_processor), "valid_kwargs", None)
    return "max_pixels" in getattr(kwargs, "__annotations__", {})


def _set(settings: dict[str, Any], names: list[str], text: str) -> bool:
    """Give a setting this value, if there is one and the value is of its kind."""
    *outer, last = names
    for name in outer:
        inner = settings.get(name)
        if not isinstance(inner, Mapping):
            return False
        settings[name] = settings = {**inner}
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        value = text
    if last not in settings or (settings[last] is not None and not _are_alike(value, settings[last])):
        return False
    settings[last] = value
    return True


def _are_alike(value: Any, known: Any) -> bool:
    if isinstance(known, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(known, bool)
    return isinstance(value, type(known)) or (isinstance(value, int | float) and isinstance(known, int | float))


def _described(image_processor: Any) -> str:
    """Its settings that make images larger or smaller."""
    settings = image_processor.to_dict()
    words = ("size", "pixels", "tiles", "split", "patches", "crop", "resize", "pan_and_scan", "grid")
    found = {name: value for name, value in settings.items() if any(word in name for word in words)}
    return ", ".join(f"{name}={_plain(value)}" for name, value in found.items() if value is not None)


def _plain(value: Any) -> Any:
    return {key: part for key, part in dict(value).items() if part is not None} if isinstance(value, Mapping) else value
