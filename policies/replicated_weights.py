"""Frozen weights that stay whole on each rank of a sharded model, so that they are never gathered.

No optimizer changes them, so every rank's copy stays as it was read. `fully_shard` leaves them out
(`ignored_params`): it neither casts nor moves them, so they are stored in the dtype that they are computed in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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


def gathered_units(units: Sequence[nn.Module], replicated: Collection[nn.Parameter]) -> list[nn.Module]:
    """The units that are still gathered one at a time: all but those whose weights are mostly whole.

    Adapters of these are gathered with the root instead, once per step. They are small, and each gathering costs the
    host some milliseconds: gathered layer by layer, Qwen3-30B-A3B cut to 16 layers was 0.73 as fast on each of two
    H100s as on one.
    A trained layer of which a router's bias is frozen, as ERNIE's, is gathered by itself.

    Args:
        units: as `policies.wrapping.find_units` returns them.
        replicated: as `replicated_weights` returns them.
    """
    whole = set(map(id, replicated))

    def is_gathered(unit: nn.Module) -> bool:
        parameters = list(unit.parameters())
        kept = sum(parameter.nbytes for parameter in parameters if id(parameter) in whole)
        trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        return kept <= trained or any(not p.requires_grad and id(p) not in whole for p in parameters)

    return list(filter(is_gathered, units))


def replicated_weights(model: nn.Module, layers: Sequence[nn.Module], num_layers: int) -> list[nn.Parameter]:
    """The frozen weights of the first `num_layers` layers, and those outside of layers; none if that is 0.

    Embeddings, norms and head are gathered for most of a step in any case, so whole they cost least. A weight that
    another layer shares stays with that one.

    Args:
        model: adapted, not sharded.
        layers: as `policies.wrapping.find_layers` returns them.

    Raises:
        ConfigError: if there are fewer layers, or none.
    """
    if not num_layers:
        return []
    in_order = outermost(layers)[::-1]
    if not in_order:
        raise ConfigError("--num_replicated_layers: this model names no repeated layers; leave this out")
    if num_layers > len(in_order):
        raise ConfigError(
            f"--num_replicated_layers: this model has {plural(len(in_order), 'layer')}, not {num_layers}; give at most "
            "that, or leave this out"
        )
    others = {id(parameter) for layer in in_order[num_layers:] for parameter in layer.parameters()}
    return [p for p in model.parameters() if not p.requires_grad and id(p) not in others]
