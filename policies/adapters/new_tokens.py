"""Embeddings of added tokens, trained along with LoRA: peft's `trainable_token_indices`, computed without copies.

peft copies the whole embedding in each forward, and the whole head for each chunk of the loss, to put the trained rows
in. Here the rows are used where their tokens are. The numbers are the same, and sharded weights are only used inside
their own module's forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from configs.peft import LoraConfig
from policies.weights.fitting import untie_config
from policies.weights.sources import keep_part
from policies.wrapping import has_tied_embeddings
from utils.errors import ConfigError


def token_settings(model: PreTrainedModel, lora: LoraConfig, new_tokens: Sequence[int]) -> dict[str, list[int]] | None:
    """peft's `trainable_token_indices`: these rows of the input embedding, and of a head that is not tied to it.

    Raises:
        ConfigError: if LoRA adapts one of them, or a tied head, too, or peft cannot know that the head is tied.
    """
    if not new_tokens:
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if has_tied_embeddings(model) and not model.config.to_dict().get("tie_word_embeddings"):
        raise ConfigError(
            f"--add_special_tokens: the head of {model.config.model_type} models shares the embeddings' weight, and "
            "their config.json does not say so, so peft would not train the head's rows; train without --use_peft"
        )
    trained = [embedding] if head is None or has_tied_embeddings(model) else [embedding, head]
    names = [name for name, module in model.named_modules() if any(module is one for one in trained)]
    # peft trains the rows of a tied head, too, as those of the embedding; it cannot merge LoRA around them.
    held = [name for name, module in model.named_modules() if module is embedding or module is head]
    if both := [target for target in lora.target_modules for name in held if f".{name}".endswith(f".{target}")]:
        raise ConfigError(
            f"--lora_config.target_modules: {both[0]} cannot have an adapter and trained rows (--add_special_tokens); "
            "leave one of them out"
        )
    return {name: list(new_tokens) for name in names}


def make_room_for_tokens(model: PreTrainedModel, settings: Any) -> None:
    """Grow the embeddings to the tokens of a saved adapter, which replaces the new rows."""
    asked = getattr(settings, "trainable_token_indices", None) or []
    indices = [index for row in asked.values() for index in row] if isinstance(asked, dict) else asked
    if indices and max(indices) >= model.get_input_embeddings().num_embeddings:
        # Else growing would tie the head again that the files' values have untied.
        if model.get_output_embeddings() is not None and not has_tied_embeddings(model):
            untie_config(model)
        model.resize_token_embeddings(max(indices) + 1, mean_resizing=False)


def use_lean_tokens(model: nn.Module) -> None:
    """Give every layer with trained rows a forward that copies no embedding."""
    for layer in _layers(model):
        (adapter,) = layer.active_adapters
        layer.register_buffer("token_ids", torch.tensor(layer.token_indices[adapter]), persistent=False)
        layer.trainable_tokens_original.clear()  # only needed to unmerge, and without values yet
        layer.forward = MethodType(_forward, layer)


@torch.no_grad()
def set_token_rows(model: nn.Module) -> None:
    """Copy the base's rows, which may be sharded, into the trained rows. Every rank must call this."""
    for layer in _layers(model):
        # A tied head shares the rows of the embedding.
        if layer.tied_adapter:
            continue
        (adapter,) = layer.active_adapters
        weight: torch.Tensor = layer.get_base_layer().weight
        if isinstance(weight, DTensor):  # shards may be in host memory, where the mesh gathers nothing
            weight = cast(DTensor, weight.to(weight.device_mesh.device_type)).full_tensor()
        rows = layer.trainable_tokens_delta[adapter]
        keep_part(rows, weight[layer.token_ids.to(weight.device)].to(rows))


def _layers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, TrainableTokensLayer))


def _forward(layer: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged:
        return type(layer).forward(layer, inputs, *args, **kwargs)
    (adapter,) = layer.active_adapters
    base, rows = layer.base_layer, layer.trainable_tokens_delta[adapter]
    ids = layer.token_ids.to(inputs.device)  # a plan's inputs are on the meta device
    outputs = base(inputs, *args, **kwargs)
    if isinstance(base, nn.Embedding):
        is_token = inputs.unsqueeze(-1) == ids  # [batch, seq, tokens]
        # argmax takes no bool. Other tokens look up row 0, which `where` drops, so its gradient gets nothing from them.
        trained = F.embedding(is_token.int().argmax(-1), rows).to(outputs.dtype)
        if (scale := layer._get_embed_scale()) is not None:
            trained = trained * scale.to(trained.dtype)
        return torch.where(is_token.any(-1, keepdim=True), trained, outputs)
    bias = None if base.bias is None else base.bias[ids]
    return outputs.index_copy(-1, ids, F.linear(inputs, rows.to(inputs.dtype), bias))
