"""Float8 layers: their arithmetic is that of the rounded values and torchao's, and what cannot work is refused."""

from __future__ import annotations

import sys
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.runs.shapes import SHAPES
from configs.flags import parse_flags
from data.batches.padding import PaddedWidth
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.mixed_precision import resolve_precision
from policies.quantization.float8 import Float8, compute_in_float8, computed_in_bf16, resolve_float8, store_in_float8
from policies.quantization.float8_linear import GRADIENTS, ROWWISE, TENSORWISE, WEIGHTS, FrozenFloat8Linear
from policies.quantization.packing import Quantization
from policies.sharding import Layout
from policies.wrapping import find_layers
from tests.helpers.kept_by_compiled import compiled_layer
from utils.device import DeviceFacts
from utils.errors import ConfigError

BF16 = torch.bfloat16
CPU = torch.device("cpu")
Recipe = Literal["tensorwise", "rowwise"]
RECIPES: list[Recipe] = ["tensorwise", "rowwise"]
PLAIN = Layout("plain", "SINGLE", (1, 1), reshard_after_forward=False)
HOST, H200 = DeviceFacts("cpu", 2**34, False), DeviceFacts("cuda", 2**37, True, True)
A100 = DeviceFacts("cuda", 2**36, True)


def resolved(
    *flags: str, facts: DeviceFacts = HOST, layout: Layout = PLAIN, device: torch.device | None = None
) -> Float8 | None:
    config = parse_flags(["--model_name", "m", *flags])
    train = config.train_config
    precision, _ = resolve_precision(train, config.fsdp_config, facts)
    return resolve_float8(train, precision, layout, [PaddedWidth(train.pad_to_multiple_of, 64)], facts, device)


def frozen(plain: nn.Linear, recipe: Recipe, storage: torch.dtype = torch.uint8) -> FrozenFloat8Linear:
    linear = FrozenFloat8Linear(
        plain, Quantization(8, ROWWISE if recipe == "rowwise" else TENSORWISE, False, BF16, storage)
    )
    linear.weight = nn.Parameter(linear.quantize(plain.weight.detach()), requires_grad=False)
    return linear


def rounded(values: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    """The nearest values of a float8 dtype, after scaling the largest, of all or along `dim`, to the dtype's limit."""
    largest = values.float().abs().amax() if dim is None else values.float().abs().amax(dim, keepdim=True)
    factor = (torch.finfo(dtype).max / largest.double()).float()
    factor = factor if dim is None else torch.exp2(torch.floor(torch.log2(factor)))
    return (values.float() * factor).to(dtype).float() / factor


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stored_weight_multiplies_what_is_rounded_forward_and_backward(recipe: Recipe, storage: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 32).to(BF16)
    linear = frozen(plain, recipe, storage)
    assert linear.weight.untyped_storage().nbytes() == 48 * 32
    weight = linear.dequantize().float()
    dim = 1 if recipe == "rowwise" else None
    torch.testing.assert_close(weight, rounded(plain.weight.detach(), WEIGHTS, dim), rtol=2**-8, atol=0)

    inputs = torch.randn(2, 8, 48, dtype=BF16, requires_grad=True)
    outputs = linear(inputs)
    assert plain.bias is not None
    exact = rounded(inputs.detach().flatten(0, 1), WEIGHTS, dim) @ weight.T + plain.bias
    assert relative(outputs, exact) < 0.005

    grad = torch.randn_like(outputs)
    (found,) = torch.autograd.grad(outputs, inputs, grad)
    rows = grad.flatten(0, 1).float()
    if recipe == "rowwise":  # each row of the weight has its scale, which multiplies the gradient before it is rounded
        exact = rounded(rows * linear.scale, WEIGHTS, 1) @ (weight / linear.scale.unsqueeze(1))
    else:
        exact = rounded(rows, GRADIENTS, None) @ weight
    assert relative(found, exact) < 0.005
    assert 0.005 < relative(found, rows @ plain.weight.detach().float()) < 0.08


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = found.detach().flatten(0, -2).float() - wanted.detach()
    return float(difference.norm() / wanted.detach().norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_are_those_of_torchao(recipe: Recipe) -> None:
    torchao = pytest.importorskip("torchao.float8")
    from dataclasses import replace

    plain = nn.Linear(64, 32, bias=False).to(BF16)
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    own = torchao.convert_to_float8_training(nn.Sequential(nn.Linear(64, 32, bias=False).to(BF16)), config=config)
    own.load_state_dict({"0.weight": plain.weight.detach()})
    inputs = torch.randn(16, 64, dtype=BF16)
    # A scale and its reciprocal are not exactly inverse in fp32, but for powers of two.
    torch.testing.assert_close(
        frozen(plain, recipe)(inputs), own(inputs), rtol=0 if recipe == "rowwise" else 2**-7, atol=0
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stored_layer_compiles_as_one_graph_and_counts_its_flops(recipe: Recipe) -> None:
    linear = frozen(nn.Linear(64, 32).to(BF16), recipe)
    inputs = torch.randn(4, 64, dtype=BF16, requires_grad=True)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), linear(inputs))
    with FlopCounterMode(display=False) as counter:
        linear(inputs).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 64 * 32


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_the_transposed_weight_is_made_in_backward_and_not_kept(recipe: Recipe) -> None:
    linear = frozen(nn.Linear(64, 96, bias=False).to(BF16), recipe)
    inputs, probe = torch.randn(8, 64, dtype=BF16, requires_grad=True), torch.randn(8, 96).to(BF16)
    compiled, returned = compiled_layer(linear)
    (found,) = torch.autograd.grad(compiled(inputs), inputs, probe)
    (wanted,) = torch.autograd.grad(linear(inputs), inputs, probe)
    torch.testing.assert_close(found, wanted)
    assert (64, 96) not in [tuple(tensor.shape) for tensor in returned[1:]]  # it is stored as (96, 64)


def small_llama(recipe: Recipe | None, checkpointing: str = "off") -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=160, num_key_value_heads=2, **sizes)).to(BF16)
    if recipe is not None:
        float8 = resolved("--pure_bf16", "--float8", recipe, device=CPU)
        assert float8 is not None
        compute_in_float8(model, float8)
    checkpoint_layers(find_layers(model), Checkpointing(checkpointing))
    return model


