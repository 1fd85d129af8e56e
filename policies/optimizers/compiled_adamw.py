"""torch's AdamW with large tensors updated by a compiled kernel, which reads gradients and never writes them.

torch's fused kernel reaches less of an H200's memory bandwidth than a compiled one, and writes gradients back if it
divides them by a clipping factor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.optim import AdamW
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from policies.compilation.layers import compilation_named
from utils.local_tensors import local_tensor

ROW = 1024
"""Elements of a row. Tensors are updated as [rows, ROW], so that one kernel serves tensors of all sizes and still knows
that rows are aligned, which wide loads need."""

ALIGNMENT = 16  # bytes; torch copies other tensors before a compiled kernel reads them

LARGE = 2**22
"""Fewest elements of a large tensor. The host takes 120 microseconds to start its kernel, in which a device could read
and write 2**25 (bf16: 14 bytes per element, 4 TB/s). But it starts them while the device still computes gradients."""


class _Tensors(NamedTuple):
    """This rank's part of a parameter, its gradient and its states."""

    weight: torch.Tensor
    gradient: torch.Tensor
    average: torch.Tensor
    square: torch.Tensor
    step: torch.Tensor  # [], a number


class CompiledAdamW(AdamW):
    """Steps, states and checkpoints of AdamW(fused=True), up to rounding. Small tensors take its fused kernel.

    Args:
        large: fewest elements, on this rank, of a tensor that the compiled kernel updates.
    """

    def __init__(self, params: ParamsT, *, large: int = LARGE, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        # As in torch's fused optimizers: the first divides gradients; there is no step if the second is 1.
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        self._large = large
        self._update = torch.compile(_update, fullgraph=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            # As torch's step fills them: weights, gradients, both averages, those of amsgrad (none here), and steps.
            lists = [list[torch.Tensor]() for _ in range(6)]
            self._init_group(group, *lists)
            every = [_Tensors(*map(local_tensor, each)) for each in zip(*lists[:4], lists[5], strict=True)]
            self._update_small([each for each in every if not self._is_large(each)], group)
            self._update_large([each for each in every if self._is_large(each)], group)

    def _is_large(self, tensors: _Tensors) -> bool:
        num_elements = tensors.weight.numel()
        if num_elements < max(self._large, 2 * ROW) or num_elements % ROW:
            return False
        return all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors[:4])

    def _update_small(self, small: list[_Tensors], group: dict[str, Any]) -> None:
        if not small:
            return
        weights, gradients, averages, squares, steps = (list(tensors) for tensors in zip(*small, strict=True))
        adamw(
            weights,
            gradients,
            averages,
            squares,
            [],
            steps,
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    def _update_large(self, large: list[_Tensors], group: dict[str, Any]) -> None:
        if not large:
            return
        beta1, beta2 = group["betas"]
        torch._foreach_add_([each.step for each in large], 1)
        # What changes from step to step is in tensors, so that no value of it is part of the kernel. fp64: 1 - 0.999
        # has few digits in fp32.
        steps = torch.stack([each.step for each in large]).double()
        rates, roots = (group["lr"] / (1 - beta1**steps)).float(), (1 - beta2**steps).sqrt().float()
        kept = torch.full_like(rates, 1 - group["lr"] * group["weight_decay"])
        divisor = torch.ones_like(rates) if self.grad_scale is None else self.grad_scale.expand_as(rates)
        stays = torch.zeros_like(rates)
        if self.found_inf is not None:
            stays = self.found_inf.expand_as(rates)
            # A step that the device leaves out is not counted either, as in torch's kernel.
            torch._foreach_sub_([each.step for each in large], [self.found_inf] * len(large))
        # Eight numbers are 32 bytes, so those of each tensor are aligned; torch would copy what is not.
        unused = [torch.zeros_like(rates)] * 3
        numbers = torch.stack((rates, roots, kept, divisor, stays, *unused), dim=1)
        for each, scalars in zip(large, numbers, strict=True):
            rows = [tensor.detach().view(-1, ROW) for tensor in each[:4]]
            for tensor in rows:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # or each shape would compile a kernel of its own
            with compilation_named("the update of AdamW", "--compile_optimizer"):
                self._update(rows, scalars, beta1=beta1, beta2=beta2, eps=group["eps"])


def _update(rows: list[torch.Tensor], scalars: torch.Tensor, *, beta1: float, beta2: float, eps: float) -> None:
    """AdamW of one tensor, which compiles to one pass: all arithmetic is in fp32, and stored values are rounded.

    Args:
        rows: weight, gradient and the two averages, [rows, ROW] each.
        scalars: [8]; the learning rate and the square root that scales the average of squares, their bias corrected;
            what weight decay leaves of a weight; what divides the gradient; 1 if all stays as it is; 0, unused.
    """
    (weight, gradient, average, square), (rate, root, kept, divisor, stays, *_) = rows, scalars.unbind()
    gradient = gradient.float() / divisor
    new_average = torch.lerp(average.float(), gradient, 1 - beta1)
    new_square = square.float() * beta2 + (1 - beta2) * gradient * gradient
    new_weight = weight.float() * kept - rate * new_average / (new_square.sqrt() / root + eps)
    for stored, new in ((weight, new_weight), (average, new_average), (square, new_square)):
        stored.copy_(torch.where(stays > 0, stored.float(), new))
