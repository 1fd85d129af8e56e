"""The scores of whole texts: of their classes, or a number.

Causal models of transformers have a layer `score` that reads one position, the last token of a text. Several texts of a
packed row are read there at once. Other models have a head of their own, which computes as transformers wrote it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel


def new_parts(model: PreTrainedModel) -> list[str]:
    """The names of the modules that a pretrained model need not have: those outside of its backbone, and its pooler."""
    prefix = model.base_model_prefix
    of_head = [
        name for name, module in model.named_children() if name != prefix and any(True for _ in module.parameters())
    ]
    poolers = [name for name, _ in model.named_modules() if name.startswith(f"{prefix}.") and name.endswith("pooler")]
    return of_head + poolers


def is_of_head(model: PreTrainedModel, name: str) -> bool:
    """Whether a module of this name is of the head of a classifier, which is neither quantized nor adapted."""
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    return is_classifier and any(f"{name}.".startswith(f"{part}.") for part in new_parts(model))


def use_text_scores(model: PreTrainedModel) -> None:
    """Make `model(..., read_positions=positions)` return scores [texts, classes] alone; other calls are as before.

    `read_positions` ([texts], int64) are indices into the flattened [batch x seq]. The forward of this one instance is
    replaced, inside whatever later wraps it, because sharded weights are whole only while their module's own forward
    runs.
    """
    own_forward, backbone = model.forward, getattr(model, model.base_model_prefix)

    @functools.wraps(own_forward)
    def forward(*args: Any, read_positions: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if read_positions is None:
            return own_forward(*args, **kwargs)
        # peft hands on what was not given.
        given = {name: value for name, value in kwargs.items() if value is not None and name != "return_dict"}
        hidden = backbone(*args, **given)[0]
        score: Any = model.score  # peft may have put its own there
        return score(hidden.flatten(0, 1)[read_positions])

    model.forward = forward
