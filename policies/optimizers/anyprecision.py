"""AdamW with averages in bf16 or fp32, and with Kahan summation for weights in bf16.

After AnyPrecisionAdamW of torchdistX and llama-recipes. AdamW is by Loshchilov & Hutter (arXiv 1711.05101); Kahan
summation of weight updates is from "Revisiting BFloat16 Training" (arXiv 2010.06192). Unlike in those, all arithmetic
is in fp32 and only stored values are rounded, and the compensation covers weight decay too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.mixed_precision import DTYPES
from policies.optimizers.kind import Groups, OptimizerKind
from policies.optimizers.states import LocalOptimizer, zero_state
from utils.local_tensors import local_tensor

SLICE_SIZES = {"cuda": 2**23, "cpu": 2**18}
"""Elements updated at once, by device. On a GPU, enough to keep it busy (each fp32 copy takes 32 MiB). On a CPU, few
enough to stay in a core's cache, which makes a step five times as fast."""


class _Slice(NamedTuple):
    """A slice of one parameter, updated in one go."""

    step: int
    weight: torch.Tensor
    gradient: torch.Tensor
    momentum: torch.Tensor
    variance: torch.Tensor
    compensation: torch.Tensor | None


class AnyPrecisionAdamW(LocalOptimizer):
    """States: `exp_avg`, `exp_avg_sq`, and with Kahan summation `compensation` in bf16.

    Kahan summation keeps the rounding error of each update and adds it to the next one. So weights in bf16 learn from
    updates that are too small to change them one by one.
    """

    def __init__(
        self,
        params: ParamsT,
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
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            slices: list[_Slice] = []
            num_elements = 0
            for parameter in group["params"]:
                for part in self._slices(parameter):
                    slices.append(part)
                    num_elements += part.weight.numel()
                    if num_elements >= SLICE_SIZES[part.weight.device.type]:
                        _update(slices, **_options(group))
                        slices, num_elements = [], 0
            if slices:
                _update(slices, **_options(group))

    def _restore(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """The loaded states in this optimizer's dtypes; they may come from one with other dtypes."""
        taken: dict[str, Any] = {"step": state["step"]}
        for key, dtype in self._dtypes.items():
            taken[key] = state[key].to(dtype) if key in state else zero_state(parameter, parameter.shape, dtype)
        return taken

    def _slices(self, parameter: nn.Parameter) -> Iterator[_Slice]:
        """The parameter's slices with their states, its step already counted; nothing if it has no gradient."""
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state.update({key: zero_state(parameter, parameter.shape, dtype) for key, dtype in self._dtypes.items()})
        state["step"] += 1
        whole = [local_tensor(t).detach() for t in (parameter, parameter.grad, *(state[key] for key in self._dtypes))]
        # Updates are elementwise, so it does not matter where a tensor is cut.
        flat = all(tensor.is_contiguous() for tensor in whole)
        size = SLICE_SIZES[whole[0].device.type]
        cut = [tensor.view(-1).split(size) if flat else [tensor] for tensor in whole]
        for weight, gradient, momentum, variance, *compensation in zip(*cut, strict=True):
            yield _Slice(state["step"], weight, gradient, momentum, variance, *(compensation or [None]))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}


def _update(slices: list[_Slice], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Update all slices together."""
    beta1, beta2 = betas
    # float() does not copy fp32 tensors, so these are changed in place below.
    weights, gradients = [s.weight.float() for s in slices], [s.gradient.float() for s in slices]
    momenta, variances = [s.momentum.float() for s in slices], [s.variance.float() for s in slices]
    torch._foreach_lerp_(momenta, gradients, 1 - beta1)
    torch._foreach_mul_(variances, beta2)
    torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(variances)
    torch._foreach_div_(denominators, [(1 - beta2**s.step) ** 0.5 for s in slices])
    torch._foreach_add_(denominators, eps)
    changes = torch._foreach_div(momenta, denominators)
    del denominators
    torch._foreach_mul_(changes, [-lr / (1 - beta1**s.step) for s in slices])
    if weight_decay:
        torch._foreach_add_(changes, weights, alpha=-lr * weight_decay)
    _store([s.momentum for s in slices], momenta)
    _store([s.variance for s in slices], variances)
    compensations = [s.compensation for s in slices if s.compensation is not None]
    if not compensations:
        torch._foreach_add_(weights, changes)
        _store([s.weight for s in slices], weights)
        return
    torch._foreach_add_(changes, [compensation.float() for compensation in compensations])
    # Kahan: the weight takes the rounded sum, and the compensation what rounding left of it.
    rounded = [w.to(s.weight.dtype) for w, s in zip(torch._foreach_add(weights, changes), slices, strict=True)]
    torch._foreach_sub_(changes, torch._foreach_sub([tensor.float() for tensor in rounded], weights))
    _store(compensations, list(changes))
    torch._foreach_copy_([s.weight for s in slices], rounded)


def _store(kept: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Round fp32 values into the tensors that keep them; values kept in fp32 were changed in place already."""
    if any(tensor.dtype != torch.float32 for tensor in kept):
        torch._foreach_copy_(kept, values)


class AnyPrecisionKind(OptimizerKind):
    loses_small_updates = True

    def build(self, groups: Groups, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
        return AnyPrecisionAdamW(
            groups,
            lr=train.lr,
            weight_decay=train.weight_decay,
            betas=(train.adam_beta1, train.adam_beta2),
            momentum_dtype=DTYPES[fsdp.momentum_dtype],
            variance_dtype=DTYPES[fsdp.variance_dtype],
            use_kahan_summation=fsdp.use_kahan_summation,
        )

    def state_bytes(self, parameter: torch.Tensor, shape: torch.Size, train: TrainConfig, fsdp: FsdpConfig) -> int:
        sizes = DTYPES[fsdp.momentum_dtype].itemsize + DTYPES[fsdp.variance_dtype].itemsize
        return (sizes + (2 if fsdp.use_kahan_summation else 0)) * shape.numel()

    def temporary_bytes(self, parts: Sequence[torch.Tensor], train: TrainConfig, fsdp: FsdpConfig) -> int:
        # Of a slice: weight, gradient and averages in fp32 if they are not stored so, denominator and change.
        copies = 2 + sum(dtype != "fp32" for dtype in (fsdp.momentum_dtype, fsdp.variance_dtype))
        copies += 2 * any(part.dtype != torch.float32 for part in parts) + fsdp.use_kahan_summation
        return 4 * copies * min(sum(part.numel() for part in parts), SLICE_SIZES["cuda"])


KIND = AnyPrecisionKind()
