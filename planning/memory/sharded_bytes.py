"""How many bytes of parameters and gradients each sharding unit of a model has, stored and gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from utils.parameters import keep_mark, packed_weights


@dataclass(frozen=True)
class UnitBytes:
    """The parameters that `fully_shard` gathers together."""

    stored: int = 0  # this rank's part of them
    whole: int = 0  # all of them as they are computed with
    grads: int = 0  # this rank's part of the gradients
    whole_grads: int = 0  # the gradients that backward computes
    stored_grads: int = 0  # the same in the dtype in which they wait for the optimizer
    num_trained: int = 0  # trained elements, whole
    packs_grads: bool = True  # they are copied into a buffer to be reduced


def units_of(
    model: nn.Module, units: Sequence[nn.Module]
) -> tuple[dict[nn.Module, list[nn.Parameter]], list[nn.Parameter]]:
    """The parameters of each unit, and those that belong to the root."""
    unit_of: dict[int, nn.Module] = {}
    for unit in units:  # inner units come first
        for parameter in unit.parameters():
            unit_of.setdefault(id(parameter), unit)
    found: dict[nn.Module, list[nn.Parameter]] = {unit: [] for unit in units}
    root: list[nn.Parameter] = []
    for parameter in model.parameters():
        owner = unit_of.get(id(parameter))
        (root if owner is None else found[owner]).append(parameter)
    return found, root


def unit_bytes(
    parameters: Iterable[nn.Parameter],
    num_shards: int,
    compute_dtype: torch.dtype | None,
    in_float8: frozenset[int] = frozenset(),
    replicated: frozenset[int] = frozenset(),
) -> UnitBytes:
    """The bytes of one unit.

    Args:
        num_shards: ranks that share it out, by rows (`fully_shard`); the first rank has the most.
        compute_dtype: weights are cast to it when they are gathered; None: they are not.
        in_float8: ids of those that are gathered in float8 instead; their gradients are not.
        replicated: ids of those that stay whole on every rank.
    """
    stored = whole = grads = whole_grads = stored_grads = num_trained = 0
    for parameter in parameters:
        if id(parameter) in replicated:
            stored += parameter.nbytes
            continue
        casts = compute_dtype is not None and parameter.is_floating_point()
        size = (compute_dtype if casts and compute_dtype else parameter.dtype).itemsize
        local = local_numel(parameter, num_shards)
        stored += local * parameter.element_size()
        whole += parameter.numel() * (1 if id(parameter) in in_float8 else size)
        if parameter.requires_grad:
            grads += local * parameter.element_size()
            whole_grads += parameter.numel() * size
            stored_grads += parameter.nbytes
            num_trained += parameter.numel()
    return UnitBytes(stored, whole, grads, whole_grads, stored_grads, num_trained)


def local_numel(parameter: torch.Tensor, num_shards: int) -> int:
    """The elements of the fullest rank: rows are dealt out whole."""
    if num_shards == 1 or parameter.dim() == 0:
        return parameter.numel()
    return -(-parameter.shape[0] // num_shards) * (parameter.numel() // max(1, parameter.shape[0]))


def local_parts(model: nn.Module, num_shards: int) -> Iterator[torch.Tensor]:
    """This rank's parts of the trained parameters, on the meta device."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            rows = -(-parameter.shape[0] // num_shards) if parameter.dim() else 1
            part = torch.empty((rows, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
            yield keep_mark(part, parameter)


def add_statistics(model: nn.Module) -> None:
    """Give packed weights the buffers that they have once they are filled, on the meta device: every rank has them."""
    for module in model.modules():
        for packed in packed_weights(module).values():
            for name, (shape, dtype) in packed.statistics_shapes().items():
                packed.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)


def largest_read(model: nn.Module) -> int:
    """The bytes of the largest parameter while it is read: whole, and in full precision before it is packed."""
    sizes = [parameter.nbytes for parameter in model.parameters()]
    for module in model.modules():
        for packed in packed_weights(module).values():
            sizes.append(packed.num_weights * packed.quantization.compute_dtype.itemsize)
    return max(sizes, default=0)
