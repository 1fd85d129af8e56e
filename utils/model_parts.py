"""The parts of a model of image and text: vision encoder, Q-Former and language model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel


def vision_part(model: nn.Module) -> list[nn.Module]:
    """The vision encoder, which turns pixels into features; empty if the model has none."""
    if not (isinstance(model, PreTrainedModel) and has_vision(model)):
        return []
    encoder = model.get_encoder(modality="image")
    # A family without an image encoder of its own returns the model itself.
    return [] if encoder in (model, model.base_model) else [encoder]


def vision_layers(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of these layers that are the vision encoder's."""
    inside = {id(module) for part in vision_part(model) for module in part.modules()}
    return [layer for layer in layers if id(layer) in inside]


def qformer_part(model: PreTrainedModel) -> Sequence[nn.Module | nn.Parameter]:
    """BLIP-2's Q-Former and its learned queries; empty if the model has none."""
    inner = model if hasattr(model, "qformer") else model.base_model
    if not hasattr(inner, "qformer"):
        return []
    queries = getattr(inner, "query_tokens", None)
    return [inner.qformer, *([] if queries is None else [queries])]


def language_part(model: PreTrainedModel) -> list[nn.Module]:
    """The language model with its embeddings and head: a decoder, or encoder and decoder."""
    decoder, seen = model.get_decoder(), vision_part(model)
    children = list(decoder.children())
    # In Idefics the decoder holds the vision encoder.
    inside = [part for part in children if part not in seen] if any(part in seen for part in children) else [decoder]
    return [*inside, model.get_output_embeddings()]


def has_vision(model: nn.Module) -> bool:
    """Whether the model sees images."""
    return hasattr(getattr(model, "config", None), "vision_config")
