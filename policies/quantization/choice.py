"""Which linear layers are quantized, how, and a check that sharding does not change their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel

from configs.quantization import QuantizationConfig
from policies.mixed_precision import DTYPES, Precision
from policies.parts import has_vision, language_part
from policies.quantization.quantized_linear import BLOCK, Quantization, QuantizedLinear
from policies.sharding import Layout
from policies.state_space import passed_to_kernels
from ranks.collectives import gather_to_all
from utils.compat import SHARDS_INTEGERS
from utils.errors import ConfigError, in_one_line
from utils.optional_packages import import_bitsandbytes

NUM_COMPARED = 16  # packed weights, as many as a large layer has


def resolve_quantization(
    settings: QuantizationConfig, precision: Precision, layout: Layout, device: torch.device | None
) -> Quantization | None:
    """The run's quantization, or None.

    Args:
        device: where it is tried; None if that device is not here, as in a plan.

    Raises:
        ConfigError: if bitsandbytes is missing or does not support the device, or if packed weights of this dtype
            cannot be sharded.
    """
    if settings.quantization is None:
        return None
    if device is not None:
        import_bitsandbytes("--quantization")
    if settings.compute_dtype == "fp16" and precision.compute_dtype != torch.float16:
        raise ConfigError(
            "--compute_dtype: gradients would vanish in fp16 without a loss scale; add --use_fp16, or leave this out"
        )
    quantization = Quantization(
        bits=4 if settings.quantization == "4bit" else 8,
        quant_type=settings.quant_type if settings.quantization == "4bit" else "int8",
        use_double_quant=settings.use_double_quant and settings.quantization == "4bit",
        compute_dtype=DTYPES[settings.compute_dtype] if settings.compute_dtype else precision.compute_dtype,
        storage_dtype=storage_dtype(settings.quant_storage, layout),
    )
    if device is not None:
        _try_on(device, quantization)
        quantization = replace(quantization, own_unpacking=_unpacks_on(device, quantization))
    return quantization


def storage_dtype(asked: str, layout: Layout) -> torch.dtype:
    """The dtype asked for. By default uint8, or fp32 if this version of torch only shards floating-point tensors.

    fp32 because every kernel copies it unchanged. Some copy bf16 and fp16 through fp32, which changes the bits of
    packed bytes that look like a NaN.
    """
    shards = layout.kind == "fully_shard"
    if asked == "auto":
        return torch.float32 if shards and not SHARDS_INTEGERS else torch.uint8
    if asked == "uint8" and shards and not SHARDS_INTEGERS:
        raise ConfigError(
            f"--quant_storage: torch {torch.__version__} does not shard uint8, 2.12 and later do; leave it out for fp32"
        )
    return DTYPES[asked]


def _try_on(device: torch.device, quantization: Quantization) -> None:
    """Quantize and multiply once: the surest way to learn whether bitsandbytes supports a device."""
    try:
        linear = QuantizedLinear(nn.Linear(BLOCK, BLOCK, bias=False, device="meta"), quantization)
        packed = linear.quantize(torch.ones(BLOCK, BLOCK, device=device))
        linear.weight = nn.Parameter(packed, requires_grad=False)
        inputs = torch.ones(2, BLOCK, device=device, dtype=quantization.compute_dtype, requires_grad=True)
        linear(inputs).sum().backward()
    except Exception as error:
        raise ConfigError(
            f"--quantization: bitsandbytes does not work on this device ({in_one_line(error)}); leave it out, or "
            "install a newer bitsandbytes, or one built for this device"
        ) from error


def _unpacks_on(device: torch.device, quantization: Quantization) -> bool:
    """Whether our kernel works on this device, and gives bitsandbytes' bits. It needs Triton, and a C compiler."""
    if device.type != "cuda" or quantization.quant_type != "nf4":
        return False
    shape = (BLOCK + 1, BLOCK)  # more than one of the kernel's programs, the last of them not full
    linear = QuantizedLinear(nn.Linear(shape[1], shape[0], bias=False, device="meta"), quantization)
    linear.weight = nn.Parameter(linear.quantize(torch.randn(shape, device=device)), requires_grad=False)
    expected = linear.dequantize()
    linear.quantization = replace(quantization, own_unpacking=True)
    try:
        return torch.equal(linear.dequantize(), expected)
    except Exception:  # any of Triton's and of its tools: bitsandbytes serves as well, but slower
        return False


def quantize_linears(model: PreTrainedModel, quantization: Quantization) -> str:
    """Replace every linear layer but the output head by a QuantizedLinear.

    In a model of image and text this covers the language model alone.

    Layers that transformers keeps in fp32 stay as they are: T5 casts what it multiplies with `wo` to that weight's
    dtype, and packed weights are bytes.

    Args:
        model: on the meta device.

    Returns:
        A line to print.

    Raises:
        ConfigError: if there is no linear layer.
    """
    linears, left_out = linears_of_layers(model)
    if not linears:
        raise ConfigError(
            f"--quantization: {type(model).__name__} has no torch.nn.Linear layers to quantize; leave it out"
        )
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    for name, module in linears:
        model.set_submodule(name, QuantizedLinear(module, quantization))
    quantized = sum(module.weight.numel() for _, module in linears)
    return (
        f"quantization: {quantization.name}, {quantized / 1e6:,.1f} of {num_weights / 1e6:,.1f} million weights: all "
        f"linear layers{' of the language model' if has_vision(model) else ''} but {left_out}"
    )


