"""Weights for a model that was built and sharded on the meta device: each rank reads no more than it keeps.

| weights                                                | who reads                                                |
|--------------------------------------------------------|----------------------------------------------------------|
| files that name and shape tensors as the model does    | every rank its own slices                                |
| files that name or fuse them differently               | rank 0 reads all; the others get one tensor at a time    |
| --random_weights                                       | nobody: each rank draws layer by layer and keeps its part |

So no process holds a whole model unless it trains one; rank 0 in the second case is the exception. The values do not
depend on the layout.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from configs.training import TrainConfig
from policies.loading import attention_settings, explain_failed_load
from policies.pretrained import MissingTensorsError, read_whole
from policies.quantization.choice import gathering_changes_nothing
from policies.weights.exact_buffers import read_exact_buffers
from policies.weights.expert_files import StoredExperts, find_experts_stored, merging_rules
from policies.weights.fingerprint import describe_file
from policies.weights.fitting import (
    check_dtypes,
    check_left_over,
    left_over,
    untie_config,
    untie_what_differs,
)
from policies.weights.sources import FileWeights, RandomWeights, Target, Weights, WholeWeights, with_new_parts
from policies.weights.stored import SafetensorsTensors, Stored, weight_files
from policies.weights.tensor_names import find_stored, plain_name, saved_buffers, shared_names
from policies.wrapping import has_tied_embeddings, num_known_ids
from ranks.agreement import check_agreement
from ranks.collectives import one_rank_per_node_first
from ranks.environment import Environment, print_rank_zero
from utils.errors import ConfigError
from utils.parameters import packed_weights
from utils.progress import phase
from utils.wording import plural


def materialise(
    model: nn.Module,
    base: PreTrainedModel,
    weights: Weights,
    *,
    parameter_device: torch.device,
    compute_device: torch.device,
) -> None:
    """Give every parameter on the meta device memory and its value. Every rank must call this.

    Args:
        model: as sharded, with its adapters, which have values already.
        base: the model that the adapters were added to; without adapters `model` itself.
        parameter_device: where parameters live between steps.
        compute_device: where computing happens, and where buffers live.
    """
    # Listed before they get memory. Adapters have values already, and are not on the meta device.
    names = [name for name, parameter in base.named_parameters() if parameter.is_meta]
    for parameter in (p for p in model.parameters() if not isinstance(p, DTensor)):
        if parameter.is_meta:
            empty = torch.empty_like(parameter, device=parameter_device)
            # In place, so that tied weights stay one parameter.
            torch.utils.swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))
        else:  # a frozen adapter's
            parameter.data = parameter.data.to(parameter_device)
    if isinstance(model, FSDPModule):
        # Sharded tensors are swapped in place, so that tied weights stay tied.
        model._apply(lambda tensor: torch.empty_like(tensor, device=parameter_device) if tensor.is_meta else tensor)
    else:
        model.to(compute_device)  # adapters and buffers
    targets = {plain_name(name): _target(base, name) for name in names}
    targets |= {plain_name(name): Target(base.get_buffer(name)) for name in saved_buffers(base)}
    with phase("loading weights"), torch.no_grad(), gathering_changes_nothing(model):
        weights.fill(base, targets, compute_device)


def _target(model: PreTrainedModel, name: str) -> Target:
    owner, _, own_name = name.rpartition(".")
    return Target(model.get_parameter(name), packed_weights(model.get_submodule(owner)).get(own_name))


def find_weights(
    train: TrainConfig,
    model: PreTrainedModel,
    auto_model: Any,
    dtype: torch.dtype,
    env: Environment,
    *,
    num_rows: int,
    new_parts: Sequence[str] = (),
    in_adapter: Sequence[str] = (),
) -> Weights:
    """Where the weights of this model come from. It has neither values nor adapters yet.

    Args:
        auto_model: the transformers class that reads such models, of the task.
        num_rows: rows that its embeddings need; if files have fewer, transformers grows them.
        new_parts: modules that the files need not have; they are drawn then.
        in_adapter: modules whose values a saved adapter brings later.

    Raises:
        ConfigError: on every rank, if the files cannot be read.
    """
    if train.random_weights:
        return RandomWeights(train.seed)

    # Reads headers, and values of tied weights that files hold apart; all others once the model is sharded.
    def match() -> tuple[dict[str, Stored | StoredExperts], str, list[str], list[str]]:
        try:
            return _match_files(train.model_name, model, new_parts, allows_left_over=train.allow_unused_weights)
        except ConfigError as error:
            said = str(error).removeprefix("--model_name: ")
            raise ConfigError(f"--model_name: {train.model_name}: {said}") from error
        except Exception as error:
            raise explain_failed_load(train, error) from error

    stored, difference, drawn, notes = one_rank_per_node_first(env, match)
    files = {f"--model_name, {path.name}": describe_file(path) for path in weight_files(train.model_name)}
    # Ranks on nodes with other files would train on a mixture of two models.
    check_agreement({"copy the model to every machine again": files})
    if not difference:
        return with_new_parts(FileWeights(stored, tuple(notes)), drawn, train.seed, in_adapter)

    # Noted now, since the model will have adapters when the files are read.
    ties = sorted(map(sorted, shared_names(model)))
    attention, trust = attention_settings(train, model.config), train.trust_remote_code

    def read() -> dict[str, torch.Tensor]:
        try:
            whole, extra = read_whole(
                auto_model,
                train.model_name,
                dtype,
                attention=attention,
                trust_remote_code=trust,
                config=model.config if drawn else None,
                new_parts=new_parts,
            )
        except MissingTensorsError as error:
            raise ConfigError(
                f"--model_name: the weights of {train.model_name} lack {plural(len(error.names), 'tensor')}, "
                f"{error.names[0]} first; training would start from random values there. Is this a complete checkpoint "
                "of this model?"
            ) from error
        except Exception as error:
            raise explain_failed_load(train, error) from error
        read_exact_buffers(whole, train.model_name)
        if not has_tied_embeddings(whole):  # else growing would tie the head again that from_pretrained has untied
            untie_config(whole)
        if num_known_ids(whole) < num_rows:
            whole.resize_token_embeddings(num_rows)
        if sorted(map(sorted, shared_names(whole))) != ties:
            raise ConfigError(
                f"--model_name: config.json of {train.model_name} ties weights (tie_word_embeddings) that the files "
                'hold with different values; set "tie_word_embeddings": false there'
            )
        if extra and (kept := _of_backbone(extra, whole, new_parts)):
            print_rank_zero(env, check_left_over(kept, whole, allowed=train.allow_unused_weights))
        return whole.state_dict()

    return with_new_parts(WholeWeights(read, difference, tuple(notes)), drawn, train.seed, in_adapter)


def _match_files(
    model_name: str, model: PreTrainedModel, new_parts: Sequence[str], *, allows_left_over: bool
) -> tuple[dict[str, Stored | StoredExperts], str, list[str], list[str]]:
    """Where each of the model's tensors is stored, "" or how the files differ from the model, the tensors of new parts
    that the files lack, and lines to print.

    The model's weights are untied if the files hold them apart.

    Raises:
        ConfigError: if the files hold dtypes that the model does not compute with, or more tensors than it has.
    """
    paths = weight_files(model_name)
    if not paths:
        return {}, f"there is neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}", [], []
    files = SafetensorsTensors(paths)
    notes = untie_what_differs(model, files)
    if files.in_mxfp4:
        notes.append(f"weights: {plural(len(files.in_mxfp4), 'tensor')} in MXFP4, dequantized as they are read")
    drawn = _lacking(model, new_parts, files)
    stored, difference = _find_each(model, files, drawn)
    check_dtypes(model, files.index, converts=bool(difference))
    merged = (place for place in stored.values() if isinstance(place, StoredExperts))
    taken = {tensor.key for place in merged for tensors in place.experts for tensor in tensors}
    extra = left_over(model, files.index.keys() - taken) if not difference else []
    if kept := _of_backbone(extra, model, new_parts):
        notes.append(check_left_over(kept, model, allowed=allows_left_over))
    return stored, difference, drawn, notes


def _lacking(model: PreTrainedModel, new_parts: Sequence[str], files: SafetensorsTensors) -> list[str]:
    """The tensors of new parts that the files do not hold, or hold in another shape, as of other classes."""
    names = [name for name, _ in model.named_parameters() if any(name.startswith(f"{part}.") for part in new_parts)]
    return [
        name
        for name in names
        if name not in files.index or files.index[name].shape != tuple(model.get_parameter(name).shape)
    ]


def _of_backbone(left: Collection[str], model: PreTrainedModel, new_parts: Sequence[str]) -> list[str]:
    """Those of the left over tensors that no other head explains, if the model's own head may be new."""
    return [name for name in left if not new_parts or name.startswith(f"{model.base_model_prefix}.")]


def _find_each(
    model: PreTrainedModel, files: SafetensorsTensors, drawn: Collection[str] = ()
) -> tuple[dict[str, Stored | StoredExperts], str]:
    """Where each of the model's tensors is stored, but for those that are drawn, and "" or how the files differ."""
    stored_as, rules = find_stored(model, files.index), merging_rules(model)
    stored: dict[str, Stored | StoredExperts] = {}
    for name, *_ in shared_names(model):
        if name in drawn:
            continue
        wanted = tuple(model.get_parameter(name).shape)
        if name not in stored_as:
            experts = find_experts_stored(rules, name, wanted, files)
            if experts is None:
                return {}, f"they hold no {name}"
            stored[name] = experts
            continue
        key = stored_as[name]
        shape = files.index[key].shape
        if shape != wanted:
            return {}, f"{key} is {list(shape)} in them and {list(wanted)} in the model"
        stored[name] = files.place_of(key)
    stored |= {name: files.place_of(name) for name in saved_buffers(model) if name in files.index}
    return stored, ""
