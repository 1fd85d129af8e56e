"""Freezing: the first layers, or whole parts of a model of image and text, keep their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from transformers import PreTrainedModel

from configs.training import TrainConfig
from policies.wrapping import find_layers
from utils.errors import ConfigError
from utils.model_parts import has_vision, language_part, qformer_part, vision_part
from utils.wording import plural

PARTS: dict[str, Callable[[PreTrainedModel], Sequence[nn.Module | nn.Parameter]]] = {
    "freeze_vision": vision_part,
    "freeze_qformer": qformer_part,
    "freeze_language_model": language_part,
}
"""The part of a model of image and text that each flag freezes."""


def freeze_layers(model: nn.Module, backbone: Sequence[nn.Module], num_layers: int) -> None:
    """Freeze the first `num_layers` layers of each part of the backbone, with their adapters.

    Parameters outside the layers stay trainable, embeddings included. If the embeddings are trained, gradients pass
    through the frozen layers; under LoRA, which trains nothing below them, they end above.

    Args:
        model: the whole model, with its adapters.
        backbone: the submodules that contain the counted layers: a decoder, or encoder and decoder.

    Raises:
        ConfigError: if one has fewer layers, or nothing is left to train.
    """
    # From the first to the last. A vision encoder inside one has flags of its own (`freeze_parts`).
    of_vision = {id(module) for part in backbone for encoder in vision_part(part) for module in encoder.modules()}
    layers_of = [[m for m in find_layers(part)[::-1] if id(m) not in of_vision] for part in backbone]
    most = min(map(len, layers_of))
    if num_layers > most:
        has = str(most) if len(layers_of) == 1 else f"{' and '.join(str(len(layers)) for layers in layers_of)}"
        raise ConfigError(
            f"--num_freeze_layers: {plural(num_layers, 'layer')} to freeze, but this model has {has}; "
            + (f"give at most {most}" if most else "leave --freeze_layers out")
        )
    for layers in layers_of:
        for layer in layers[:num_layers]:
            layer.requires_grad_(False)
    # With all layers frozen, full training still has embeddings and head to train; adapters are in layers only.
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"--num_freeze_layers: with {num_layers} of {most} layers frozen nothing is trainable, because "
            "--use_peft trains adapters in layers only; freeze fewer"
        )


def freeze_parts(model: nn.Module, base: PreTrainedModel, train: TrainConfig) -> None:
    """Freeze the parts that --freeze_vision, --freeze_qformer and --freeze_language_model name, with their adapters.

    Args:
        model: the whole model, with its adapters.
        base: the model that the adapters were added to.

    Raises:
        ConfigError: if the model has no such part, or nothing is left to train.
    """
    asked = [flag for flag in PARTS if getattr(train, flag)]
    for flag in asked:
        frozen = PARTS[flag](base) if has_vision(base) else []
        if not frozen:
            raise ConfigError(f"--{flag}: {type(base).__name__} has no such part; leave it out")
        for part in frozen:
            part.requires_grad_(False)
    if asked and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"--{', --'.join(asked)}: nothing is left to train; leave one of them out")
