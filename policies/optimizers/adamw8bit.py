"""AdamW with averages in 8 bits, by bitsandbytes' kernels (Dettmers et al., arXiv 2110.02861), in every layout.

bitsandbytes works on plain tensors and quantizes blocks of 256 consecutive elements. Here it gets each rank's own part
of a parameter. Only parameters whose rows consist of whole blocks get averages in 8 bits; all others get fp32. So no
block spans two ranks: every layout and number of ranks computes the same, and a checkpoint fits any other layout.
bitsandbytes itself decides by the size of the part, so its numbers would depend on the layout
(https://github.com/pytorch/ao/issues/4912 is about the same in torchao).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.kind import Groups, OptimizerKind
from policies.optimizers.states import LocalOptimizer, zero_state
from ranks.environment import Environment
from utils.local_tensors import local_tensor, plain_tensor
from utils.optional_packages import import_bitsandbytes
from utils.units import readable

BLOCK = 256  # elements that share a scale; fixed in bitsandbytes' kernels
SMALLEST = 4096  # fewest elements of a parameter with 8-bit averages, as in bitsandbytes
SMALLEST_PAGED = 100_000  # fewest elements on this rank for paged averages, as in bitsandbytes


def has_8bit_states(parameter: torch.Tensor) -> bool:
    """Whether its averages have 8 bits. This depends on the whole parameter, not on how it is sharded."""
    num_elements = parameter.numel()
    return parameter.dim() > 1 and num_elements >= SMALLEST and (num_elements // parameter.shape[0]) % BLOCK == 0


class AdamW8bit(LocalOptimizer):
    """AdamW whose averages are in uint8, or in fp32 for parameters without `has_8bit_states`.

    States: `state1` and `state2` have the parameter's shape. In uint8 each block has a scale, in `absmax1` and
    `absmax2` `[rows, ..., blocks per row]`.

    If paged, `state1` and `state2` are in managed memory, which the driver moves between GPU and host as needed; to
    torch they are CPU tensors.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        paged: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._paged = paged
        self._functional: Any = import_bitsandbytes(f"--optimizer {type(self).__name__}").functional
        self._qmaps: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        if self._paged:
            # A checkpoint reads managed memory from the host, which is safe only once the kernels are done.
            torch.cuda.synchronize()

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._new_states(parameter))
        state["step"] += 1
        part = local_tensor(parameter).detach()
        # A rank without rows of it still counts the step, so that states agree on all ranks.
        if not part.numel():
            return
        # The kernels need weight and gradient contiguous and of one dtype (fp32, bf16 or fp16).
        weight, gradient = part.contiguous(), local_tensor(parameter.grad).to(part.dtype).contiguous()
        state1, state2 = local_tensor(state["state1"]), local_tensor(state["state2"])
        for average in (state1, state2):
            if getattr(average, "is_paged", False):
                self._functional.prefetch_tensor(average)
        (beta1, beta2), eps, lr, decay = group["betas"], group["eps"], group["lr"], group["weight_decay"]
        # The kernels run on the device's default stream, which also produces gradients and consumes weights.
        if state1.dtype == torch.uint8:
            scales = [local_tensor(state[key]).view(-1) for key in ("absmax1", "absmax2")]
            self._functional.optimizer_update_8bit_blockwise(
                "adam",
                gradient,
                weight,
                state1,
                state2,
                beta1,
                beta2,
                0.0,
                0.0,
                eps,
                state["step"],
                lr,
                *self._qmaps_on(weight.device),
                *scales,
                weight_decay=decay,
            )
        else:
            self._functional.optimizer_update_32bit(
                "adam", gradient, weight, state1, beta1, eps, state["step"], lr, state2, beta2, weight_decay=decay
            )
        # contiguous() made a copy, which the kernel has updated.
        if weight is not part and weight.data_ptr() != part.data_ptr():
            part.copy_(weight)

    def _restore(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """The loaded states, copied into new ones: averages may have to lie in paged memory."""
        own = self._new_states(parameter)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                local_tensor(own[key]).copy_(local_tensor(value))
            else:
                own[key] = value
        return own

    @torch.no_grad()
    def _new_states(self, parameter: nn.Parameter) -> dict[str, Any]:
        quantized = has_8bit_states(parameter)
        dtype = torch.uint8 if quantized else torch.float32
        state: dict[str, Any] = {"step": 0, "state1": self._average(parameter, dtype)}
        state["state2"] = self._average(parameter, dtype)
        if quantized:
            num_rows = parameter.shape[0]
            shape = (num_rows, *(1,) * (parameter.dim() - 2), parameter.numel() // num_rows // BLOCK)
            state["absmax1"] = zero_state(parameter, shape, torch.float32)
            state["absmax2"] = zero_state(parameter, shape, torch.float32)
        return state

    def _average(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        part = local_tensor(parameter)
        if not self._paged or part.numel() < SMALLEST_PAGED:
            return zero_state(parameter, parameter.shape, dtype)
        # Of the parameter's own kind, a DTensor if it is sharded, over pages that bitsandbytes allocates.
        average = torch.empty_like(plain_tensor(parameter), dtype=dtype, device="cpu")
        pages = self._functional.get_paged(*part.shape, dtype=dtype, device=part.device)
        self._functional.fill(pages, 0)
        local: Any = local_tensor(average).set_(pages)
        local.is_paged, local.page_deviceid = True, part.device.index  # how bitsandbytes recognizes them
        return average

    def _qmaps_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The values of the 256 codes, signed for `state1` and unsigned for `state2`."""
        if device not in self._qmaps:
            make = self._functional.create_dynamic_map
            self._qmaps[device] = make(signed=True).to(device), make(signed=False).to(device)
        return self._qmaps[device]


class PagedAdamW8bit(AdamW8bit):
    """AdamW8bit with `state1` and `state2` in paged memory."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **options, paged=True)


class AdamW8bitKind(OptimizerKind):
    eight_bit = True
    loses_small_updates = True

    def build(self, groups: Groups, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
        betas = (train.adam_beta1, train.adam_beta2)
        return AdamW8bit(groups, lr=train.lr, weight_decay=train.weight_decay, betas=betas)

    def state_bytes(self, parameter: torch.Tensor, shape: torch.Size, train: TrainConfig, fsdp: FsdpConfig) -> int:
        num_elements = shape.numel()
        if not has_8bit_states(parameter):
            return 8 * num_elements
        return 2 * num_elements + 8 * (num_elements // BLOCK)

    def has_states_of(self, other: OptimizerKind) -> bool:
        return isinstance(other, AdamW8bitKind)  # paged states are the same numbers in other memory

    def check(self, name: str, env: Environment) -> None:
        import_bitsandbytes(f"--optimizer {name}")

    def notes(self, trained: Sequence[nn.Parameter]) -> Iterator[str]:
        """A line if more than 5 % of the trained weights have states in 32 bits."""
        total = sum(parameter.numel() for parameter in trained)
        wide = [parameter for parameter in trained if not has_8bit_states(parameter)]
        num_wide = sum(parameter.numel() for parameter in wide)
        if num_wide > 0.05 * total:
            yield (
                f"optimizer: {num_wide:,} of {total:,} trained weights ({100 * num_wide / total:.0f} %), in "
                f"{len(wide)} of {len(trained)} tensors, have optimizer states in 32 bits ({readable(8 * num_wide)}): "
                f"8 bits need rows whose length is a multiple of {BLOCK}"
            )


KIND = AdamW8bitKind()