def loss_and_gradients(model: Any) -> list[torch.Tensor]:
    ids = torch.arange(64).view(2, 32)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_checkpointing_mode_computes_the_same(recipe: Recipe) -> None:
    pytest.importorskip("torchao.float8")
    wanted, plain = loss_and_gradients(small_llama(recipe)), loss_and_gradients(small_llama(None))
    assert not torch.equal(wanted[0], plain[0])
    norms = [torch.stack([gradient.float().norm() for gradient in run[1:]]) for run in (wanted, plain)]
    torch.testing.assert_close(norms[0], norms[1], rtol=0.05, atol=0)
    for mode in ("full", "selective"):
        assert all(map(torch.equal, loss_and_gradients(small_llama(recipe, mode)), wanted)), mode


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_layers_compile_and_compute_the_same(checkpointing: str) -> None:
    pytest.importorskip("torchao.float8")
    model = small_llama("tensorwise", checkpointing)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for found, wanted in zip(loss_and_gradients(model), loss_and_gradients(small_llama("tensorwise")), strict=True):
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_in_bf16_a_probe_sees_no_scale_of_other_documents() -> None:
    pytest.importorskip("torchao.float8")
    model = small_llama("tensorwise").eval()
    rows = torch.arange(64).view(2, 32)
    others = torch.stack([rows[0], rows[1].flip(0)])

    def of_first(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits[0].detach()

    assert not torch.equal(of_first(rows), of_first(others)), "one scale for all rows of a micro-batch"
    with computed_in_bf16(model):
        assert torch.equal(of_first(rows), of_first(others))
    assert not torch.equal(of_first(rows), of_first(others))


def line_for(shape: str, recipe: Recipe, facts: DeviceFacts = H200, **sizes: int) -> str:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**(SHAPES[shape] | sizes)))
    float8 = resolved("--mixed_precision", "True", "--float8", recipe, facts=facts)
    assert float8 is not None
    return store_in_float8(model, float8)


def test_layers_are_chosen_by_shape_and_the_others_are_named() -> None:
    """8B: 32 layers of 218 million weights, of them 8.4 million in keys and values."""
    small = "k_proj (1024 x 4096, too small to gain), v_proj (1024 x 4096, too small to gain)"
    assert line_for("llama8b", "tensorwise", num_hidden_layers=2).endswith(
        f"419.4 of 1,486.9 million weights stored and computed in float8; in bf16: the output head, {small}"
    )
    assert "q_proj (2048 x 2048, too small to gain)" in line_for("tinyllama", "rowwise", num_hidden_layers=1)
    assert "gate_proj (100 x 64, no multiples of 16)" in line_for(
        "tiny-words", "tensorwise", HOST, intermediate_size=100
    )
    with pytest.raises(
        ConfigError, match=r"--float8: no linear layer of LlamaForCausalLM is suited \(q_proj \(64 x 64, "
    ):
        line_for("tiny-words", "tensorwise")


@pytest.mark.parametrize(
    ("flags", "facts", "reason"),
    [
        (["--pure_bf16"], A100, "compute capability 8.9"),
        ([], HOST, "this run is fp32"),
        (["--use_fp16"], H200, "not as --use_fp16 says"),
        (["--mixed_precision", "False"], H200, "not as --mixed_precision False says"),
        (["--use_peft", "--quantization", "8bit"], H200, "cannot be combined with --quantization 8bit"),
        (["--use_peft", "--use_dora"], H200, "DoRA unpacks"),
        (["--use_peft", "--peft_method", "prefix", "--batching_strategy", "padding"], H200, "carries LoRA alone"),
    ],
)
def test_what_cannot_compute_in_float8_is_refused(flags: list[str], facts: DeviceFacts, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        resolved("--float8", "tensorwise", *flags, facts=facts)
    assert str(refused.value).startswith("--float8: ")


def test_without_torchao_all_weights_are_refused_and_a_stored_base_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"--float8: needs torchao \(.*\); pip install -r requirements-float8.txt"):
        resolved("--pure_bf16", "--float8", "rowwise", device=CPU)
    assert resolved("--pure_bf16", "--float8", "rowwise", "--use_peft", device=CPU) is not None


def test_a_width_that_kernels_cannot_take_is_padded_for_them() -> None:
    unpadded, padded = (
        resolved("--pure_bf16", "--float8", "rowwise", *flags) for flags in ([], ["--pad_to_multiple_of", "8"])
    )
    assert unpadded is not None
    assert padded is not None
    assert (unpadded.pads, padded.pads) == (False, True)
