"""What compiled layers with adapters keep for backward on a GPU: the partitioner's choice, without values."""

from __future__ import annotations

import functools
from typing import Any

import peft
import pytest
import torch
import torch._functorch.config as functorch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from planning.memory.compiled_layers import CompiledLayer
from planning.memory.device_kernels import KernelsOfCard
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.adapters import lora_products
from policies.adapters.lora_layers import use_lean_forward
from policies.adapters.lora_products import WRITTEN_ONCE
from policies.compilation.layers import compile_layers
from tests.helpers.kept_by_compiled import recording_backend

BF16 = torch.bfloat16
LENGTH = 4096  # beside which the keys of dropout's masks are small


def adapted_llama(targets: list[str] | str = "all-linear") -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 112, "num_hidden_layers": 1, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).to(BF16)
    if targets:
        use_lean_forward(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.05)))
    model.train()
    return model


def hold_no_values(layer: nn.Module, mode: FakeTensorMode) -> None:
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fake = mode.from_tensor(parameter.detach())
            module._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)


def test_inputs_of_an_adapter_after_dropout_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own limit of chains keeps those of the last product: a quarter of all that the layer keeps."""
    # As on a GPU, where fp32 factors are split into bf16 parts.
    monkeypatch.setattr(lora_products, "_in_parts", lambda activations, adapter: adapter.dtype == torch.float32)
    returned: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=recording_backend(returned)))
    layer, mode = adapted_llama().model.layers[0], FakeTensorMode()
    hold_no_values(layer, mode)
    with functorch.patch(ban_recompute_long_fusible_chains=True), mode:
        compile_layers([layer], widths_vary=False)
        hidden, angles = torch.empty(2, 64, 32, dtype=BF16, requires_grad=True), torch.empty(1, 64, 16, dtype=BF16)
        layer(hidden, position_embeddings=(angles, angles), attention_mask=None)
    wide = [tensor for tensor in returned if tensor.numel() == 2 * 64 * 112]
    assert [tuple(tensor.shape) for tensor in wide] == [(2, 64, 112)] * 2  # what gate_proj and up_proj give


def test_a_slice_of_what_is_computed_from_kept_tensors_counts_alone() -> None:
    weight, hidden = torch.empty(48, 32, device="meta"), torch.empty(10, 32, device="meta", requires_grad=True)

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        sums = hidden @ weight.T  # kept: silu's gradient is computed from them
        first, second = nn.functional.silu(sums).split((16, 32), -1)
        return torch.bmm(first[None], second[None, :, :16].transpose(1, 2))

    followed = CompiledLayer([weight, hidden])
    with followed.following():
        output = layer(hidden)
    sums, first, second = 10 * 48 * 4, 10 * 16 * 4, 10 * 16 * 4
    assert sum(followed.kept_bytes(output).values()) == sums + first + second + output.nbytes


def test_adapters_of_wide_products_count_where_backward_computes_them_again() -> None:
    layer, hidden = adapted_llama().model.layers[0].to("meta"), torch.empty(2, 64, 32, dtype=BF16, device="meta")
    angles = torch.empty(1, 64, 16, dtype=BF16, device="meta")
    followed = CompiledLayer([hidden, angles, *layer.parameters()])
    with followed.following():
        layer(hidden.requires_grad_(), position_embeddings=(angles, angles), attention_mask=None)
    assert followed.fused_bytes(32) == 2 * (2 * 64 * 112 * 4)  # of gate_proj and up_proj each
    assert followed.fused_bytes(112) == 0


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"], "all-linear"])
def test_a_selective_layer_keeps_what_its_compiled_forward_returns(
    targets: list[str] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = adapted_llama(targets).model.layers[0]
    checkpoint_layers([layer], Checkpointing("selective"))
    returned = bytes_returned(layer, 16, monkeypatch)
    followed, output = followed_on_meta(adapted_llama(targets).model.layers[0], 16)
    assert followed.selective(output, 32).kept == pytest.approx(returned, rel=0.02)


def test_what_adapters_add_is_computed_again_in_a_selective_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = []
    for targets in ([], "all-linear"):
        layer = adapted_llama(targets).model.layers[0]
        checkpoint_layers([layer], Checkpointing("selective"))
        returned.append(bytes_returned(layer, 16, monkeypatch))
    rank = 2
    # The last adapter's numbers are the layer's output alone, and keys of masks are few.
    assert 6 * LENGTH * rank * 4 <= returned[1] - returned[0] < 1.1 * 7 * LENGTH * rank * 4


def test_dropped_inputs_of_the_last_product_are_written_once_where_they_are_computed_again() -> None:
    layer = adapted_llama().model.layers[0]
    marked = []
    for mode in ("full", "selective", "off"):
        checkpoint_layers([layer], Checkpointing(mode))
        marked.append([name for name, module in layer.named_modules() if vars(module).get(WRITTEN_ONCE)])
    assert marked == [["mlp.down_proj"], ["mlp.down_proj"], []]


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"], ["v_proj"]])
def test_a_gate_is_kept_besides_the_sum_that_it_is_a_slice_of(
    targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Qwen3.5's attention, a quarter of what it keeps; not if the slice is of a product, which is kept itself."""
    returned = bytes_returned(adapted_qwen(targets).model.layers[0], 4, monkeypatch)
    followed, output = followed_on_meta(adapted_qwen(targets).model.layers[0], 4)
    assert sum(followed.kept_bytes(output).values()) == pytest.approx(returned, rel=0.02)


def adapted_qwen(targets: list[str]) -> Qwen3_5ForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "layer_types": ["full_attention"]}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **heads)).to(BF16)
    if targets:
        use_lean_forward(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.05)))
    model.train()
    return model


def bytes_returned(layer: nn.Module, num_angles: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of all storages that the layer's compiled forward returns."""
    returned: list[torch.Tensor] = []
    mode = FakeTensorMode()
    hold_no_values(layer, mode)
    with monkeypatch.context() as patched, mode:
        backend = recording_backend(returned, select_decomp_table())
        patched.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        patched.setattr(nn.functional, "scaled_dot_product_attention", attention_of_gpu)
        compile_layers([layer], widths_vary=False)
        hidden = torch.empty(1, LENGTH, 32, dtype=BF16, requires_grad=True)
        angles = torch.empty(1, LENGTH, num_angles, dtype=BF16)
        layer(hidden, position_embeddings=(angles, angles), attention_mask=None)
    tensors = [tensor for tensor in returned if tensor.dtype != torch.uint8]  # not states of random numbers
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def attention_of_gpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    output: torch.Tensor = attention(query, key, value, None, True, 0.0, True)[0]
    return output


def followed_on_meta(layer: nn.Module, num_angles: int) -> tuple[CompiledLayer, torch.Tensor]:
    layer.to("meta")
    hidden = torch.empty(1, LENGTH, 32, dtype=BF16, device="meta", requires_grad=True)
    angles = torch.empty(1, LENGTH, num_angles, dtype=BF16, device="meta")
    followed = CompiledLayer([hidden, angles, *layer.parameters()])
    with KernelsOfCard((9, 0), answer=True), followed.following():
        output = layer(hidden, position_embeddings=(angles, angles), attention_mask=None)
    return followed, output
