"""Which linear layers and experts are quantized, how, and a check that sharding does not change their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel

from configs.quantization import QuantizationConfig
from policies.experts.finding import ExpertWeight, find_experts
from policies.mixed_precision import DTYPES, Precision
from policies.quantization.packing import BLOCK, MXFP4, PackedWeight, Quantization
from policies.quantization.quantized_experts import PackedExperts, pack_experts
from policies.quantization.quantized_linear import QuantizedLinear
from policies.sharding import Layout
from policies.text_scores import is_of_head
from policies.uncalled_layers import uncalled_layers
from ranks.collectives import gather_to_all
from utils.compat import SHARDS_INTEGERS
from utils.errors import ConfigError, in_one_line
from utils.model_parts import has_vision, language_part
from utils.optional_packages import import_bitsandbytes
from utils.parameters import count_weights, packed_weights

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
    asked = settings.quantization
    if device is not None and asked != MXFP4:
        import_bitsandbytes("--quantization")
    if settings.compute_dtype == "fp16" and precision.compute_dtype != torch.float16:
        raise ConfigError(
            "--compute_dtype: gradients would vanish in fp16 without a loss scale; add --use_fp16, or leave this out"
        )
    quantization = Quantization(
        bits=8 if asked == "8bit" else 4,
        quant_type={"4bit": settings.quant_type, "8bit": "int8", MXFP4: MXFP4}[asked],
        use_double_quant=settings.use_double_quant and asked == "4bit",
        compute_dtype=DTYPES[settings.compute_dtype] if settings.compute_dtype else precision.compute_dtype,
        storage_dtype=storage_dtype(settings.quant_storage, layout),
    )
    if device is not None:
        if asked != MXFP4:
            _try_on(device, quantization)
        if device.type == "cuda" and quantization.quant_type in ("nf4", MXFP4):
            obstacle = _why_not_unpacked_by_us(device, quantization)
            quantization = replace(quantization, own_unpacking=obstacle is None, slow_because=obstacle)
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


def _why_not_unpacked_by_us(device: torch.device, quantization: Quantization) -> str | None:
    """What keeps our kernel from the bits of bitsandbytes or torch on this device. It needs Triton and a C compiler."""
    # More than one of the kernel's programs, the last of them not full.
    packing = PackedExperts(ExpertWeight("", 3, BLOCK, BLOCK + 2, is_transposed=False), quantization)
    packed = packing.quantize(torch.randn(packing.plain_shape, device=device))
    expected = packing.dequantize(packed)
    packing.quantization = replace(quantization, own_unpacking=True)
    try:
        return None if torch.equal(packing.dequantize(packed), expected) else "it gives other numbers here"
    except Exception as error:  # any of Triton's and of its tools
        return in_one_line(error)


def quantize_weights(model: PreTrainedModel, quantization: Quantization) -> str:
    """Pack the weights of every linear layer but the output head, and of a mixture's experts.

    In a model of image and text this covers the language model alone.

    Layers that transformers keeps in fp32 stay as they are: T5 casts what it multiplies with `wo` to that weight's
    dtype, and packed weights are bytes.

    Args:
        model: on the meta device, its experts computed by products (`policies.experts.forward`).

    Returns:
        A line to print.

    Raises:
        ConfigError: if there is neither a linear layer nor a mixture's experts.
    """
    experts = _experts_of_layers(model)
    linears, left_out = linears_of_layers(model, without=experts)
    if quantization.quant_type == MXFP4:
        linears = []
        if not experts:
            raise ConfigError(
                f"--quantization: {type(model).__name__} has no experts to store in MXFP4; give 4bit, or leave it out"
            )
    if not linears and not experts:
        raise ConfigError(
            f"--quantization: {type(model).__name__} has no torch.nn.Linear layers to quantize; leave it out"
        )
    _refuse_shared(model, linears)
    for name, module in linears:
        model.set_submodule(name, QuantizedLinear(module, quantization))
    for of_layer in experts:
        pack_experts(of_layer, quantization)
    what = " and ".join(["all linear layers"] * bool(linears) + ["experts"] * bool(experts))
    what += " of the language model" if has_vision(model) else ""
    counted = list(count_weights(model))
    quantized = sum(weights.num_weights for weights in counted if weights.stored_as == quantization.name)
    reason = quantization.slow_because
    slow = f"; our own kernel, which unpacks faster, fails: {reason}" if reason else ""
    return (
        f"quantization: {quantization.name}, {quantized / 1e6:,.1f} of "
        f"{sum(weights.num_weights for weights in counted) / 1e6:,.1f} million weights: {what}"
        f"{f' but {left_out}' if linears else ' alone'}{slow}"
    )


def _refuse_shared(model: nn.Module, linears: Sequence[tuple[str, nn.Linear]]) -> None:
    """Each layer has statistics of its own, which a loader fills in with the weight: Zamba2's blocks share theirs."""
    holders: dict[torch.Tensor, str] = {}
    for name, module in linears:
        if (first := holders.setdefault(module.weight, name)) != name:
            raise ConfigError(
                f"--quantization: in {type(model).__name__} several layers share a weight ({first} and {name}), and "
                "packed weights cannot be shared; leave it out"
            )


