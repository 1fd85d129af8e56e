"""LoRA on experts beside peft's own, which adds products of A and B as large as the experts to the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from configs.peft import LoraConfig
from policies.adapters.expert_products import factor_product, use_grouped_factors
from policies.adapters.lora_layers import use_lean_forward
from policies.adapters.target_notes import target_notes
from policies.experts.finding import find_experts
from policies.experts.forward import compute_by_products, plain_product, set_product
from tasks.flops import shares_of_experts
from tests.helpers.adapter_kinds import adapt, config_of
from tests.helpers.mixtures import MIXTURES, mixture
from utils.device import DeviceFacts
from utils.errors import ConfigError

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
TARGETS: dict[str, list[str]] = {
    "qwen3_moe": BOTH,
    "mixtral": BOTH,
    "gpt_oss": ["experts.down_proj"],  # transposed, with biases
    "deepseek_v3": [*BOTH, "shared_experts.up_proj.weight", "layers.0.mlp.up_proj.weight"],
    "nemotron_h": ["experts.up_proj", "experts.down_proj"],  # no gate
}


def adapted(name: str, rank: int = 3, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """With peft's forward. A rank of 3 is no multiple of what grouped products take."""
    model = mixture(name, **more)
    settings = {"r": rank, "lora_alpha": 8, "init_lora_weights": False, "target_modules": ["q_proj"]}
    return peft.get_peft_model(model.to(dtype), peft.LoraConfig(**settings, target_parameters=TARGETS[name]))


def use_ours(model: Any) -> None:
    compute_by_products(model.get_base_model())
    use_lean_forward(model)
    use_grouped_factors(model.get_base_model())


def outcome(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and every gradient of a loss on them."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.float().logsumexp(-1).square().mean().backward()
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MIXTURES)
def test_values_and_gradients_are_pefts(name: str) -> None:
    model = adapted(name)
    ids = torch.randint(3, 64, (2, 3))  # so few tokens that some experts get none
    expected = outcome(model, ids)
    use_ours(model)
    found = outcome(model, ids)
    assert found.keys() == expected.keys()
    assert sum("experts" in key for key in found) >= 4
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=key)


def test_in_bf16_the_factors_stay_fp32_and_values_are_as_exact_as_bf16() -> None:
    model = adapted("qwen3_moe")
    ids = torch.randint(3, 64, (2, 40))
    expected = outcome(model, ids)
    model = adapted("qwen3_moe", dtype=torch.bfloat16)  # peft casts factors back to fp32
    use_ours(model)
    found = outcome(model, ids)
    assert {value.dtype for key, value in found.items() if "lora_" in key} == {torch.float32}
    error = (found["logits"] - expected["logits"]).abs().max() / expected["logits"].abs().max()
    assert 0 < error < 0.1  # routers may choose others


def test_disabled_adapters_add_nothing() -> None:
    model = adapted("mixtral")
    ids = torch.arange(3, 15)[None]
    with model.disable_adapter():
        expected = model(ids).logits
    use_ours(model)
    with model.disable_adapter():
        torch.testing.assert_close(model(ids).logits, expected)
    assert (model(ids).logits - expected).abs().max() > 1e-2


def doubled(experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return 2 * plain_product(experts, name, rows, ends)


def test_the_frozen_weight_is_multiplied_by_whatever_product_it_had() -> None:
    model = adapted("mixtral")
    base, ids = model.get_base_model(), torch.arange(3, 15)[None]
    experts = list(find_experts(base).values())
    for module in experts:
        module.down_proj.data.mul_(2)
    expected = model(ids).logits
    compute_by_products(base)
    for module in experts:
        module.down_proj.data.div_(2)
        set_product(module, "down_proj", doubled)
    use_grouped_factors(base)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_no_product_of_both_factors_is_formed() -> None:
    model = adapted("qwen3_moe", rank=4)
    use_ours(model)
    largest = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        largest.append(tensor.numel())
        return tensor

    weights = [p.numel() for n, p in model.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))]
    ids = torch.arange(3, 9)[None]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    rows, in_and_out = ids.numel() * 2, (32 + 48) + (24 + 32)
    products = counter.get_flop_counts()["Global"]
    ours = [count for op, count in products.items() if "factor" in str(op)]
    # Forward and both gradients of each factor, in two layers.
    assert sum(ours) == 2 * 3 * 2 * rows * 4 * in_and_out
    assert max(largest) <= max(*weights, 64 * 32)


def test_backward_keeps_the_rows_once_and_the_factors_as_they_are() -> None:
    rows = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(4 * 8, 32))
    ends = torch.tensor([10, 10, 40, 64], dtype=torch.int32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.untyped_storage().data_ptr()), lambda t: t):
        low = factor_product(rows, weight.unflatten(0, (4, 8)).transpose(1, 2), ends)
    assert low.dtype == torch.bfloat16
    assert set(kept) == {t.untyped_storage().data_ptr() for t in (rows, weight, ends)}