def linears_of_layers(model: PreTrainedModel) -> tuple[list[tuple[str, nn.Linear]], str]:
    """The linear layers that may be stored or computed in fewer bits, by name, and a list of the rest in words.

    The output head, layers that transformers keeps in fp32 (`quantize_linears` says why), and layers whose weights a
    Mamba layer passes to its kernel are left out. In a model of image and text only the language model counts. Experts
    that share one tensor are no linear layers, and often nearly all of the model.
    """
    head, parts = model.get_output_embeddings(), language_part(model) if has_vision(model) else [model]
    kept = {name for part in parts for name in getattr(part, "_keep_in_fp32_modules", None) or ()}
    inside, uncalled = {id(module) for part in parts for module in part.modules()}, passed_to_kernels(model)
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if _is_linear(module) and module is not head and id(module) in inside
        if kept.isdisjoint(name.split(".")) and name not in uncalled
    ]
    others = ["the output head", *sorted(kept | {name.rpartition(".")[2] for name in uncalled})]
    if experts := [parameter for part in parts for parameter in _experts(part)]:
        count = sum(parameter.numel() for parameter in experts)
        dtype = next(name for name, dtype in DTYPES.items() if dtype == experts[0].dtype)
        others.append(f"experts that are one tensor ({count / 1e6:,.1f} million weights in {dtype})")
    return linears, " and ".join(others)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module computes what nn.Linear does: by its class, or by its numbers if a family wrote its own.

    Falcon's is a product and a sum. Others choose experts with the product, or multiply groups of their input.
    """
    if type(module) is nn.Linear:
        return True
    if not isinstance(module, nn.Linear) or not type(module).__module__.startswith(("transformers.", "transformers_")):
        return False
    # Few numbers of its own: the module itself has no values yet.
    drawn = torch.Generator().manual_seed(0)
    names = dict.fromkeys(name for name, _ in module.named_parameters())
    values = {name: torch.randn((5, 3) if name == "weight" else (5,), generator=drawn) for name in names}
    inputs = torch.randn(2, 4, 3, generator=drawn)
    try:
        output = functional_call(module, values, inputs)
    except Exception:  # whatever it computes with these shapes
        return False
    product = functional.linear(inputs, values["weight"], values.get("bias"))
    return isinstance(output, torch.Tensor) and output.shape == product.shape and torch.allclose(output, product)


def _experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights [experts, ...] of mixtures; of torch's own modules, convolutions have such a shape, too."""
    for module in model.modules():
        if not type(module).__module__.startswith("torch.nn."):
            yield from (parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3)


@contextmanager
def gathering_changes_nothing(model: nn.Module) -> Iterator[None]:
    """Around filling in the weights: check that gathering a unit gives exactly the bytes that were quantized.

    Sharded packed weights pass through copies and collectives written for numbers. Without this check a changed bit
    would go unnoticed: training on a slightly different base looks like training.

    One unit is checked, usually a layer. If the unit is the whole model, only NUM_COMPARED of its weights are compared,
    since their bytes stay in host memory meanwhile.

    Raises:
        ConfigError: on every rank, if a byte differs.
    """
    units = [unit for unit in reversed(list(model.modules())) if isinstance(unit, FSDPModule)]  # inner before outer
    of_units = ((unit, [m for m in unit.modules() if isinstance(m, QuantizedLinear)]) for unit in units)
    unit, linears = next(((unit, linears[:NUM_COMPARED]) for unit, linears in of_units if linears), (None, []))
    if unit is None:
        yield
        return
    # As bytes in host memory: comparing numbers would take NaNs for different.
    quantized: dict[QuantizedLinear, torch.Tensor] = {}
    for linear in linears:
        linear.on_quantized = lambda packed, linear=linear: quantized.update({linear: packed.view(torch.uint8).cpu()})
    yield
    for linear in linears:
        linear.on_quantized = None
    unit.unshard()
    different = sum((linear.weight.view(torch.uint8).cpu() != quantized[linear]).sum().item() for linear in linears)
    unit.reshard()
    num_bytes = sum(packed.numel() for packed in quantized.values())
    storage = linears[0].weight.dtype
    # All ranks raise together: one that went on alone would wait for the others in its first collective.
    worst = max(gather_to_all(different))
    if worst:
        raise ConfigError(
            f"--quantization: gathering changed {worst} of {num_bytes} bytes of packed weights "
            f"(torch {torch.__version__}, stored as {storage}); give another --quant_storage, torch 2.12 or later with "
            "uint8, or --sharding_strategy NO_SHARD"
        )
