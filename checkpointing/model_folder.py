"""Weights in Hugging Face format: a folder that AutoModel or PeftModel loads, with the tokenizer next to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.utils import CONFIG_NAME

from checkpointing.gathering import gathered_state_dict
from policies.adapters.adapted_model import has_adapter, is_own_name
from policies.config_overrides import write_config_overrides
from policies.sharding import own_class, unwrap
from ranks.collectives import on_rank_zero
from reporting.card.card_file import copy_card
from utils.compat import must_be_exact
from utils.deleting import delete_folder
from utils.processor_type import Processor
from utils.umask import follow_umask


class WriteError(Exception):
    """Weights could not be written; the message says why."""


def export_folder(run_folder: Path, model: nn.Module) -> Path:
    return run_folder / ("adapter" if has_adapter(unwrap(model)) else "model")


def export_model(
    model: nn.Module,
    tokenizer: Processor,
    run_folder: Path,
    *,
    dtype: torch.dtype | None = None,
    rope: Mapping[str, Any] | None = None,
) -> Path:
    """Write the weights. Every rank must call this; rank 0 writes.

    An earlier folder is replaced only once the new one is complete. Sharded weights are gathered one tensor at a time
    into rank 0's host memory, which then holds one copy of what is saved. An earlier README.md stays, for
    `reporting.card.card_file.renew_card`.

    Args:
        dtype: of a model's floating-point weights; None, and for adapters: that of training.
        rope: what an adapter's base needs besides its own config.json (`policies.config_overrides`).

    Returns:
        The folder: `adapter/` if the model has adapters, else `model/`.

    Raises:
        WriteError: on every rank, if the disk does not take them; an earlier folder is as it was.
    """
    folder = export_folder(run_folder, model)
    inner: Any = unwrap(model)
    state_dict = gathered_state_dict(model) if isinstance(inner, FSDPModule) else inner.state_dict()

    def write(temporary: Path) -> None:
        _write(inner, state_dict, tokenizer, temporary, dtype)
        if has_adapter(inner):
            write_config_overrides(temporary, rope or {})
        copy_card(folder, temporary)

    reason = on_rank_zero(lambda: _replace(folder, write))
    if reason:
        raise WriteError(reason)
    return folder


def _write(
    model: Any, state_dict: dict[str, Any], tokenizer: Processor, folder: Path, dtype: torch.dtype | None
) -> None:
    if has_adapter(model):
        # False: trained tokens are saved as the adapter's; "auto" would ask the hub about the base model.
        with _whole_prefix(model, state_dict):
            model.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=False)
        base: Any = model.get_base_model()
        if base.can_generate():  # for servers, which stop where the adapter's answers end
            base.generation_config.save_pretrained(folder)
    else:
        with _with_own_class(model):
            model.save_pretrained(folder, state_dict=cast_weights(model, state_dict, dtype), max_shard_size="5GB")
        if dtype is not None:
            _name_dtype(folder / CONFIG_NAME, dtype)
    tokenizer.save_pretrained(folder)


def cast_weights(model: nn.Module, state_dict: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The state_dict with its floating-point tensors in this dtype, but for those that the family keeps in fp32."""
    if dtype is None:
        return state_dict
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}  # tied weights, which share their memory, stay one tensor
    saved = dict(state_dict)
    for name, tensor in state_dict.items():
        if tensor.is_floating_point() and not must_be_exact(model, name):
            saved[name] = cast.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype))
    return saved


def _name_dtype(config_file: Path, dtype: torch.dtype) -> None:
    """Let config.json name the dtype of the saved weights; save_pretrained names that of the model in memory."""
    values = json.loads(config_file.read_text())
    for config in (values, *(value for value in values.values() if isinstance(value, dict))):
        if "dtype" in config:
            config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _replace(folder: Path, write: Callable[[Path], None]) -> str:
    """Write a folder and put it in the place of an earlier one. Returns why that failed, or ""."""
    temporary, replaced = folder.with_name(folder.name + ".incomplete"), folder.with_name(folder.name + ".replaced")
    try:
        _put_back(replaced, folder)  # a process that was killed between the two renames has left that
        delete_folder(temporary)
        write(temporary)
        follow_umask(temporary)
        # A folder that holds files cannot be renamed over, and the earlier weights must exist until the new ones do.
        delete_folder(replaced)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        delete_folder(replaced)
        return ""
    # A full disk is an OSError, a SafetensorError or a plain Exception, depending on who writes.
    except Exception as error:
        with suppress(OSError):
            _put_back(replaced, folder)
        delete_folder(temporary)
        return " ".join(str(error).split()) or type(error).__name__


def _put_back(replaced: Path, folder: Path) -> None:
    if replaced.is_dir() and not folder.exists():
        replaced.rename(folder)


@contextmanager
def _whole_prefix(model: Any, state_dict: dict[str, Any]) -> Iterator[None]:
    """While this lasts, a sharded prefix is whole: peft saves the encoder's own weight, not that of the state_dict."""
    if not model.active_peft_config.is_prompt_learning:
        yield
        return
    embedding = model.prompt_encoder[model.active_adapter].embedding
    sharded = embedding.weight
    (whole,) = (tensor for name, tensor in state_dict.items() if is_own_name(model, name))
    embedding.weight = nn.Parameter(whole, requires_grad=False)
    try:
        yield
    finally:
        embedding.weight = sharded


@contextmanager
def _with_own_class(model: nn.Module) -> Iterator[None]:
    """While this lasts, a model that `fully_shard` gave another class has its own again.

    transformers looks up a family's tensor names in files by the class's name and module.
    """
    sharded_class = type(model)
    model.__class__ = own_class(model)
    try:
        yield
    finally:
        model.__class__ = sharded_class
