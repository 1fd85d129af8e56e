"""The linear layers that compute in float8, and how a sharded run gathers them.

Under LoRA the frozen weights are stored in float8 (policies/quantization/float8_linear.py). If all weights are trained,
they keep their dtype, and torchao's layers round a copy for each product. So checkpoints and exports are those of any
other run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from configs.adaptation import FLOAT8_MULTIPLE
from configs.training import TrainConfig
from data.batches.padding import PaddedWidth
from policies.mixed_precision import Precision
from policies.quantization.choice import linears_of_layers, storage_dtype
from policies.quantization.float8_linear import ROWWISE, TENSORWISE, FrozenFloat8Linear
from policies.quantization.packing import Quantization
from policies.sharding import Layout
from utils.device import DeviceFacts
from utils.errors import ConfigError, in_one_line
from utils.optional_packages import import_torchao


@dataclass(frozen=True)
class Float8:
    """How a run's linear layers compute in float8."""

    recipe: Literal["tensorwise", "rowwise"]
    emulated: bool  # on a CPU, which rounds to float8 and multiplies in fp32
    is_planned: bool  # of a plan, which needs shapes alone: layers that are trained stay as they are
    num_shards: int | None  # ranks over which trained weights are gathered in float8; None: in their compute dtype
    pads: bool  # micro-batches may have a number of tokens that is no multiple of FLOAT8_MULTIPLE
    stored: Quantization  # of frozen weights under an adapter


def resolve_float8(
    train: TrainConfig,
    precision: Precision,
    layout: Layout,
    widths: Sequence[PaddedWidth],
    facts: DeviceFacts,
    device: torch.device | None,
) -> Float8 | None:
    """How the run computes in float8; None if it does not.

    Args:
        widths: of micro-batches.
        facts: of the device that computes.
        device: where it is tried; None if that device is not here, as in a plan.

    Raises:
        ConfigError: if the device, the precision or torchao does not allow it.
    """
    recipe = train.float8
    if recipe is None:
        return None
    if facts.type == "cuda" and not facts.has_float8:
        raise ConfigError(
            "--float8: it needs an NVIDIA card of compute capability 8.9 or higher (H100, L40S, RTX 4090 and later); "
            "leave it out"
        )
    if precision.compute_dtype != torch.bfloat16:
        raise ConfigError(
            f"--float8: the rest of the model must compute in bf16, and this run is {precision.name}; give "
            "--mixed_precision True or --pure_bf16, or leave this out"
        )
    # torchao gathers weights with one scale per tensor; a frozen base is stored in float8 already.
    gathers = recipe == "tensorwise" and layout.kind == "fully_shard" and not (layout.cpu_offload or train.use_peft)
    float8 = Float8(
        recipe=recipe,
        emulated=facts.type == "cpu",
        is_planned=device is None,
        num_shards=layout.mesh_shape[1] if gathers else None,
        pads=any(width.multiple_of % FLOAT8_MULTIPLE or width.limit % FLOAT8_MULTIPLE for width in widths),
        stored=Quantization(
            bits=8,
            quant_type=ROWWISE if recipe == "rowwise" else TENSORWISE,
            use_double_quant=False,
            compute_dtype=torch.bfloat16,
            storage_dtype=storage_dtype("auto", layout),
        ),
    )
    if device is not None:
        if not train.use_peft:
            import_torchao("--float8")
        _try_on(device, float8, stored=train.use_peft)
    return float8


def _try_on(device: torch.device, float8: Float8, *, stored: bool) -> None:
    """Multiply once, forward and backward: the surest way to learn whether this torch does it on this device."""
    try:
        plain = nn.Linear(64, 64, bias=False, device=device, dtype=torch.bfloat16)
        model = nn.Sequential(plain)
        if stored:
            linear = FrozenFloat8Linear(plain, float8.stored)
            linear.weight = nn.Parameter(linear.quantize(plain.weight.detach()), requires_grad=False)
            model = nn.Sequential(linear)
        else:
            _convert(model, replace(float8, num_shards=None), {"0"})
        model(torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    except Exception as error:
        raise ConfigError(
            f"--float8: {float8.recipe} does not work on this device with torch {torch.__version__} "
            f"({in_one_line(error)}); leave it out"
        ) from error


def store_in_float8(model: PreTrainedModel, float8: Float8) -> str:
    """Replace the linear layers of a frozen model by layers that are stored in float8.

    Args:
        model: on the meta device.

    Returns:
        A line to print.

    Raises:
        ConfigError: if no layer is suited.
    """
    found, line = _chosen(model, float8, "stored and computed in")
    for name, linear in found.items():
        model.set_submodule(name, FrozenFloat8Linear(linear, float8.stored))
    return line


def compute_in_float8(model: PreTrainedModel, float8: Float8) -> str:
    """Let linear layers compute in float8, by torchao. Their weights keep names and dtypes.

    Args:
        model: on the meta device.

    Returns:
        A line to print.

    Raises:
        ConfigError: if no layer is suited.
    """
    found, line = _chosen(model, float8, "computed in")
    if gathers_float8(found, float8):
        line += "; gathered in float8"
    elif float8.num_shards is not None:
        float8 = replace(float8, num_shards=None)
        line += "; gathered in bf16, since rows do not divide by the ranks"
    if not float8.is_planned:
        _convert(model, float8, set(found))
    return line


def gathers_float8(linears: Mapping[str, nn.Linear], float8: Float8) -> bool:
    """Whether trained weights are rounded before they are gathered. torchao does not pad the parts of its ranks to the
    same size, so their rows must divide by the ranks."""
    shards = float8.num_shards
    return shards is not None and not any(linear.out_features % shards for linear in linears.values())


def _convert(model: nn.Module, float8: Float8, names: set[str]) -> None:
    torchao = import_torchao("--float8")
    pads = float8.pads or any("expert" in name for name in names)  # which get as many tokens as are routed to them
    config = replace(
        torchao.Float8LinearConfig.from_recipe_name(float8.recipe),
        emulate=float8.emulated,
        pad_inner_dim=pads and not float8.emulated,
        enable_fsdp_float8_all_gather=float8.num_shards is not None,
    )
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in names)


