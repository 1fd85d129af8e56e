"""Weights into a model that was built and sharded on the meta device: each rank takes no more than it keeps.

| weights                                           | who reads                                                  |
|---------------------------------------------------|------------------------------------------------------------|
| a checkpoint that names its tensors as the model  | every rank its own slices, straight from the files         |
| does                                              |                                                            |
| one that names or fuses them differently          | rank 0 the whole; the others get one tensor at a time      |
| --random_weights                                  | nobody: every rank draws layer by layer and keeps its part |

So no process holds a whole model that does not train one, but for rank 0 in the second case. What the values are does
not depend on the layout.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from configs.run import RunConfig
from policies.loading import attention_settings, explain_failed_load
from policies.quantization import gathering_changes_nothing
from policies.quantized_linear import QuantizedLinear
from policies.weight_sources import FileWeights, RandomWeights, Stored, Target, Weights, WholeWeights, plain_name
from utils.distributed import gather_to_all, one_rank_per_node_first
from utils.environment import Environment
from utils.errors import ConfigError
from utils.progress import phase

# Element types of stored tensors that a copy converts exactly as transformers does.
_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16"}


def materialise(
    model: nn.Module,
    causal_lm: Any,
    weights: Weights,
    *,
    parameter_device: torch.device,
    compute_device: torch.device,
    show_progress: bool,
) -> None:
    """Give every parameter that is still on the meta device memory and its value. All ranks call this.

    Args:
        model: as sharded, with its adapters, which have values already.
        causal_lm: the model that the adapters were added to; `model` itself where there are none.
        parameter_device: where parameters live between steps.
        compute_device: where they are computed, and where buffers live.
    """
    names = [name for name, parameter in causal_lm.named_parameters() if parameter.is_meta]
    if isinstance(model, FSDPModule):
        # Sharded tensors are swapped in place, so that what shares a parameter goes on sharing it.
        model._apply(lambda tensor: torch.empty_like(tensor, device=parameter_device) if tensor.is_meta else tensor)
    else:
        for parameter in model.parameters():
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=parameter_device)
                torch.utils.swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))
        model.to(compute_device)  # adapters and buffers
    targets = {plain_name(name): _target(causal_lm, name) for name in names}
    targets |= {plain_name(name): Target(causal_lm.get_buffer(name)) for name in _persistent_buffers(causal_lm)}
    with phase("loading weights"), torch.no_grad(), gathering_changes_nothing(model):
        weights.fill(causal_lm, targets, compute_device, show_progress=show_progress)


def _target(model: Any, name: str) -> Target:
    owner = model.get_submodule(name.rpartition(".")[0])
    packed = isinstance(owner, QuantizedLinear) and name.endswith(".weight")
    return Target(model.get_parameter(name), owner if packed else None)


def find_weights(
    config: RunConfig, model: Any, auto_model: Any, dtype: torch.dtype, env: Environment, *, num_rows: int
) -> Weights:
    """Where the weights will come from of this model, which has neither values nor adapters yet.

    Args:
        num_rows: rows that its embeddings need; a checkpoint that has fewer is grown as transformers grows them.

    Raises:
        ConfigError: on every rank, where the files cannot be read.
    """
    train = config.train_config
    if train.random_weights:
        return RandomWeights(train.seed)

    def match() -> tuple[dict[str, Stored], str]:
        try:
            return _match_files(train.model_name, model)
        except Exception as error:
            raise explain_failed_load(config, error) from error

    stored, difference = one_rank_per_node_first(env, match)
    found = hashlib.sha256(repr([(name, where.key) for name, where in stored.items()] + [difference]).encode())
    if len(set(gather_to_all(found.hexdigest()))) > 1:
        raise ConfigError(f"--model_name: {train.model_name} is not the same on all nodes; copy it again")
    if not difference:
        return FileWeights(stored)

    def read_whole() -> dict[str, torch.Tensor]:
        try:
            whole, report = auto_model.from_pretrained(
                train.model_name,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=train.trust_remote_code,
                output_loading_info=True,
                **attention_settings(config, model.config),
            )
        except Exception as error:
            raise explain_failed_load(config, error) from error
        if missing := sorted(report.get("missing_keys", ())):
            raise ConfigError(
                f"--model_name: the weights of {train.model_name} lack {len(missing)} tensors, {missing[0]} first; "
                "they would be trained from random values. Is this a complete checkpoint of this model?"
            )
        if whole.get_input_embeddings().num_embeddings < num_rows:
            whole.resize_token_embeddings(num_rows)
        return whole.state_dict()

    return WholeWeights(read_whole, difference)


def weight_files(model_name: str) -> list[Path]:
    """The safetensors files of a model's folder, or of the hub's model of that name; none where it has none."""
    single = cached_file(model_name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [Path(single)]
    index = cached_file(model_name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        return []
    return [Path(path) for path in get_checkpoint_shard_files(model_name, index)[0]]


def _match_files(model_name: str, model: Any) -> tuple[dict[str, Stored], str]:
    """Where each of the model's tensors is stored, or in what the files differ from the model."""
    paths = weight_files(model_name)
    if not paths:
        return {}, f"there is neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}"
    held: dict[str, tuple[Path, list[int], str]] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - a reader of files, not a dict
                piece = file.get_slice(key)
                held[key] = path, piece.get_shape(), piece.get_dtype()

    names_of: dict[int, list[str]] = {}  # several, where modules share a parameter: files hold it by any of them
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    stored = {}
    for names in names_of.values():
        key = next((name for name in names if name in held), None)
        if key is None:
            return {}, f"they hold no {names[0]}"
        path, shape, dtype = held[key]
        wanted = list(model.get_parameter(names[0]).shape)
        if shape != wanted:
            return {}, f"{key} is {shape} in them and {wanted} in the model"
        if dtype not in _PLAIN_DTYPES:
            return {}, f"{key} is stored as {dtype}"
        stored[names[0]] = Stored(path, key)
    stored |= {name: Stored(held[name][0], name) for name in _persistent_buffers(model) if name in held}
    return stored, ""


def _persistent_buffers(model: nn.Module) -> list[str]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in model.state_dict() if name not in parameters]
