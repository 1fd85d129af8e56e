"""Which units are gathered and reduced without packing (`--direct_collectives`; policies/direct_transfers.py does it).

`fully_shard` sends one buffer for each unit: shards are copied into it, whole weights out of it, and gradients into
another. Sent directly, each shard arrives in its whole weight, and gradients are reduced from where backward left them.
A unit's tensors are still one call of NCCL. The numbers are the same.

Weights of any unit are gathered directly, but for those that float8 rounds for it. Gradients are reduced directly if
that needs no other tensor: they are summed over one dimension of ranks, in the dtype in which they are computed, and
every rank has as many rows as the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from configs.fsdp import FsdpConfig
from utils.errors import ConfigError


def asks_directly(fsdp: FsdpConfig, *, gathers: bool) -> bool:
    """Whether units are sent directly.

    Args:
        gathers: the layout gathers weights over several ranks.

    Raises:
        ConfigError: if it gathers none, and --direct_collectives was given.
    """
    if fsdp.direct_collectives and not gathers:
        raise ConfigError(
            "--direct_collectives: this run shares no weights out over ranks, so it gathers none; start several "
            "processes (with --hsdp, several in each group), or leave this out"
        )
    return fsdp.direct_collectives


def why_not_reduced(
    parameters: Sequence[nn.Parameter],
    mesh_shape: tuple[int, int],
    reduce_dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
    in_float8: Collection[int] = (),
) -> str | None:
    """Why the gradients of a unit are packed before they are reduced; None if they are not.

    Args:
        parameters: of the unit, by their whole shapes.
        mesh_shape: copies of the model, and ranks that share one copy.
        reduce_dtype: in which gradients are summed.
        compute_dtype: weights are cast to it when they are gathered; None: they are not.
        in_float8: ids of parameters that are gathered in float8.
    """
    if any(id(parameter) in in_float8 for parameter in parameters):
        return ROUNDED
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if mesh_shape[0] > 1:
        return "copies of the model are summed, too"
    if any((compute_dtype or parameter.dtype) != reduce_dtype for parameter in trained):
        return f"gradients are cast to be summed in {_NAMES.get(reduce_dtype, reduce_dtype)}"
    if any(parameter.dim() == 0 or parameter.shape[0] % mesh_shape[1] for parameter in trained):
        return "ranks have parts of different sizes"
    return None


ROUNDED = "float8 rounds weights before they are gathered"

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def direct_line(units: Collection[tuple[str | None, str | None]]) -> str:
    """The line that says how many units are sent directly.

    Args:
        units: why each one's weights are not gathered directly, and why its gradients are not reduced so; None: they
            are. Units that train nothing have "" as their second reason.
    """
    gathered = sum(gather is None for gather, _ in units)
    trained = [(gather, reduction) for gather, reduction in units if reduction != ""]
    reduced = sum(reduction is None for _, reduction in trained)
    reasons = dict.fromkeys(reason for unit in units for reason in unit if reason)
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return (
        f"direct_collectives: weights of {gathered} of {len(units)} units are gathered, and gradients of {reduced} of "
        f"{len(trained)} reduced, without packing{why}"
    )