def float8_linears(model: PreTrainedModel, float8: Float8) -> dict[str, nn.Linear]:
    """The layers of a model that compute in float8, or in a plan would, by name."""
    there = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and _is_float8(m)}
    # A plan converts no trained layer (`compute_in_float8`), so they are chosen anew.
    return there or {name: linear for name, linear in linears_of_layers(model)[0] if not _why_not(linear, float8)}


def _chosen(model: PreTrainedModel, float8: Float8, what: str) -> tuple[dict[str, nn.Linear], str]:
    """The layers, and a line that names them and those left in bf16.

    Raises:
        ConfigError: if there is none.
    """
    linears, head = linears_of_layers(model)
    reasons = {name: _why_not(linear, float8) for name, linear in linears}
    found = {name: linear for name, linear in linears if not reasons[name]}
    left = {
        f"{name.rpartition('.')[2]} ({linear.out_features} x {linear.in_features}, {reasons[name]})": None
        for name, linear in linears
        if reasons[name]
    }
    if not found:
        raise ConfigError(
            f"--float8: no linear layer of {type(model).__name__} is suited "
            f"({', '.join(left) or 'it has none of class torch.nn.Linear'}); leave it out"
        )
    count = sum(linear.weight.numel() for linear in found.values())
    total = sum(parameter.numel() for parameter in model.parameters())
    emulated = ", emulated on this CPU: for tests, slower than bf16" if float8.emulated else ""
    return found, (
        f"float8: {float8.recipe}, {count / 1e6:,.1f} of {total / 1e6:,.1f} million weights {what} float8; in bf16: "
        f"{', '.join([head, *left])}{emulated}"
    )


def _why_not(linear: nn.Linear, float8: Float8) -> str:
    """Why a layer stays in bf16; empty if it computes in float8.

    The sizes from which float8 is faster are those of torchao's `_auto_filter_for_recipe`, measured on H100 GPUs by its
    authors (https://github.com/pytorch/ao/tree/main/torchao/float8#performance). Emulation is never faster.
    """
    rows, columns = linear.out_features, linear.in_features
    if rows % FLOAT8_MULTIPLE or columns % FLOAT8_MULTIPLE:
        return f"no multiples of {FLOAT8_MULTIPLE}"
    if float8.recipe == "tensorwise":
        small = columns <= 4096 and rows <= 1024
    else:
        small = rows <= 2048 or columns <= 1024 or (rows <= 4096 and columns <= 2048)
    return "too small to gain" if small and not float8.emulated else ""


def keep_scales(model: nn.Module, optimizer: Optimizer, float8: Float8 | None) -> None:
    """After each update, compute the scales of all weights that are gathered in float8: one reduction for all."""
    if float8 is None or float8.num_shards is None:
        return
    precompute = import_torchao("--float8").precompute_float8_dynamic_scale_for_fsdp
    optimizer.register_step_post_hook(lambda *_: precompute(model))


@contextmanager
def computed_in_bf16(model: nn.Module) -> Iterator[None]:
    """Inside this context layers in float8 compute in bf16, with weights rounded as they are."""
    layers: list[Any] = [m for m in model.modules() if isinstance(m, nn.Linear) and _is_float8(m)]
    for layer in layers:
        layer.forward = MethodType(_forward_in_bf16, layer)
    try:
        yield
    finally:
        for layer in layers:
            # Uncovers the class's forward again.
            del layer.forward


def _is_float8(linear: nn.Linear) -> bool:
    return isinstance(linear, FrozenFloat8Linear) or type(linear).__module__.startswith("torchao.float8")


def _forward_in_bf16(linear: Any, inputs: torch.Tensor) -> torch.Tensor:
    if isinstance(linear, FrozenFloat8Linear):
        weight = linear.dequantize()
    else:  # a weight that was gathered in float8 is read by copying it
        weight = inputs.new_empty(linear.weight.shape).copy_(linear.weight)
    return nn.functional.linear(inputs, weight.to(inputs.dtype), linear.bias)