def test_layers_share_one_compiled_graph() -> None:
    model = adapted("qwen3_moe", num_hidden_layers=4)
    ids = torch.randint(3, 64, (2, 12))
    use_ours(model)
    expected = outcome(model, ids)
    num_graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    for layer in model.get_base_model().model.layers:
        layer.compile(backend=count, fullgraph=True)
    found = outcome(model, ids)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=key)
    assert num_graphs == 2  # the input of the first layer needs no gradient


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_s_products_and_gradients_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    """Of experts without rows, too, first, in between and last."""
    torch.manual_seed(0)
    rows, factors = torch.randn(300, 64).to(dtype), torch.randn(6, 5, 64)
    ends = torch.tensor([0, 77, 77, 210, 300, 300], dtype=torch.int32)
    found = []
    for device in ("cpu", "cuda"):
        own = [tensor.to(device).requires_grad_() for tensor in (rows, factors)]
        outputs = factor_product(own[0], own[1].transpose(1, 2), ends.to(device))
        found.append([outputs, *torch.autograd.grad(outputs, own, torch.ones_like(outputs))])
    for on_cpu, on_gpu in zip(*found, strict=True):
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
        assert (on_gpu.cpu().float() - on_cpu.float()).abs().max() <= tolerance * on_cpu.float().abs().max()
    assert not found[1][2][[0, 2, 5]].any()


def test_tokens_meet_a_share_of_the_factors_as_of_the_experts() -> None:
    """Model FLOPs are those of the adapter's own products, counted with every token through two of four experts."""
    model = adapted("qwen3_moe", rank=4)
    found = {name: parameter for name, parameter in model.named_parameters() if "experts" in name}
    shares = shares_of_experts(model.get_base_model())
    assert len(found) == 2 * (2 + 4)
    assert {shares[id(parameter)] for parameter in found.values()} == {0.5}


@pytest.mark.parametrize("has_them", [True, False])
def test_a_gpu_without_a_kernel_for_all_experts_gets_a_line(has_them: bool) -> None:
    device = DeviceFacts("cuda", 2**36, has_bf16=True, has_grouped_products=has_them)
    notes = target_notes(mixture("qwen3_moe"), LoraConfig(target_modules=("experts",), lora_dropout=0.0), device)
    assert notes[0].startswith("target_modules: experts of 2 layers")
    line = "LoRA on experts: below compute capability 9.0 torch multiplies one expert after the other, and is slow"
    assert notes[1:] == ([] if has_them else [line])


@pytest.mark.parametrize(
    ("targets", "rest"),
    [
        ("o_proj,gate_proj,up_proj,down_proj", "gate_up_proj"),
        ("gate_up_proj", "down_proj"),
        ("experts", ""),
        ("all-linear", ""),
        ("o_proj", ""),
    ],
)
def test_experts_that_are_adapted_in_part_get_a_line(targets: str, rest: str) -> None:
    """A dense model's names match layers of DeepSeek-V3's and shared experts, and one of the experts' two weights."""
    device = DeviceFacts("cpu", 2**36, has_bf16=True)
    lora = LoraConfig(target_modules=tuple(targets.split(",")), lora_dropout=0.0)
    found = [note for note in target_notes(mixture("deepseek_v3"), lora, device) if "no adapter" in note]
    expected = f"target_modules: {rest} of these experts gets no adapter, 0.0 million weights; name it too, or experts"
    assert found == ([expected] if rest else [])


def test_adapters_of_single_experts_are_trained_on_as_peft_converts_them(tmp_path: Path) -> None:
    """transformers 4 had a linear layer for each expert; gate and up are one now, of twice the rank."""
    sizes = {"gate_proj": (32, 24), "up_proj": (32, 24), "down_proj": (24, 32)}
    saved = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}.lora_{factor}.weight": torch.randn(shape)
        for layer in range(2)
        for expert in range(4)
        for name, (inputs, outputs) in sizes.items()
        for factor, shape in (("A", (3, inputs)), ("B", (outputs, 3)))
    }
    save_file(saved, tmp_path / "adapter_model.safetensors")
    peft.LoraConfig(r=3, lora_alpha=8, target_modules=list(sizes)).save_pretrained(str(tmp_path))
    ids = torch.randint(3, 64, (2, 12))
    expected = peft.PeftModel.from_pretrained(mixture("qwen3_moe"), str(tmp_path), is_trainable=True)
    found = adapt(mixture("qwen3_moe"), config_of("--from_peft_checkpoint", str(tmp_path)))
    use_ours(found)
    wanted = outcome(expected, ids)
    for key, value in outcome(found, ids).items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=key)


def test_a_saved_adapter_of_a_router_is_refused(tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
    peft.get_peft_model(mixture("qwen3_moe"), settings).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=r"mlp\.gate\.weight is neither an expert nor a linear layer's weight"):
        adapt(mixture("qwen3_moe"), config_of("--from_peft_checkpoint", str(tmp_path)))
