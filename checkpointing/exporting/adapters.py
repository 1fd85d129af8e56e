"""A checkpoint's adapter: under PEFT's names, on a model, and merged into its base one layer at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import nn

from checkpointing.exporting.safetensors_file import Entry
from checkpointing.exporting.sources import Source
from checkpointing.exporting.stored import StoredTensors
from policies.adapters import began_by_changing_the_base
from utils.errors import ConfigError, in_one_line

_MODEL_PREFIX = "base_model.model."


def load_adapter_config(source: Source) -> Any:
    """The adapter's settings, for applying it.

    Raises:
        ConfigError: where they cannot be read, or say nothing about the weights that the adapter is for.
    """
    try:
        config: Any = peft.PeftConfig.from_pretrained(str(source.adapter_config))
    except Exception as error:
        raise ConfigError(f"{source.adapter_config}/adapter_config.json cannot be read ({error})") from error
    if start := began_by_changing_the_base(config):
        raise ConfigError(
            f"{source.path}: this adapter began as {start}, which changed the base's weights too; convert it to plain "
            "LoRA with peft's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    config.inference_mode = True
    return config


def put_adapter(model: Any, source: Source, config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Put the source's adapter on a model, which may be on the meta device; the adapter is real, for inference.

    Returns:
        The PeftModel, and the adapter's tensors as they are stored, under the names that an adapter folder has.

    Raises:
        ConfigError: where they do not fit.
    """
    remedy = "give the model that it was trained on with --base"
    of_base = {id(parameter) for parameter in model.parameters()}
    try:
        model.name_or_path = config.base_model_name_or_path or ""  # else peft renames it in the config
        adapted: Any = peft.get_peft_model(model, copy.deepcopy(config), low_cpu_mem_usage=True)
        names = [name for name, parameter in adapted.named_parameters() if id(parameter) not in of_base]
        for name in names:
            owner, _, attribute = name.rpartition(".")
            parameter = adapted.get_parameter(name)
            # A prompt of LLaMA-Adapter is computed in the model's dtype, everything else of peft's in its own.
            dtype = parameter.dtype if config.peft_type == "ADAPTION_PROMPT" else torch.float32
            empty = torch.empty(parameter.shape, dtype=dtype)
            setattr(adapted.get_submodule(owner), attribute, nn.Parameter(empty, requires_grad=False))
        tensors = {name: source.tensors.read(name) for name in source.tensors.index}
        if config.is_prompt_learning and not source.in_peft_format:
            (prompt,) = tensors.values()
            tensors = {"prompt_embeddings": prompt}
        elif not source.in_peft_format:
            tensors = peft.get_peft_model_state_dict(adapted, state_dict=tensors, save_embedding_layers=False)
            if len(tensors) != len(source.tensors.index):
                raise ConfigError(f"{source.path}: some of its tensors are no adapter's; {remedy}")
        report: Any = peft.set_peft_model_state_dict(adapted, {name: t.float() for name, t in tensors.items()})
    except ConfigError:
        raise
    except Exception as error:
        reason = in_one_line(error)
        raise ConfigError(f"{source.path}: its adapter does not fit the base model ({reason}); {remedy}") from error
    if config.is_prompt_learning:  # peft itself insists on the one tensor
        return adapted.eval(), tensors
    missing = sorted(set(names) & set(report.missing_keys))
    if missing or report.unexpected_keys:
        name, what = (missing[0], "lacks") if missing else (report.unexpected_keys[0], "holds, unlike the model,")
        raise ConfigError(f"{source.path}: its adapter does not fit the base model (it {what} {name}); {remedy}")
    return adapted.eval(), tensors


def merges_by_layer(adapted: Any, config: Any) -> bool:
    """Whether the adapter is LoRA on whole layers and nothing else, so that each layer can be merged for itself."""
    more = ("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication")
    if config.bias != "none" or any(getattr(config, name, None) for name in more):
        return False
    return not any(isinstance(module, ParamWrapper) for module in adapted.modules())


class MergedTensors:
    """The base's tensors with the adapter merged in, one layer at a time, by PEFT's own arithmetic in fp32.

    Args:
        base: the base's tensors. stored_as: for each of the model's names, the name under which `base` holds it.
        adapted: the model with the adapter, its own parameters on the meta device.
    """

    def __init__(self, base: StoredTensors, stored_as: Mapping[str, str], adapted: Any) -> None:
        self._base, self._stored_as = base, stored_as
        self.files: list[Path] = base.files
        self.index: dict[str, Entry] = {name: base.index[key] for name, key in stored_as.items()}
        self._layers: dict[str, tuple[Any, str]] = {}  # by the model's name: the layer and its module's name
        for path, layer in adapted.named_modules():
            if isinstance(layer, LoraLayer):
                module = path.removeprefix(_MODEL_PREFIX)
                for name, _ in layer.get_base_layer().named_parameters():
                    self._layers[f"{module}.{name}"] = layer, module
        self.merged_names = set(self._layers)

    def read(self, name: str) -> torch.Tensor:
        """The tensor; in fp32 where the adapter changes its layer."""
        if name not in self._layers:
            return self._base.read(self._stored_as[name])
        layer, module = self._layers[name]
        base_layer: nn.Module = layer.get_base_layer()
        own = [own_name for own_name, _ in base_layer.named_parameters()]
        for own_name in own:
            owner, _, attribute = own_name.rpartition(".")
            value = self._base.read(self._stored_as[f"{module}.{own_name}"]).float()
            setattr(base_layer.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
        with torch.no_grad():
            layer.merge()
        merged = base_layer.get_parameter(name.removeprefix(f"{module}.")).data
        layer.merged_adapters.clear()
        base_layer.to("meta")
        return merged
