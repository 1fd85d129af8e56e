"""How LoRA's factors begin, other than peft's default: PiSSA, OLoRA and orthogonal factors.

PiSSA and OLoRA take the product of their first factors, s B0 A0, out of the base, and train on from there: the model
computes (W - s B0 A0) + s B A. Here the base stays as it is, and the adapter has twice the rank: its first half is B A,
its second half -B0 A0, which is not trained. That is the same sum, and the plain LoRA that peft's docs describe for
converting PiSSA. So every checkpoint and folder fits the untouched base.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import Linear, LoraLayer
from torch import nn

from configs.peft import LoraConfig
from policies.adapters.from_base import set_from_base
from policies.weights.sources import keep_part
from utils.errors import ConfigError

Factors = tuple[torch.Tensor, torch.Tensor]  # A [rank, in], B [out, rank]


def check_layers(model: nn.Module, lora: LoraConfig) -> None:
    """Refuse adapters of anything but linear layers, and of more ranks than a layer's weight has.

    Raises:
        ConfigError: naming the first such layer.
    """
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or lora.init_lora_weights == "default":
            continue
        layer: Any = module  # peft's types allow no features
        begins = f"--init_lora_weights: {lora.init_lora_weights}"
        place = name.rpartition("base_model.model.")[2]
        if not isinstance(layer, Linear):
            raise ConfigError(f"{begins} is for linear layers, and {place} is none; leave it out of --target_modules")
        most = min(layer.in_features or 0, layer.out_features or 0)
        if lora.begins_in_base and lora.r > most:
            raise ConfigError(f"{begins} finds {most} ranks in {place}, not {lora.r}; give a smaller --lora_config.r")


@torch.no_grad()
def draw_orthogonal(layer: Any, adapter: str) -> None:
    """Factors whose product is zero though neither is: peft's `orthogonal_init`, without rounding to the base's dtype.

    See https://datta0.github.io/posts/rethink-lora-init. The rank is even.
    """
    rank = layer.r[adapter]
    rotation, _ = torch.linalg.qr(torch.randn(rank, rank))
    factor_a: torch.Tensor = layer.lora_A[adapter].weight
    factor_b: torch.Tensor = layer.lora_B[adapter].weight
    factor_a.copy_(torch.randn(layer.in_features, rank // 2).mm(rotation[0::2]).T / 10)
    factor_b.copy_(torch.randn(rank // 2, layer.out_features).T.mm(rotation[1::2]) / 10)


def set_factors(model: nn.Module, init: str) -> None:
    """Set the factors of PiSSA or OLoRA, and in the second half of their rank the same ones with B negated.

    Ranks share the layers of a unit out among them. Every rank must call this.
    """
    set_from_base(
        model,
        lambda layer: bool(layer.lora_A),
        lambda layers: [{name: factors[name] for name in factors} for factors in _share_out(layers, init)],
        _store,
    )


def _share_out(layers: list[Any], init: str) -> list[dict[str, Factors]]:
    """The factors of each layer, computed by one rank each."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = []
    for index, layer in enumerate(layers):
        of_layer = {}
        for adapter in layer.lora_A:
            weight = layer.get_base_layer().weight
            weight = weight.T if layer.fan_in_fan_out else weight
            num_ranks, owner = layer.num_trained_ranks, index % world_size
            if owner == rank:
                factors = first_factors(weight.float(), num_ranks, layer.scaling[adapter], init)
            else:
                sizes = (num_ranks, weight.shape[1]), (weight.shape[0], num_ranks)
                factors = (weight.new_empty(sizes[0]).float(), weight.new_empty(sizes[1]).float())
            of_layer[adapter] = factors
        found.append(of_layer)
    if world_size > 1:
        for index, of_layer in enumerate(found):
            for factors in of_layer.values():
                for factor in factors:
                    dist.broadcast(factor, src=index % world_size)
    return found


def first_factors(weight: torch.Tensor, rank: int, scaling: float, init: str) -> Factors:
    """A and B of a weight, fp32 [out, in], as peft computes them.

    PiSSA (arXiv 2404.02948): the `rank` largest singular values and their vectors, so s B A is the best approximation;
    `pissa_niter_16` finds them by 16 subspace iterations, which takes a fraction of the time. OLoRA (arXiv 2406.01775):
    the first columns of Q and rows of R.
    """
    if init == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if init == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        left, values, right = left[:, :rank], values[:rank], right[:rank]
    else:
        devices = [weight.device] if weight.is_cuda else []
        with torch.random.fork_rng(devices):  # its start is drawn, and the same in every run
            torch.manual_seed(0)
            left, values, right = torch.svd_lowrank(weight, rank, niter=int(init.rpartition("_")[2]))
        right = right.T
    roots = (values / scaling).sqrt()
    return (roots.unsqueeze(1) * right).contiguous(), (left * roots).contiguous()


def _store(layer: Any, factors: dict[str, Factors]) -> None:
    for adapter, (factor_a, factor_b) in factors.items():
        keep_part(layer.lora_A[adapter].weight, torch.cat([factor_a, factor_a]))
        keep_part(layer.lora_B[adapter].weight, torch.cat([factor_b, -factor_b], dim=1))


def first_half_trained(weight: torch.Tensor, num_trained: int, dim: int) -> torch.Tensor:
    """The factor, whose gradient is zero behind the first `num_trained` ranks, which lie along `dim`."""
    trained, constant = weight.split([num_trained, weight.shape[dim] - num_trained], dim)
    return torch.cat([trained, constant.detach()], dim)
