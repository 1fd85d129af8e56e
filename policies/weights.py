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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from configs.errors import ConfigError
from configs.run import RunConfig
from policies.loading import attention_settings, explain_failed_load
from utils.distributed import gather_to_all, on_rank_zero, one_rank_per_node_first
from utils.environment import Environment

# Element types of stored tensors that a copy converts exactly as transformers does.
_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16"}


class Weights(Protocol):
    """Where a model's values come from."""

    @property
    def note(self) -> str:
        """A line to print."""

    def fill(self, model: Any, targets: dict[str, torch.Tensor], device: torch.device, *, show_progress: bool) -> None:
        """Write the values of `targets`, sharded or whole, by their names in the plain model. All ranks call this."""


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
    targets: dict[str, torch.Tensor] = {plain_name(name): causal_lm.get_parameter(name) for name in names}
    targets |= {plain_name(name): causal_lm.get_buffer(name) for name in _persistent_buffers(causal_lm)}
    with torch.no_grad():
        weights.fill(causal_lm, targets, compute_device, show_progress=show_progress)


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
                **attention_settings(config),
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


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    key: str


def _match_files(model_name: str, model: Any) -> tuple[dict[str, Stored], str]:
    """Where each of the model's tensors is stored, or in what the files differ from the model."""
    single = cached_file(model_name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    index = cached_file(model_name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if single is None and index is None:
        return {}, f"there is neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}"
    paths = [single] if single is not None else get_checkpoint_shard_files(model_name, index)[0]
    held: dict[str, tuple[Path, list[int], str]] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - a reader of files, not a dict
                piece = file.get_slice(key)
                held[key] = Path(path), piece.get_shape(), piece.get_dtype()

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


@dataclass(frozen=True)
class FileWeights:
    """Every rank reads its own slices straight from the safetensors files."""

    stored: dict[str, Stored]

    @property
    def note(self) -> str:
        num_files = len({where.path for where in self.stored.values()})
        return f"weights: each rank reads its own part of {num_files} safetensors file(s)"

    def fill(self, model: Any, targets: dict[str, torch.Tensor], device: torch.device, *, show_progress: bool) -> None:
        parts = [(self.stored[name], *_local_part(target)) for name, target in targets.items() if name in self.stored]
        total = sum(local.nbytes for _, local, _ in parts)
        with _progress(total, "B", show_progress) as bar:
            for path in dict.fromkeys(where.path for where, _, _ in parts):
                with safe_open(path, framework="pt") as file:
                    for where, local, index in parts:
                        if where.path == path and local.numel():
                            # A slice is read into memory of its own and freed at once; the rest stays on disk.
                            piece = file.get_slice(where.key)[index] if index else file.get_tensor(where.key)
                            local.copy_(piece)
                            bar.update(local.nbytes)


@dataclass(frozen=True)
class WholeWeights:
    """Rank 0 reads the whole as transformers does, and the others receive one tensor at a time."""

    read: Callable[[], dict[str, torch.Tensor]]
    difference: str

    @property
    def note(self) -> str:
        return (
            f"weights: rank 0 reads them all and sends each rank its part (files unlike the model: {self.difference})"
        )

    def fill(self, model: Any, targets: dict[str, torch.Tensor], device: torch.device, *, show_progress: bool) -> None:
        whole: dict[str, torch.Tensor] = {}
        on_rank_zero(lambda: whole.update(self.read()))
        with _progress(
            sum(target.numel() * target.element_size() for target in targets.values()), "B", show_progress
        ) as bar:
            for name, target in targets.items():
                if dist.get_rank() == 0:
                    tensor = whole.pop(name).to(device, target.dtype).contiguous()
                else:
                    tensor = torch.empty(target.shape, device=device, dtype=target.dtype)
                dist.broadcast(tensor, src=0)
                _keep_part(target, tensor)
                bar.update(tensor.nbytes)


@dataclass(frozen=True)
class RandomWeights:
    """Each layer is drawn whole on the device, from a seed of its own, and cut: the same values under every layout."""

    seed: int

    @property
    def note(self) -> str:
        return "weights: random"

    def fill(self, model: Any, targets: dict[str, torch.Tensor], device: torch.device, *, show_progress: bool) -> None:
        undrawn = {id(target) for target in targets.values()}
        owners = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
        parts = list(_parts_to_draw(model))
        with _progress(len(parts), "part", show_progress) as bar:
            for name, modules in parts:
                # A composite model's parts are drawn by the model that they belong to.
                owner = owners[max((o for o in owners if f"{name}.".startswith(f"{o}." if o else "")), key=len)]
                digest = hashlib.sha256(f"{self.seed} {plain_name(name)}".encode()).digest()
                with torch.random.fork_rng([device] if device.type == "cuda" else []):
                    torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
                    _draw(modules, owner, undrawn, device)
                bar.update(1)


def _parts_to_draw(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """What is drawn at a time: each layer as a whole, since some models scale a child's weights from its parent; every
    other module that has parameters by itself. Children come before their parents."""
    in_layers: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and id(module) not in in_layers:
            for index, layer in enumerate(module):
                in_layers.update(id(inner) for inner in layer.modules())
                yield f"{name}.{index}", list(layer.modules())[::-1]
    for name, module in model.named_modules():
        if id(module) not in in_layers and next(module.parameters(recurse=False), None) is not None:
            yield name, [module]


def _draw(modules: list[nn.Module], owner: PreTrainedModel, undrawn: set[int], device: torch.device) -> None:
    """Let the model's own initialisation write into whole fp32 tensors that stand in for the parameters meanwhile."""
    stand_ins: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                whole = torch.full(parameter.shape, torch.nan, device=device, dtype=torch.float32)
                stand_ins.append((module, key, parameter, nn.Parameter(whole, requires_grad=False)))
    try:
        for module, key, _, whole in stand_ins:
            module._parameters[key] = whole
        for module in modules:
            owner._init_weights(module)
    finally:
        for module, key, parameter, _ in stand_ins:
            module._parameters[key] = parameter
    for _, _, parameter, whole in stand_ins:
        if id(parameter) in undrawn:  # neither an adapter's, nor drawn already by another module that shares it
            undrawn.remove(id(parameter))
            if whole.isnan().any():  # the model forgot it
                whole.normal_(std=0.02)
            _keep_part(parameter, whole)


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters: peft puts a wrapped layer's own weights below `base_layer`."""
    return name.replace(".base_layer", "")


def _persistent_buffers(model: nn.Module) -> list[str]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in model.state_dict() if name not in parameters]


def _local_part(target: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, and where in the whole it lies."""
    if not isinstance(target, DTensor):
        return target, tuple(slice(0, size) for size in target.shape)
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return target.to_local(), tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))


def _keep_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    local, index = _local_part(target)
    local.copy_(whole[index])


def _progress(total: int, unit: str, show: bool) -> tqdm:
    return tqdm(desc="weights", total=total, unit=unit, unit_scale=unit == "B", disable=not show)
