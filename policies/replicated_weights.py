"""Frozen weights that stay whole on each rank of a sharded model, so that they are never gathered.

No optimizer changes them, so every rank's copy stays as it was read. `fully_shard` leaves them out
(`ignored_params`): it neither casts nor moves them, so they are stored in the dtype that they are computed in.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from configs.fsdp import FsdpConfig
from policies.mixed_precision import Precision
from policies.wrapping import outermost
from utils.errors import ConfigError
from utils.wording import plural


def num_asked(fsdp: FsdpConfig, precision: Precision) -> int | None:
    """The layers that --num_replicated_layers names, in a layout that gathers weights; None: a plan may choose.

    Raises:
        ConfigError: if it names some, and weights are cast as they are gathered.
    """
    asked = fsdp.num_replicated_layers
    if not precision.casts:
        return asked if isinstance(asked, int) else None
    if isinstance(asked, int) and asked:
        raise ConfigError(
            f"--num_replicated_layers: {precision.name} casts weights as they are gathered; give --pure_bf16 or "
            "--mixed_precision False, or leave this out"
        )
    return 0


def replicated_weights(model: nn.Module, layers: Sequence[nn.Module], num_layers: int) -> list[nn.Parameter]:
    """The frozen weights of the first `num_layers` layers, and those outside of layers; none if that is 0.

    Embeddings, norms and head are gathered for most of a step in any case, so whole they cost least. A weight that
    another layer shares stays with that one.

    Args:
        model: adapted, not sharded.
        layers: as `policies.wrapping.find_layers` returns them.

    Raises:
        ConfigError: if there are fewer layers.
    """
    if not num_layers:
        return []
    in_order = outermost(layers)[::-1]
    if num_layers > len(in_order):
        raise ConfigError(
            f"--num_replicated_layers: this model has {plural(len(in_order), 'layer')}, not {num_layers}; give at most "
            "that, or leave this out"
        )
    others = {id(parameter) for layer in in_order[num_layers:] for parameter in layer.parameters()}
    return [p for p in model.parameters() if not p.requires_grad and id(p) not in others]
