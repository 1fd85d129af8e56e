"""Packed experts: each matrix has bitsandbytes' bytes, and products are those of the unpacked parameter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from policies.experts.finding import ExpertWeight, find_experts
from policies.experts.forward import compute_by_products, grouped_product
from policies.loading import build_model, load_model_config
from policies.mxfp4 import dequantize_mxfp4, numbers_of, to_mxfp4
from policies.quantization.choice import gathering_changes_nothing, quantize_weights
from policies.quantization.mxfp4_unpacking import unpack_mxfp4
from policies.quantization.packing import BLOCK, Quantization
from policies.quantization.quantized_experts import PackedExperts, pack_experts
from policies.weights.materialise import materialise
from policies.weights.sources import RandomWeights, most_drawn_bytes
from tests.helpers.kept_by_compiled import compiled_layer
from tests.helpers.loaded import single_process
from utils.errors import ConfigError
from utils.parameters import count_weights, packed_weights

FP32, BF16, UINT8 = torch.float32, torch.bfloat16, torch.uint8
KINDS = [("nf4", False), ("nf4", True), ("fp4", True), ("int8", False)]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 64}
FAMILIES: dict[str, Any] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **HEADS, hidden_size=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, intermediate_size=48
    ),
    "cut": transformers.Qwen3MoeConfig(  # matrices of 8 x 36 and of 36 x 4 weights: they do not fill blocks of 64
        **HEADS, hidden_size=36, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=4, intermediate_size=48
    ),
    "gpt_oss": transformers.GptOssConfig(  # transposed, with biases
        **HEADS,
        hidden_size=32,
        intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
    ),
}


def settings_of(kind: tuple[str, bool], storage: torch.dtype = UINT8, compute: torch.dtype = FP32) -> Quantization:
    quant_type, double = kind
    return Quantization(8 if quant_type == "int8" else 4, quant_type, double, compute, storage)


def family(name: str) -> tuple[Any, Any]:
    """A model with random weights, and its first module of experts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name]).requires_grad_(False)
    for parameter in model.parameters():  # gpt-oss begins with zeros
        nn.init.normal_(parameter, std=0.3)
    compute_by_products(model)
    return model, next(iter(find_experts(model).values()))


def pack_and_fill(experts: Any, settings: Quantization) -> dict[str, torch.Tensor]:
    """Pack a module's experts; the plain values that they had."""
    plain = {name: getattr(experts, name).detach() for name in ("gate_up_proj", "down_proj")}
    pack_experts(experts, settings)
    for name, packing in experts.packed_weights.items():
        packed = packing.quantize(plain[name])
        assert (packed.shape, packed.dtype) == (getattr(experts, name).shape, settings.storage_dtype)
        for statistic, (shape, dtype) in packing.statistics_shapes().items():
            found = getattr(packing, statistic)
            assert (tuple(found.shape), found.dtype) == (shape, dtype), "as plans count them"
        setattr(experts, name, nn.Parameter(packed, requires_grad=False))
    return plain


