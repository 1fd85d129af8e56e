"""AdamW with averages in a dtype of choice, and with Kahan summation for weights in bf16.

After AnyPrecisionAdamW of torchdistX and llama-recipes; AdamW itself is Loshchilov & Hutter's (arXiv 1711.05101), and
Kahan summation of weight updates is from "Revisiting BFloat16 Training" (arXiv 2010.06192). Unlike there, arithmetic is
all in fp32 and only what is kept is rounded, and the compensation covers weight decay, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from policies.optimizers.states import LocalOptimizer, zero_state
from utils.distributed import local_tensor

PIECES = {"cuda": 2**23, "cpu": 2**18}
"""Elements stepped on at once, by device: enough to keep a GPU busy, where each fp32 copy of them is 32 MiB; few enough
to stay in a CPU core's cache, which makes the step five times as fast there."""


class _Piece(NamedTuple):
    """Of one parameter as much as is stepped on at once."""

    step: int
    weight: torch.Tensor
    gradient: torch.Tensor
    momentum: torch.Tensor
    variance: torch.Tensor
    compensation: torch.Tensor | None


class AnyPrecisionAdamW(LocalOptimizer):
    """Its states: `exp_avg`, `exp_avg_sq`, and with Kahan summation `compensation`, in bf16.

    Kahan summation keeps what rounding took from each update and adds it to the next: weights in bf16 then learn from
    updates that are too small to change them one by one.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_dtype: torch.dtype = torch.bfloat16,
        variance_dtype: torch.dtype = torch.bfloat16,
        use_kahan_summation: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._dtypes = {"exp_avg": momentum_dtype, "exp_avg_sq": variance_dtype}
        if use_kahan_summation:
            self._dtypes["compensation"] = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step on every parameter that has a gradient."""
        for group in self.param_groups:
            pieces: list[_Piece] = []
            num_elements = 0
            for parameter in group["params"]:
                for piece in self._pieces(parameter):
                    pieces.append(piece)
                    num_elements += piece.weight.numel()
                    if num_elements >= PIECES[piece.weight.device.type]:
                        _update(pieces, **_options(group))
                        pieces, num_elements = [], 0
            if pieces:
                _update(pieces, **_options(group))

    def _take_up(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """In this optimizer's dtypes, though the states may be from one with others."""
        taken: dict[str, Any] = {"step": state["step"]}
        for key, dtype in self._dtypes.items():
            taken[key] = state[key].to(dtype) if key in state else zero_state(parameter, parameter.shape, dtype)
        return taken

    def _pieces(self, parameter: nn.Parameter) -> Iterator[_Piece]:
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state.update({key: zero_state(parameter, parameter.shape, dtype) for key, dtype in self._dtypes.items()})
        state["step"] += 1
        whole = [local_tensor(t).detach() for t in (parameter, parameter.grad, *(state[key] for key in self._dtypes))]
        # An update is elementwise, so where a tensor is cut changes nothing.
        flat = all(tensor.is_contiguous() for tensor in whole)
        size = PIECES[whole[0].device.type]
        cut = [tensor.view(-1).split(size) if flat else [tensor] for tensor in whole]
        for weight, gradient, momentum, variance, *compensation in zip(*cut, strict=True):
            yield _Piece(state["step"], weight, gradient, momentum, variance, *(compensation or [None]))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}


def _update(pieces: list[_Piece], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """One step on all of them together."""
    beta1, beta2 = betas
    # What is in fp32 is not copied here, and so changed in place below.
    weights, gradients = [p.weight.float() for p in pieces], [p.gradient.float() for p in pieces]
    momenta, variances = [p.momentum.float() for p in pieces], [p.variance.float() for p in pieces]
    torch._foreach_lerp_(momenta, gradients, 1 - beta1)
    torch._foreach_mul_(variances, beta2)
    torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(variances)
    torch._foreach_div_(denominators, [(1 - beta2**p.step) ** 0.5 for p in pieces])
    torch._foreach_add_(denominators, eps)
    changes = torch._foreach_div(momenta, denominators)
    del denominators
    torch._foreach_mul_(changes, [-lr / (1 - beta1**p.step) for p in pieces])
    if weight_decay:
        torch._foreach_add_(changes, weights, alpha=-lr * weight_decay)
    _store([p.momentum for p in pieces], momenta)
    _store([p.variance for p in pieces], variances)
    compensations = [p.compensation for p in pieces if p.compensation is not None]
    if not compensations:
        torch._foreach_add_(weights, changes)
        _store([p.weight for p in pieces], weights)
        return
    torch._foreach_add_(changes, [compensation.float() for compensation in compensations])
    rounded = [w.to(p.weight.dtype) for w, p in zip(torch._foreach_add(weights, changes), pieces, strict=True)]
    torch._foreach_sub_(changes, torch._foreach_sub([tensor.float() for tensor in rounded], weights))
    _store(compensations, list(changes))
    torch._foreach_copy_([p.weight for p in pieces], rounded)


def _store(kept: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Round fp32 values to what they are kept in; those kept in fp32 are there already."""
    if any(tensor.dtype != torch.float32 for tensor in kept):
        torch._foreach_copy_(kept, values)
