"""Counts the weights of a model, of which a packed parameter has fewer elements; and tells those of its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel


class Counted(NamedTuple):
    parameter: nn.Parameter
    shape: torch.Size  # of the whole tensor, however it is sharded or packed
    stored_as: str  # "float32", "nf4"

    @property
    def num_weights(self) -> int:
        return self.shape.numel()


def packed_weights(module: nn.Module) -> Mapping[str, Any]:
    """How a module's own parameters are packed, by their names; those that are not packed are left out.

    A module that packs some says so by an attribute of this name. Each has a `plain_shape` and a name of what it is
    `stored_as`.
    """
    found: Any = getattr(module, "packed_weights", None)
    return dict(found.items()) if found is not None else {}


def count_weights(model: nn.Module) -> Iterator[Counted]:
    """Each parameter once."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        packed = packed_weights(module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            if name in packed:
                yield Counted(parameter, packed[name].plain_shape, str(packed[name].stored_as))
            else:
                yield Counted(parameter, parameter.shape, str(parameter.dtype).removeprefix("torch."))


_OF_VOCABULARY = "is_of_vocabulary"  # an attribute of a parameter; whoever replaces parameters marks them again


def mark_vocabulary(model: nn.Module) -> None:
    """Mark the parameters that have a row for each token or position: embeddings, heads, and single rows of them."""
    for module in model.modules():
        own: list[Any] = [module.weight] if isinstance(module, nn.Embedding) else []
        if isinstance(module, PreTrainedModel) and (head := module.get_output_embeddings()) is not None:
            # By its name: under peft's rows of new tokens the attribute is computed, of what sharding has not replaced.
            named = head.named_parameters()
            own += [weight for name, weight in named if name.split(".")[-1] == "weight" and "lora_" not in name]
        for parameter in own:
            setattr(parameter, _OF_VOCABULARY, True)
    for name, parameter in model.named_parameters():
        if "trainable_tokens_" in name:  # peft's rows of new tokens
            setattr(parameter, _OF_VOCABULARY, True)


def is_of_vocabulary(parameter: torch.Tensor) -> bool:
    """Whether `mark_vocabulary` has marked it."""
    return getattr(parameter, _OF_VOCABULARY, False)


def keep_mark(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part, marked like the parameter that it is a part of."""
    setattr(part, _OF_VOCABULARY, is_of_vocabulary(whole))
    return part