def linears_of_layers(
    model: PreTrainedModel, *, without: Sequence[nn.Module] = ()
) -> tuple[list[tuple[str, nn.Linear]], str]:
    """The linear layers that may be stored or computed in fewer bits, by name, and a list of the rest in words.

    The output head, layers that transformers keeps in fp32 (`quantize_weights` says why), and layers whose weights
    another module multiplies are left out. In a model of image and text only the language model counts. Experts
    that share one tensor are no linear layers, and often nearly all of the model.

    Args:
        without: modules of experts that the list need not name.
    """
    head, parts = model.get_output_embeddings(), _parts(model)
    inside, uncalled = {id(module) for part in parts for module in part.modules()}, uncalled_layers(model)
    kept = _kept_in_fp32(parts)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if _is_linear(module) and module is not head and id(module) in inside and not is_of_head(model, name)
    ]
    linears = [(n, m) for n, m in found if kept.isdisjoint(n.split(".")) and n not in uncalled]
    kept = kept.intersection(part for name, _ in found for part in name.split("."))  # else norms, too
    others = ["the output head", *sorted(kept | {name.rpartition(".")[2] for name in uncalled})]
    if experts := [parameter for part in parts for parameter in _experts(part, without)]:
        count = sum(parameter.numel() for parameter in experts)
        dtype = next(name for name, dtype in DTYPES.items() if dtype == experts[0].dtype)
        others.append(f"experts that are one tensor ({count / 1e6:,.1f} million weights in {dtype})")
    return linears, " and ".join(others)


def _experts_of_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of experts whose products others may compute. Those of other families stay as they are."""
    parts = _parts(model)
    inside, kept = {id(module) for part in parts for module in part.modules()}, _kept_in_fp32(parts)
    found = find_experts(model)
    return [m for name, m in found.items() if id(m) in inside and kept.isdisjoint(name.split("."))]


def _parts(model: PreTrainedModel) -> Sequence[nn.Module]:
    return language_part(model) if has_vision(model) else [model]


def _kept_in_fp32(parts: Sequence[nn.Module]) -> set[str]:
    names = (name for part in parts for name in getattr(part, "_keep_in_fp32_modules", None) or ())
    return {name.removesuffix(".weight") for name in names}  # LongCat names its routers' weights


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


def _experts(model: nn.Module, without: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """The weights [experts, ...] of mixtures; of torch's own modules, convolutions have such a shape, too."""
    for module in model.modules():
        if not type(module).__module__.startswith("torch.nn.") and module not in without:
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
    of_units = ((unit, list(_packed_in(unit))[:NUM_COMPARED]) for unit in units)
    unit, weights = next(((unit, weights) for unit, weights in of_units if weights), (None, []))
    if unit is None:
        yield
        return
    # As bytes in host memory: comparing numbers would take NaNs for different.
    quantized: dict[int, torch.Tensor] = {}
    for place, (_, _, packing) in enumerate(weights):
        packing.on_quantized = lambda packed, place=place: quantized.update({place: packed.view(torch.uint8).cpu()})
    yield
    unit.unshard()
    different = 0
    for place, (module, name, packing) in enumerate(weights):
        packing.on_quantized = None
        different += int((getattr(module, name).view(torch.uint8).cpu() != quantized[place]).sum())
    module, name, _ = weights[0]
    storage = getattr(module, name).dtype
    unit.reshard()
    num_bytes = sum(packed.numel() for packed in quantized.values())
    # All ranks raise together: one that went on alone would wait for the others in its first collective.
    worst = max(gather_to_all(different))
    if worst:
        raise ConfigError(
            f"--quantization: gathering changed {worst} of {num_bytes} bytes of packed weights "
            f"(torch {torch.__version__}, stored as {storage}); give another --quant_storage, torch 2.12 or later with "
            "uint8, or --sharding_strategy NO_SHARD"
        )


def _packed_in(unit: nn.Module) -> Iterator[tuple[nn.Module, str, PackedWeight]]:
    """The packed parameters that a unit shards: their modules, their names there, and what packs them."""
    for module in unit.modules():
        for name, packing in packed_weights(module).items():
            if isinstance(getattr(module, name), DTensor):
                yield module, name, packing
