"""Weights in Hugging Face format: a folder that AutoModel or PeftModel loads, with the tokenizer beside them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from peft import PeftModel
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from policies.adapter_kinds import own_name
from policies.sharding import unwrap
from utils.distributed import on_rank_zero


class WriteError(Exception):
    """Weights could not be written; the message says why."""


def export_folder(run_folder: Path, model: nn.Module) -> Path:
    return run_folder / ("adapter" if isinstance(unwrap(model), PeftModel) else "model")


def export_model(model: nn.Module, tokenizer: Any, run_folder: Path) -> Path:
    """Write the weights; every rank must call this, rank 0 writes.

    A folder that is there already is replaced only when its successor is complete. Sharded weights are gathered one
    tensor at a time into rank 0's host memory: one copy of what is saved, on one rank.

    Returns:
        The folder: `adapter/` where the model has adapters, else `model/`.

    Raises:
        WriteError: on every rank, where the disk does not take them; an earlier folder is as it was.
    """
    folder = export_folder(run_folder, model)
    inner: Any = unwrap(model)
    state_dict = _gathered_state_dict(inner) if isinstance(inner, FSDPModule) else inner.state_dict()

    reason = on_rank_zero(lambda: _replace(folder, lambda temporary: _write(inner, state_dict, tokenizer, temporary)))
    if reason:
        raise WriteError(reason)
    return folder


def _write(model: Any, state_dict: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    if isinstance(model, PeftModel):
        # False: no embedding is ever trained here, and "auto" would ask the hub about the base model.
        with _whole_prefix(model, state_dict):
            model.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=False)
    else:
        with _own_class(model):
            model.save_pretrained(folder, state_dict=state_dict, max_shard_size="5GB")
    tokenizer.save_pretrained(folder)


def _replace(folder: Path, write: Callable[[Path], None]) -> str:
    """Put a folder in the place of an earlier one when it is whole; returns why that failed, or ""."""
    temporary, replaced = folder.with_name(folder.name + ".incomplete"), folder.with_name(folder.name + ".replaced")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        write(temporary)
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return ""
    except Exception as error:  # a full disk is an OSError, a SafetensorError or a plain Exception, by who writes
        shutil.rmtree(temporary, ignore_errors=True)
        return " ".join(str(error).split()) or type(error).__name__


def _gathered_state_dict(model: Any) -> dict[str, Any]:
    """Whole tensors on rank 0's host, nothing elsewhere; of a model with adapters only these, the frozen ones too."""
    if isinstance(model, PeftModel):
        own = own_name(model)
        adapters: dict[str, Any] = {name: t for name, t in get_model_state_dict(model).items() if own in name}
        # Shards may be in host memory, where the mesh's backend gathers nothing.
        whole = ((name, shard.to(shard.device_mesh.device_type).full_tensor()) for name, shard in adapters.items())
        return {name: tensor.cpu() for name, tensor in whole if dist.get_rank() == 0}
    state_dict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # Gathering made a copy for every name of a tied weight. Names that share one tensor again are saved once.
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(id(parameter), name)
        if name in state_dict:
            state_dict[name] = state_dict[first_name]
    return state_dict


@contextmanager
def _whole_prefix(model: Any, state_dict: dict[str, Any]) -> Iterator[None]:
    """While this lasts a prefix that is sharded is whole: peft saves what its encoder gives, not the state_dict's."""
    if not model.active_peft_config.is_prompt_learning:
        yield
        return
    embedding = model.prompt_encoder[model.active_adapter].embedding
    sharded = embedding.weight
    (whole,) = (tensor for name, tensor in state_dict.items() if own_name(model) in name)
    embedding.weight = nn.Parameter(whole, requires_grad=False)
    try:
        yield
    finally:
        embedding.weight = sharded


@contextmanager
def _own_class(model: nn.Module) -> Iterator[None]:
    """While this lasts, a model that `fully_shard` gave another class has its own again.

    By the class's name and module transformers looks up what a family's tensors are called in files.
    """
    sharded_class = type(model)
    bases = (base for base in sharded_class.__mro__ if issubclass(base, nn.Module))
    model.__class__ = next(base for base in bases if not issubclass(base, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = sharded_class