@pytest.mark.parametrize("storage", [UINT8, FP32])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_matrix_has_the_bytes_and_scales_of_bitsandbytes(
    name: str, kind: tuple[str, bool], storage: torch.dtype
) -> None:
    _, experts = family(name)
    settings = settings_of(kind, storage, BF16)
    plain = pack_and_fill(experts, settings)
    for key, packing in experts.packed_weights.items():
        values = packing.dequantize(getattr(experts, key))
        bytes_of = getattr(experts, key).view(UINT8).view(len(plain[key]), -1)
        for index, matrix in enumerate(plain[key].to(BF16)):
            if settings.bits == 8:
                expected, scale, _ = bnb.functional.int8_vectorwise_quant(matrix.half())
                assert torch.equal(packing.scale[index], scale)
                unpacked = expected * (scale / 127)[:, None]
            else:
                expected, state = bnb.functional.quantize_4bit(
                    matrix, blocksize=BLOCK, compress_statistics=kind[1], quant_type=kind[0]
                )
                assert torch.equal(packing.absmax[index, : len(state.absmax)], state.absmax)
                state.shape = torch.Size([1, matrix.numel()])  # of cut rows it takes wrong scales on a CPU
                unpacked = bnb.functional.dequantize_4bit(expected, state).view(matrix.shape)
            found = bytes_of[index][: expected.numel()]
            assert torch.equal(found, expected.view(UINT8).view(-1))
            torch.testing.assert_close(values[index], unpacked.to(BF16), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_dequantized_model(name: str, kind: tuple[str, bool]) -> None:
    model, experts = family(name)
    pack_and_fill(experts, settings_of(kind))
    inputs = torch.randn(2, 5, FAMILIES[name].hidden_size, requires_grad=True)
    block, probe = model.model.layers[0].mlp, torch.randn(2, 5, FAMILIES[name].hidden_size)

    def outcome() -> tuple[torch.Tensor, torch.Tensor]:
        outputs = block(inputs)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return outputs, torch.autograd.grad(outputs, inputs, probe)[0]

    found = outcome()
    for key, packing in experts.packed_weights.items():
        setattr(experts, key, nn.Parameter(packing.dequantize(getattr(experts, key)), requires_grad=False))
    del experts.packed_weights
    compute_by_products(model)
    torch.testing.assert_close(found, outcome(), rtol=1e-6, atol=1e-6)


def test_our_own_unpacking_of_nf4_gives_the_same() -> None:
    for double in (False, True):
        _, experts = family("cut")
        pack_and_fill(experts, settings_of(("nf4", double), compute=BF16))
        for key, packing in experts.packed_weights.items():
            expected = packing.dequantize(getattr(experts, key))
            packing.quantization = replace(packing.quantization, own_unpacking=True)
            assert torch.equal(packing.dequantize(getattr(experts, key)), expected)


MXFP4 = Quantization(4, "mxfp4", False, BF16, UINT8)
SIZES = {"hidden_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_in_mxfp4_products_are_those_of_the_dequantized_weights(name: str) -> None:
    if name == "gpt_oss":
        config = transformers.GptOssConfig(**HEADS, **SIZES, intermediate_size=32)
    else:
        config = transformers.MixtralConfig(**HEADS, **SIZES, intermediate_size=32)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    compute_by_products(model)
    experts: Any = next(iter(find_experts(model).values()))
    plain = pack_and_fill(experts, replace(MXFP4, compute_dtype=FP32))
    for key, packing in experts.packed_weights.items():
        rows = torch.randn(6, 64 if key == "gate_up_proj" else 32, requires_grad=True)
        ends = torch.tensor([2, 2, 6], dtype=torch.int32)
        weights = packing.dequantize(getattr(experts, key))
        assert weights.shape == plain[key].shape
        expected = grouped_product(rows, weights if experts.is_transposed else weights.transpose(1, 2), ends)
        found = packing.multiply(rows, ends, getattr(experts, key))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        gradients = [torch.autograd.grad(outputs.square().sum(), rows)[0] for outputs in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_what_is_published_in_mxfp4_is_packed_without_any_rounding() -> None:
    drawn = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), dtype=UINT8, generator=drawn)
    blocks[0, :20] &= 0b1001_1001  # small numbers alone, which another exponent may hold, too
    scales = torch.randint(100, 140, (3, 40, 2), dtype=UINT8, generator=drawn)
    published = dequantize_mxfp4(blocks, scales)
    packing = PackedExperts(ExpertWeight("", 3, 64, 40, is_transposed=True), MXFP4)
    assert torch.equal(packing.dequantize(packing.quantize(published)), published)


def test_other_numbers_are_rounded_to_the_nearest_of_mxfp4() -> None:
    numbers = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    blocks, scales = to_mxfp4(numbers)
    assert torch.equal(torch.frexp(numbers.abs().amax(1)).exponent - 3 + 127, scales.int())
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * torch.exp2(scales.float() - 127)[:, None]
    nearest = (numbers.abs().unsqueeze(-1) - grid.unsqueeze(1)).abs().amin(-1)
    assert torch.equal((numbers - numbers_of(blocks, scales)).abs(), nearest)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's kernel needs a GPU")
def test_our_kernel_for_mxfp4_gives_torchs_bits() -> None:
    packed = torch.randint(0, 256, (3 * 66 * 32, 1), dtype=UINT8, device="cuda")
    exponents = torch.randint(0, 255, (len(packed) // 16,), dtype=UINT8, device="cuda")
    for dtype in (BF16, FP32):
        own, other = (unpack_mxfp4(packed, exponents, 3, dtype, own_kernel=own) for own in (True, False))
        assert torch.equal(own, other)


def test_random_weights_hold_a_layer_in_the_dtype_that_it_is_packed_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The experts of one of gpt-oss-20b's layers are 3 GiB in fp32, more than a step of a QLoRA run needs."""
    FAMILIES["gpt_oss"].save_pretrained(tmp_path)
    train = parse_flags(["--model_name", str(tmp_path), "--random_weights"]).train_config
    model = build_model(train, load_model_config(train), AutoModelForCausalLM, BF16).requires_grad_(False)
    compute_by_products(model)
    quantize_weights(model, settings_of(("nf4", True), compute=BF16))
    layer, initialize, held = model.model.layers[0], model.model._init_weights, list[int]()

    def init_weights(module: nn.Module) -> None:
        initialize(module)
        if module is layer:
            held.append(sum(parameter.nbytes for parameter in layer.parameters()))

    monkeypatch.setattr(model.model, "_init_weights", init_weights)
    with single_process():
        materialise(
            model, model, RandomWeights(0), parameter_device=torch.device("cpu"), compute_device=torch.device("cpu")
        )
    assert held == [most_drawn_bytes(model)]
    packed = sum(weights.num_weights for module in layer.modules() for weights in packed_weights(module).values())
    plain = sum(
        p.numel()
        for module in layer.modules()
        for name, p in module._parameters.items()
        if p is not None and name not in packed_weights(module)
    )
    assert held == [2 * packed + 4 * plain]
    for name, packing in layer.mlp.experts.packed_weights.items():
        spread = packing.dequantize(getattr(layer.mlp.experts, name)).std()
        assert spread.item() == pytest.approx(model.config.initializer_range, rel=0.1)


@pytest.mark.parametrize("recomputes", [False, True])
def test_nothing_unpacked_is_kept_for_backward(recomputes: bool) -> None:
    model, experts = family("qwen3_moe")
    plain = pack_and_fill(experts, settings_of(("nf4", True)))
    inputs = torch.randn(2, 5, 32, requires_grad=True)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    block = model.model.layers[0].mlp
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = checkpoint(block, inputs, use_reentrant=False) if recomputes else block(inputs)
        outputs.sum().backward()
    smallest = min(parameter.numel() for parameter in plain.values())
    assert smallest > 10 * 32 * 2, "more than rows of tokens have"
    assert all(tensor.numel() * tensor.element_size() < smallest * 2 for tensor in saved)


@torch.compiler.config.patch(force_disable_caches=True)
def test_it_compiles_as_one_graph() -> None:
    model, experts = family("qwen3_moe")
    pack_and_fill(experts, settings_of(("nf4", True)))
    block, inputs = model.model.layers[0].mlp, torch.randn(2, 5, 32, requires_grad=True)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    probe = torch.randn(2, 5, 32)
    torch.testing.assert_close(compiled(inputs), block(inputs))
    (found,), (wanted,) = (torch.autograd.grad(call(inputs), inputs, probe) for call in (compiled, block))
    torch.testing.assert_close(found, wanted)


def test_compiled_nothing_unpacked_is_kept_for_backward() -> None:
    model, experts = family("qwen3_moe")
    plain = pack_and_fill(experts, settings_of(("nf4", True)))
    compiled, returned = compiled_layer(model.model.layers[0].mlp)
    compiled(torch.randn(2, 5, 32, requires_grad=True)).sum().backward()
    smallest = min(parameter.numel() for parameter in plain.values())
    assert sum(tensor.dtype == UINT8 for tensor in returned) == 2, "views of the packed parameters"
    assert all(tensor.numel() < smallest for tensor in returned if tensor.dtype != UINT8)


@pytest.mark.parametrize("damage", [False, True])
def test_a_bit_that_changes_on_the_way_to_the_gathered_experts_is_found(damage: bool) -> None:
    with single_process():
        model, experts = family("qwen3_moe")
        plain = {name: getattr(experts, name).detach() for name in ("gate_up_proj", "down_proj")}
        pack_experts(experts, settings_of(("nf4", True), FP32))
        fully_shard(model.model.layers[0], mesh=init_device_mesh("cpu", (1,)))
        model._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)

        def fill() -> None:
            with gathering_changes_nothing(model), torch.no_grad():
                for name, packing in experts.packed_weights.items():
                    local = getattr(experts, name).to_local()
                    local.copy_(packing.quantize(plain[name]))
                    if damage and name == "down_proj":
                        local.view(UINT8).flatten()[100] ^= 4

        if damage:
            with pytest.raises(ConfigError, match="--quantization: gathering changed 1 of 4608 bytes"):
                fill()
        else:
            fill()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_operator_returns_what_is_traced_and_counts_its_flops(transposed: bool) -> None:
    _, experts = family("gpt_oss" if transposed else "qwen3_moe")
    pack_and_fill(experts, settings_of(("nf4", True)))
    packing: PackedExperts = experts.packed_weights["down_proj"]
    rows = torch.randn(6, 48 if transposed else 24, requires_grad=True)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    args = (
        rows,
        ends,
        experts.down_proj,
        packing._statistics(),
        list(packing.plain_shape),
        "nf4",
        False,
        packing.is_transposed,
    )
    torch.library.opcheck(torch.ops.quantization.experts_product.default, args)
    with FlopCounterMode(display=False) as counter:
        packing.multiply(rows, ends, experts.down_proj).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 6 * rows.shape[1] * 32)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_line_counts_experts_too(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES[name])
    compute_by_products(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    left = sum(p.numel() for n, p in model.named_parameters() if "proj.weight" not in n and not n.endswith("_proj"))
    note = quantize_weights(model, settings_of(("nf4", True)))
    assert note == (
        f"quantization: nf4 with double quantization, {(total - left) / 1e6:,.1f} of {total / 1e6:,.1f} million "
        "weights: all linear layers and experts but the output head"
    )
    assert sum(weights.num_weights for weights in count_weights(model)) == total
