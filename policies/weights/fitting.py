"""Whether the tensors in files fit a model, decided by names, shapes and dtypes before values are read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from policies.weights.stored import Entry
from policies.weights.tensor_names import saved_buffers, shared_names
from utils.errors import ConfigError
from utils.wording import plural

_NUM_SHOWN = 3


def left_over(model: PreTrainedModel, stored: Collection[str]) -> list[str]:
    """The files' tensors that the model has no place for, sorted, without those known to be obsolete.

    Like transformers, this leaves out tensors that the model's class names, and buffers that are computed.
    """
    known = {name for names in shared_names(model) for name in names} | set(saved_buffers(model))
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    # Older versions of transformers saved computed values, such as rotary frequencies, and used other names.
    computed = buffers | {"inv_freq", "masked_bias"}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return [
        name
        for name in sorted(set(stored) - known)
        if name.rpartition(".")[2] not in computed and not any(pattern.search(name) for pattern in ignored)
    ]


def check_left_over(names: Collection[str], model: PreTrainedModel, *, allowed: bool) -> str:
    """A line about tensors that are not taken.

    Raises:
        ConfigError: if that is not allowed. A config.json of fewer layers than the files would train a part of a model.
    """
    text = describe_left_over(names, model)
    if not allowed:
        raise ConfigError(
            f"--model_name: {text.removeprefix('weights: ')}; correct config.json, or give --allow_unused_weights to "
            "train without them"
        )
    return text


def describe_left_over(names: Collection[str], model: PreTrainedModel) -> str:
    """A line about tensors that are not taken."""
    shown = ", ".join(list(names)[:_NUM_SHOWN])
    text = f"weights: this model has no place for {plural(len(names), 'tensor')} in the files, left out: {shown}"
    text += ", ..." if len(names) > _NUM_SHOWN else ""
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    in_layers = [int(found[1]) for name in names if (found := re.search(r"\.(\d+)\.", name))]
    if isinstance(num_layers, int) and in_layers and max(in_layers) >= num_layers:
        text += f" (config.json has {num_layers} layers, num_hidden_layers; the files have {max(in_layers) + 1})"
    return text


def check_dtypes(model: PreTrainedModel, index: Mapping[str, Entry], *, converts: bool) -> None:
    """Refuse integers where the model has floating-point numbers: they are a quantized model's, and mean nothing alone.

    Args:
        converts: transformers makes the model's tensors of those in the files; so any that is not left out may be one.

    Raises:
        ConfigError: it names a tensor.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= {name: model.get_buffer(name) for name in saved_buffers(model)}
    floating = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
    may_be_taken = floating | set(left_over(model, index) if converts else ())
    for name, entry in index.items():
        if name in may_be_taken and not entry.dtype.is_floating_point:
            raise ConfigError(
                f"{name} is stored as {str(entry.dtype).removeprefix('torch.')}, and the model computes with "
                "floating-point numbers; give the full-precision model"
            )


class ComparableTensors(Protocol):
    """Stored tensors that can be compared."""

    index: dict[str, Entry]

    def are_equal(self, name: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two tensors have the same values in this dtype."""


def untie_what_differs(model: PreTrainedModel, stored: ComparableTensors) -> list[str]:
    """Untie weights that config.json ties and the files hold with different values, as `from_pretrained` does.

    If all are untied, the config says so. If some are and others are not, as the head of T5 1.1 and its encoder's and
    decoder's embeddings, no config can say it: whoever reads the saved weights compares them again.

    Args:
        model: on the meta device.

    Returns:
        Lines to print.
    """
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    differ = {
        target: source
        for target, source in ties.items()
        if target in stored.index
        and source in stored.index
        and not stored.are_equal(target, source, model.get_parameter(source).dtype)
    }
    if not differ:
        return []
    target, source = next(iter(differ.items()))
    for name in differ:
        owner, _, attribute = name.rpartition(".")
        shared = model.get_parameter(name)
        own = nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)
        setattr(model.get_submodule(owner), attribute, own)
    if len(differ) == len(ties):
        untie_config(model)
        said = "tie_word_embeddings: False: "
    else:
        # tie_weights() and the names in saved files (tensor_names.py) go by this table.
        model.all_tied_weights_keys = {name: tied_to for name, tied_to in ties.items() if name not in differ}
        said = f"{target} is not tied: "
    return [
        f"{said}config.json ties {target} to {source}, but the files hold different values, and each is taken (as "
        "transformers does)"
    ]


def untie_config(model: PreTrainedModel) -> None:
    """Make the model's config say that nothing is tied."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
