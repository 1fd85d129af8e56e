"""The forward of LoRA layers that keeps less: peft's numbers, and not its copies."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from policies.adapters import lora_products
from policies.adapters.dropout_masks import BLOCKS, PLACES, Dropout, mask_from_keys
from policies.adapters.lora_layers import use_lean_forward
from policies.adapters.lora_products import WRITTEN_ONCE, _bf16, _parts, project_down, project_up
from tests.helpers.kept_by_compiled import compiled_layer
from tests.helpers.processes import ROOT

BF16, FP32 = torch.bfloat16, torch.float32
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.adapted = nn.Linear(48, 40) if kind == "Linear" else Conv1D(40, 48)


def adapted(kind: str, dtype: torch.dtype, dropout: float, seed: int = 0) -> tuple[nn.Module, peft.tuners.lora.Linear]:
    torch.manual_seed(seed)
    model = Model(kind).to(dtype)
    options = {"fan_in_fan_out": kind != "Linear", "init_lora_weights": False}
    settings = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["adapted"], **options)
    model = peft.get_peft_model(model, settings)  # casts adapters of half-precision bases to fp32
    return model.train(), model.base_model.model.adapted


def outputs_and_gradients(layer: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    inputs = inputs.clone().requires_grad_()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    outputs = layer(inputs)
    torch.manual_seed(9)
    return [outputs, *torch.autograd.grad(outputs, [inputs, *parameters], torch.randn_like(outputs))]


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize(("dtype", "adapters"), [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_and_gradients_are_peft_s(kind: str, dtype: torch.dtype, adapters: torch.dtype, seed: int) -> None:
    model, layer = adapted(kind, dtype, dropout=0.0, seed=seed)
    for adapter in (layer.lora_A, layer.lora_B):
        adapter.to(adapters)
    inputs = torch.randn(2, 7, 48).to(dtype)
    wanted = outputs_and_gradients(layer, inputs)
    use_lean_forward(model)
    found = outputs_and_gradients(layer, inputs)
    for tensor, expected in zip(found, wanted, strict=True):
        assert tensor.dtype == expected.dtype
        torch.testing.assert_close(tensor, expected)


def test_as_many_flops_are_counted_as_of_pefts_own() -> None:
    model, layer = adapted("Linear", FP32, dropout=0.0)

    def count() -> int:
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(5, 48, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    wanted = count()
    use_lean_forward(model)
    assert count() == wanted > 0


def test_dropout_takes_its_share_and_scales_the_rest() -> None:
    model, layer = adapted("Linear", FP32, dropout=0.3)
    use_lean_forward(model)
    inputs = torch.randn(4000, 48)
    base = layer.base_layer(inputs)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    whole = (inputs @ a.T) @ b.T * 2
    torch.manual_seed(1)
    dropped = layer(inputs) - base
    torch.manual_seed(1)
    kept = torch.empty_like(inputs, dtype=torch.bool).bernoulli_(0.7)
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.01)
    torch.testing.assert_close(dropped, (inputs * kept / 0.7 @ a.T) @ b.T * 2, rtol=1e-4, atol=1e-4)
    assert (dropped.mean(0) - whole.mean(0)).abs().max() < 0.1
    layer.eval()
    torch.testing.assert_close(layer(inputs) - base, whole, rtol=1e-4, atol=1e-4)


def test_compiled_code_keeps_keys_in_place_of_masks() -> None:
    model, layer = adapted("Linear", BF16, dropout=0.1)
    use_lean_forward(model)
    compiled, kept = compiled_layer(layer)
    inputs = torch.randn(256, 48).to(BF16).requires_grad_()
    outputs = compiled(inputs)
    _, *kept = kept  # the first is the output
    low = 256 * 4  # what A gives, fp32 [256, r]
    assert sum(tensor.nbytes for tensor in kept) <= 2 * low * 4 + (256 + 48) * 4
    outputs.sum().backward()
    assert inputs.grad is not None


def kept_bytes(layer: nn.Module, inputs: torch.Tensor) -> int:
    storages: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(inputs)
    return sum(storages.values())


def test_of_a_half_precision_input_nothing_larger_is_kept() -> None:
    model, layer = adapted("Linear", BF16, dropout=0.1)
    inputs = torch.randn(256, 48).to(BF16).requires_grad_()
    before = kept_bytes(layer, inputs)
    use_lean_forward(model)
    low = 256 * 4 * 4  # what A gives, fp32 [256, r]
    assert kept_bytes(layer, inputs) <= inputs.nbytes + inputs.numel() + 2 * low  # the input, a byte each for dropout
    assert before >= 2 * inputs.nbytes


def test_the_documented_bytes_are_kept() -> None:
    """On an eighth of the documented layer's inputs, outputs, rank and tokens: a 64th of its bytes."""
    page = (ROOT / "docs/adapters.md").read_text()
    for kind, dropout in (("LoRA", 0.0), ("LoRA, dropout 0.05", 0.05)):
        (documented,) = re.findall(rf"^\| {kind} \|.*\| (\d+) MiB \|$", page, flags=re.MULTILINE)
        base = nn.ModuleDict({"adapted": nn.Linear(256, 256, bias=False, dtype=BF16)})
        model = peft.get_peft_model(base, peft.LoraConfig(r=1, lora_dropout=dropout, target_modules=["adapted"]))
        use_lean_forward(model.train())
        layer = model.base_model.model["adapted"]
        kept = kept_bytes(layer, torch.randn(256, 256).to(BF16).requires_grad_()) + layer.base_layer.weight.nbytes
        assert kept == pytest.approx(int(documented) * 2**20 / 64, rel=0.03)


