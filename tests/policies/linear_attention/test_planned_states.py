"""The plan of layers whose kernels are not here: what they keep by hand, and a dry run with and without the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks

import finetuning
from policies.linear_attention.delta_rule_kernel import gated_delta_rule
from policies.linear_attention.planned import planned_convolution, planned_kimi_rule


def kept_bytes(compute: Callable[[], torch.Tensor]) -> int:
    """Bytes of the storages that autograd keeps; the outputs and the gradients of inputs have the inputs' shapes."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = compute()
    output.backward(torch.empty_like(output))
    return sum(kept.values())


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.parametrize("is_kimi", [False, True])
def test_a_planned_delta_rule_keeps_what_its_kernels_save(is_kimi: bool) -> None:
    """2 key heads of 16, 4 value heads of 32. Kimi's rule has as many key heads, and a decay per element of a key."""
    tokens, heads, key_dim, value_dim = 2 * 128, 4, 16, 32
    key_heads = heads if is_kimi else 2
    query, key = leaf(2, 128, key_heads, key_dim), leaf(2, 128, key_heads, key_dim)
    value, beta = leaf(2, 128, heads, value_dim), leaf(2, 128, heads)
    decay = leaf(2, 128, heads, key_dim, dtype=torch.float32) if is_kimi else leaf(2, 128, heads, dtype=torch.float32)
    per_token = 2 * key_heads * (2 * key_dim + 4) + 2 * heads * value_dim  # with a factor in fp32 per query and key
    per_token += 2 * heads + 2 * heads * 64  # beta, and products inside chunks
    per_token += 4 * decay[0, 0].numel()  # its sums
    if is_kimi:
        per_token += 4 * heads * key_dim + 2 * heads * 64
    tensors = (query, key, value, decay, beta)
    planned = planned_kimi_rule if is_kimi else partial(gated_delta_rule, cu_seqlens=None)
    assert kept_bytes(lambda: planned(*tensors)) == tokens * per_token
    assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in tensors)


def test_a_planned_convolution_keeps_its_input_and_its_weight() -> None:
    hidden, weight = leaf(2, 24, 10), leaf(24, 4)
    assert kept_bytes(lambda: planned_convolution(hidden, weight)) == 2 * (2 * 24 * 10 + 24 * 4)


def test_a_plan_has_the_memory_of_the_kernels_if_their_package_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}
    config = transformers.Qwen3_5TextConfig(
        **sizes, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, architectures=["Qwen3_5ForCausalLM"]
    )
    config.save_pretrained(tmp_path / "model")

    def plan(*flags: str) -> dict[str, Any]:
        words = ["--model_name", str(tmp_path / "model"), "--dry_run", "--dry_run_hardware", "1xH100-80GB", *flags]
        words += ["--context_length", "2048", "--activation_checkpointing", "off", "--pure_bf16"]
        assert finetuning.main([*words, "--dry_run_json", str(tmp_path / "plan.json")]) == 0
        found: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
        return found

    without = plan("--batching_strategy", "packing")
    (tmp_path / "packages/fla").mkdir(parents=True)
    (tmp_path / "packages/fla/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    capsys.readouterr()
    found = plan()
    assert "linear attention: packed documents are told apart by their offsets" in capsys.readouterr().out
    assert found["peak_gib"] < 0.7 * without["peak_gib"]
