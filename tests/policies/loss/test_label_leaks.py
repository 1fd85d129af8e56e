"""Before a run trains, a trial on its own rows finds models whose positions see the tokens that they are to predict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from policies.loss.label_leaks import find_label_leak
from policies.loss.summed_loss import use_summed_loss
from tasks.causal_batches import Collator
from tasks.causal_lm import CausalLM
from tests.helpers.image_models import save_image_model, save_pictures
from tests.helpers.processes import ProcessGroup
from tests.helpers.refusals import error_lines

VOCAB, TASK = 64, CausalLM()
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def row(num_tokens: int, num_prompt: int) -> list[TokenSequence]:
    ids = np.random.default_rng(num_tokens).integers(3, VOCAB, num_tokens).astype(np.int32)
    labels = np.where(np.arange(num_tokens) < num_prompt, IGNORE_INDEX, ids).astype(np.int32)
    return [TokenSequence(ids, labels, 0)]


def leak_of(model: Any, *, packing: bool = False, dtype: torch.dtype = torch.float32) -> str | None:
    model = model.to(dtype)
    use_summed_loss(model, TASK.backbone(model), 0, TASK.compute_logits)
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    device, collate = torch.device("cpu"), Collator(packing=packing, padding_id=0)
    rows = [row(20, 8), row(41, 20)]
    return find_label_leak(model, TASK.token_losses, collate, rows, device, tolerance=tolerance)


def made(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def not_causal_without_padding() -> Any:
    """Its mask is causal where there is one, and transformers makes none for rows without padding."""
    model = made(transformers.LlamaConfig(**SIZES))
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    return model


class SeesOtherRows(LlamaForCausalLM):
    """Adds the mean of the batch to each row."""

    def __init__(self) -> None:
        super().__init__(transformers.LlamaConfig(**SIZES))
        self.model.embed_tokens.register_forward_hook(lambda module, args, output: output + output.mean((0, 1)))


LEAKING: dict[str, Callable[[], Any]] = {
    "is_causal False": lambda: made(transformers.LlamaConfig(**SIZES, is_causal=False)),
    "not causal without padding": not_causal_without_padding,
    "gemma3, both ways": lambda: made(
        transformers.Gemma3TextConfig(**SIZES, head_dim=8, use_bidirectional_attention=True)
    ),
    "xlm": lambda: made(transformers.XLMConfig(vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4, causal=False)),
    "bert": lambda: made(transformers.BertConfig(**SIZES)),
    "xlnet": lambda: made(transformers.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=48)),
}
SOUND = {
    "llama": transformers.LlamaConfig(**SIZES, attention_dropout=0.1),
    "gpt2": transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4),  # drops out everywhere
    "bert decoder": transformers.BertConfig(**SIZES, is_decoder=True),
    "xlm": transformers.XLMConfig(vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4, causal=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=8),
    "phimoe, whose router draws": transformers.PhimoeConfig(**SIZES, num_local_experts=4),
    "gpt_oss": transformers.GptOssConfig(**SIZES, num_local_experts=4, head_dim=8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEAKING)
def test_a_model_whose_labels_are_in_sight_is_found(name: str, dtype: torch.dtype) -> None:
    found = leak_of(LEAKING[name](), dtype=dtype)
    assert found is not None
    assert found.startswith("positions see the tokens that follow them")


def test_a_model_whose_rows_see_each_other_is_found() -> None:
    torch.manual_seed(0)
    found = leak_of(SeesOtherRows())
    assert found is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("name", SOUND)
def test_dropout_and_experts_are_no_leak(name: str, packing: bool, dtype: torch.dtype) -> None:
    assert leak_of(made(SOUND[name]), packing=packing, dtype=dtype) is None


def test_experts_that_round_otherwise_in_other_company_are_no_leak() -> None:
    """As with grouped kernels, a token's rounding depends on the other tokens of the batch; near ties flip."""
    model = made(SOUND["qwen3_moe"])

    def noisy(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (hidden,) = args
        seed = int(hidden.double().sum().abs().item() * 1e9) % 2**31
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))
        return (hidden + 1e-3 * noise,)

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(noisy)
    assert leak_of(model) is None


def test_random_numbers_buffers_and_mode_are_as_before() -> None:
    model = made(SOUND["gpt2"])
    model.register_buffer("calls", torch.zeros(1))
    model.register_forward_pre_hook(lambda module, args: module.calls.add_(1) and None)
    model.eval()
    state = torch.get_rng_state()
    assert leak_of(model) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls.item() == 0
    assert not model.training


def test_a_run_whose_image_takes_positions_of_the_text_is_refused(process_group: ProcessGroup, tmp_path: Path) -> None:
    model, pictures = save_image_model("git", tmp_path / "git"), save_pictures(tmp_path / "pictures", 6)
    flags = ["--model_name", str(model), "--dataset", "caption_dataset", "--caption_dataset.data_path", str(pictures)]
    flags += ["--output_dir", str(tmp_path / "run"), "--run_validation", "False"]
    (outcome,) = process_group.run(flags, 1)
    assert outcome.status == 2
    (line,) = error_lines(outcome.stderr)
    assert "--model_name: with GitForCausalLM" in line
    assert "so labels would meet other positions than their own" in line
