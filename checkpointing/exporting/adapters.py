"""A checkpoint's adapter: put on a model under PEFT's names, and merged into its base one layer at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from checkpointing.exporting.model_source import ModelSource
from checkpointing.exporting.stored_tensors import StoredTensors
from policies.adapters.new_tokens import make_room_for_tokens
from policies.adapters.saved import attach_adapter, check_base_is_unchanged, read_adapter_config, set_adapter
from policies.weights.stored import Entry
from policies.weights.tensor_names import plain_name
from utils.errors import ConfigError, in_one_line

_MODEL_PREFIX = "base_model.model."


def load_adapter_config(source: ModelSource) -> peft.PeftConfig:
    """The adapter's settings, for inference.

    Raises:
        ConfigError: if they cannot be read, or the adapter's base is not the model that it names.
    """
    assert source.adapter_config is not None
    config = read_adapter_config(source.adapter_config, str(source.path))
    check_base_is_unchanged(config, str(source.path))
    config.inference_mode = True
    return config


def put_adapter(
    model: PreTrainedModel, source: ModelSource, config: peft.PeftConfig
) -> tuple[peft.PeftModel, dict[str, torch.Tensor]]:
    """Put the source's adapter on a model, which may be on the meta device. The adapter itself is real.

    Returns:
        The PeftModel, for inference, and the adapter's tensors as they are stored, named as in an adapter's folder.

    Raises:
        ConfigError: if they do not fit.
    """
    remedy = "give the model that it was trained on with --base"
    # A prompt of LLaMA-Adapter is computed in the model's dtype, every other kind in its own.
    dtype = None if config.peft_type == "ADAPTION_PROMPT" else torch.float32
    try:
        model.name_or_path = config.base_model_name_or_path or ""  # else peft renames it in the config
        make_room_for_tokens(model, config)
        adapted, own_names = attach_adapter(model, copy.deepcopy(config), dtype)
        tensors = {name: source.tensors.read(name) for name in source.tensors.index}
        if config.is_prompt_learning and not source.in_peft_format:
            # A checkpoint has the parameter's name in the model, an adapter's folder peft's own for it.
            (prompt,) = tensors.values()
            tensors = {"prompt_embeddings": prompt}
        elif not source.in_peft_format:
            tensors = peft.get_peft_model_state_dict(adapted, state_dict=tensors, save_embedding_layers=False)
            # peft leaves out, without a word, tensors that are not the adapter's.
            if len(tensors) != len(source.tensors.index):
                raise ConfigError(f"{source.path}: some of its tensors are no adapter's; {remedy}")
        set_adapter(adapted, own_names, tensors)
    except ConfigError:  # with a remedy of its own
        raise
    except Exception as error:
        reason = in_one_line(error)
        raise ConfigError(f"{source.path}: its adapter does not fit the base model ({reason}); {remedy}") from error
    return adapted.requires_grad_(False).eval(), tensors


def merges_by_layer(adapted: peft.PeftModel, config: peft.LoraConfig) -> bool:
    """Whether the adapter is LoRA on layers and experts and nothing else, so that each can be merged by itself."""
    more = ("modules_to_save", "trainable_token_indices", "layer_replication")
    return config.bias == "none" and not any(getattr(config, name, None) for name in more)


class MergedTensors:
    """The base's tensors with the adapter merged in, one layer at a time, by PEFT's own arithmetic in fp32.

    Args:
        base: the base's tensors.
        stored_as: for each name in the model, the name under which `base` holds its tensor.
        adapted: the model with the adapter, its base on the meta device.
    """

    def __init__(self, base: StoredTensors, stored_as: Mapping[str, str], adapted: peft.PeftModel) -> None:
        self._base, self._stored_as = base, stored_as
        self.files: list[Path] = base.files
        self.index: dict[str, Entry] = {name: base.index[key] for name, key in stored_as.items()}
        # By the model's name of a tensor: what changes it, and the name of the module that owns it.
        self._layers: dict[str, tuple[LoraLayer, str]] = {}
        for path, layer in adapted.named_modules():
            if isinstance(layer, LoraLayer):
                module = plain_name(path.removeprefix(_MODEL_PREFIX))
                for name in _merged_parameters(layer):
                    self._layers[f"{module}.{name}"] = layer, module
        self.merged_names = set(self._layers)

    def read(self, name: str) -> torch.Tensor:
        """The tensor; in fp32 if the adapter changes its layer."""
        if name not in self._layers:
            return self._base.read(self._stored_as[name])
        layer, module = self._layers[name]
        base_layer: nn.Module = layer.get_base_layer()
        for parameter_name in _merged_parameters(layer):
            owner, _, attribute = parameter_name.rpartition(".")
            value = self._base.read(self._stored_as[f"{module}.{parameter_name}"]).float()
            setattr(base_layer.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
        with torch.no_grad():
            layer.merge()
        merged = base_layer.get_parameter(name.removeprefix(f"{module}.")).data
        # As if never merged, since peft merges a layer only once, and this one is read again for its bias.
        layer.merged_adapters.clear()
        base_layer.to("meta")
        return merged


def merge_layer(layer: LoraLayer, dtype: torch.dtype) -> None:
    """Merge one layer of a model in memory, in fp32, and take its adapter away.

    Args:
        dtype: of the merged weights.
    """
    parameters = [layer.get_base_layer().get_parameter(name) for name in _merged_parameters(layer)]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    with torch.no_grad():
        layer.merge()
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    layer.merged_adapters.clear()
    for name in list(layer.active_adapters):
        layer.delete_adapter(name)


def _merged_parameters(layer: LoraLayer) -> list[str]:
    """The names of the wrapped module's parameters that merging needs and may change."""
    if isinstance(layer, ParamWrapper):
        return [layer.parameter_name]
    return [name for name, _ in layer.get_base_layer().named_parameters()]
