"""The coefficient of the routers' loss, from the flag or from config.json."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from policies.routing.routers import coefficient_in, find_routers, has_balancing_loss, has_routers_loss
from utils.errors import ConfigError


def resolve_coefficient(
    asked: float | None, model_config: PreTrainedConfig, auto_model: Any, model_name: str
) -> tuple[float, list[str]]:
    """The coefficient, and lines to print.

    Args:
        asked: --router_aux_loss_coef. None: config.json decides: its own coefficient if `output_router_logits` is true,
            as in transformers' models, else 0.
        auto_model: the transformers class that builds the model, of the task.

    Raises:
        ConfigError: if a number other than 0 was given for a model whose routers transformers trains without this loss.
    """
    text_config = model_config.get_text_config()
    is_known = has_balancing_loss(model_config, auto_model)
    wants_it = bool(getattr(text_config, "output_router_logits", False))
    if asked and not is_known:
        raise ConfigError(
            f"--router_aux_loss_coef: {model_name} is a {text_config.model_type} model, which has no router that is "
            "trained with this loss; leave it out"
        )
    if asked is not None:
        return asked, []
    if not wants_it or not is_known:
        has_another = wants_it and has_routers_loss(model_config, auto_model)
        note = (
            "output_router_logits: the routers' own loss is not added for this family; cross-entropy alone is trained"
        )
        return 0.0, [note] if has_another else []
    coefficient = float(coefficient_in(model_config) or 0.0)
    note = f"router_aux_loss_coef: {coefficient:g}, since config.json says output_router_logits"
    return coefficient, [note] if coefficient else []


def check_routers(model: PreTrainedModel, coefficient: float, *, asked: float | None) -> list[str]:
    """Check that a model without weights has routers if their loss is to be trained. Returns lines to print.

    A mixture's config may name no layer with experts, and older versions of transformers do not name all routers.

    Raises:
        ConfigError: if it has none and --router_aux_loss_coef asked for the loss.
    """
    if not coefficient or find_routers(model):
        return []
    lack = f"transformers {transformers.__version__} names no router in this {type(model).__name__}"
    if asked:
        raise ConfigError(f"--router_aux_loss_coef: {lack}; leave it out")
    return [f"router_aux_loss_coef: {lack}, so cross-entropy alone is trained"]
