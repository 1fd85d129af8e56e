"""The names of a model's tensors: in the model, under adapters, and in files."""

from __future__ import annotations

from collections.abc import Container

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def shared_names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter, in the model's order; several where modules share one (tied weights)."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return list(names_of.values())


def saved_buffers(model: nn.Module) -> list[str]:
    """The names of the buffers that a state_dict holds."""
    parameters = {name for names in shared_names(model) for name in names}
    return [name for name in model.state_dict() if name not in parameters]


def names_in_files(model: PreTrainedModel) -> dict[str, list[str]]:
    """All names of each parameter and saved buffer, by the one under which transformers writes it into files."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    # Of tied names files hold the one that the others are tied to.
    names_of = {next((n for n in names if n not in tied), names[0]): names for names in shared_names(model)}
    names_of |= {name: [name] for name in saved_buffers(model)}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: names for name, names in names_of.items() if name not in ignored}


def find_stored(model: nn.Module, stored: Container[str]) -> dict[str, str]:
    """For each name in the model, the name of its tensor in files. A shared tensor may have any of its names there.

    Args:
        stored: the names in the files. A tensor that they do not hold is left out of the result.
    """
    stored_as: dict[str, str] = {}
    for names in [*shared_names(model), *([name] for name in saved_buffers(model))]:
        if key := next((name for name in names if name in stored), None):
            stored_as |= dict.fromkeys(names, key)
    return stored_as


def is_stored_as_named(model: PreTrainedModel) -> bool:
    """Whether files name and shape this model's tensors as the model does; transformers converts some families."""
    state = model.state_dict()
    stored = revert_weight_conversion(model, dict(state))
    return set(stored) == set(state) and all(stored[name] is state[name] for name in state)


def plain_name(name: str) -> str:
    """The name in the model without adapters.

    peft puts an adapted layer's own weights below `base_layer`. It puts those of an adapted attention, whose modules
    are called `attn` or `self_attn`, below `model`. It puts an embedding with trained tokens below `token_adapter`.
    """
    name = name.replace(".original_module", "")  # of a module that is trained whole
    return name.replace(".token_adapter", "").replace(".base_layer", "").replace("attn.model.", "attn.")