@pytest.mark.parametrize(("compiled", "once"), [(False, False), (True, False), (True, True)])
def test_what_checkpointing_computes_again_drops_the_same(compiled: bool, once: bool) -> None:
    model, layer = adapted("Linear", FP32, dropout=0.5)
    use_lean_forward(model)
    setattr(layer, WRITTEN_ONCE, once)
    checkpointed = partial(checkpoint, layer, use_reentrant=False)
    run = (
        torch.compile(checkpointed, backend="aot_eager_decomp_partition", fullgraph=True) if compiled else checkpointed
    )
    inputs, probe = torch.randn(64, 48, requires_grad=True), torch.eye(64, 40)
    torch.manual_seed(3)
    outputs = run(inputs)
    (found,) = torch.autograd.grad(outputs, layer.lora_A["default"].weight, probe)
    # With what the outputs were made of, the gradient is known: d outputs / d A = scale * B^T probe^T dropped inputs.
    torch.manual_seed(3)
    again = layer(inputs)
    if not compiled:  # compiled code draws other numbers
        assert torch.equal(outputs, again)
        (wanted,) = torch.autograd.grad(again, layer.lora_A["default"].weight, probe)
        torch.testing.assert_close(found, wanted)
    low = torch.linalg.lstsq(layer.lora_B["default"].weight * 2, (outputs - layer.base_layer(inputs)).T).solution.T
    # loss = sum(probe * outputs) is linear in A: its value is the inner product of A and the gradient, if masks agree.
    value = (probe * (low @ layer.lora_B["default"].weight.T * 2)).sum()
    torch.testing.assert_close((found * layer.lora_A["default"].weight).sum(), value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_an_input_after_dropout_that_takes_the_place_of_the_input_has_the_same_gradients(dtype: torch.dtype) -> None:
    inputs, weight = torch.randn(6, 48).to(dtype).requires_grad_(), torch.randn(4, 48, requires_grad=True)
    dropout = Dropout(0.5, torch.rand(6, 48) > 0.5)
    found = []
    for recomputed in (False, True):
        outputs = project_down(inputs, weight, dropout, 2.0, recomputed=recomputed)
        found.append([outputs, *torch.autograd.grad(outputs.square().sum(), (inputs, weight))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def two_and_three_parts(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _bf16(_parts(values, 2), dim=0), _bf16(_parts(values, 3), dim=0)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(two_and_three_parts, id="as written"),
        pytest.param(torch.compile(two_and_three_parts, dynamic=True), id="compiled", marks=pytest.mark.slow),
    ],
)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=2**-90, max_value=2**90)))
@settings(deadline=None)
def test_an_fp32_number_is_the_sum_of_three_bf16_numbers(function: Any, numbers: list[float]) -> None:
    numbers = [1.0, 0.0, *numbers]  # two at least: code is compiled again for no values, and for one
    values = torch.tensor([numbers, [-number for number in numbers]])
    two, three = function(values)
    assert torch.equal(three.double().unflatten(0, (3, 2)).sum(0), values.double())
    error = two.double().unflatten(0, (2, 2)).sum(0) - values.double()
    assert bool((error.abs() <= 2**-16 * values.double().abs()).all())


def in_parts_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs compute, with the one product that CPUs do not have written out."""

    own_mm = torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        return own_mm(left.double(), right.double()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(lora_products, "_in_parts", lambda activations, adapter: activations == BF16)


@pytest.mark.parametrize(
    ("device", "rank", "share"),
    [
        *(("cpu", rank, share) for rank, share in ((1, 0.0), (8, 0.1), (64, 0.1))),
        *(pytest.param("cuda", rank, share, marks=NEEDS_GPU) for rank in (1, 8, 64) for share in (0.0, 0.1)),
    ],
)
def test_products_of_bf16_activations_are_as_exact_as_fp32_products(
    device: str, rank: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside fp64: what is fp32 to fp32's accuracy over 4096 terms, what is bf16 to its rounding."""
    if device == "cpu":
        in_parts_on_cpu(monkeypatch)
    generator = torch.Generator(device).manual_seed(rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    inputs, base, probe = (draw(2, 2048, width).to(BF16) for width in (128, 96, 96))
    leaves = [inputs, base, draw(rank, 128) / 11, draw(96, rank)]
    size = (BLOCKS + PLACES + 128,)
    keys = torch.randint(-(2**31), 2**31, size, generator=generator, device=device, dtype=torch.int32)
    mask = mask_from_keys(keys, inputs.shape, share)
    kept = Dropout(share, keys if device == "cuda" or rank == 8 else mask) if share else None

    def outputs(x: torch.Tensor, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (base + project_up(project_down(x, a, kept, 1.25) * 2, b, BF16)).to(BF16)

    def exact(x: torch.Tensor, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return base + x * mask @ a.T * 2.5 @ b.T

    def values_and_gradients(function: Any, leaves: list[torch.Tensor], probe: torch.Tensor) -> list[torch.Tensor]:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        found = function(*leaves)
        return [found, *torch.autograd.grad(found, leaves, probe)]

    wanted = values_and_gradients(exact, [leaf.double() for leaf in leaves], probe.double())
    # One rank is computed as a sum of products. Other cases differ by sizes alone.
    backend = "inductor" if device == "cuda" or (rank, share) in ((1, 0.0), (8, 0.1)) else "aot_eager"
    for function in (outputs, torch.compile(outputs, fullgraph=True, backend=backend)):
        found = values_and_gradients(function, leaves, probe)
        for tensor, expected in zip(found, wanted, strict=True):
            error, largest = (tensor.double() - expected).abs(), expected.abs().max()
            if tensor.dtype == FP32:
                assert error.max() <= 5e-6 * largest
            else:  # rounded once, and before that off by a hundredth of what rounding takes away
                assert bool((error <= 2**-8 * expected.abs() + 2**-15 * largest).all())
