"""Model FLOPs against the formula by hand."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from data.batches.counts import BatchCounts
from tasks.flops import StepFlops


def small_llama(*, tied: bool) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config)


LAYER = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24  # q and o; k and v of half the heads; the three of the MLP
HEAD = 50 * 16
PER_PAIR = 3 * 4 * 16 * 3  # forward and twice in backward; 4 x heads x head_dim; layers


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_full_training_by_hand(tied: bool) -> None:
    flops = StepFlops(small_llama(tied=tied)).count(BatchCounts(30, 100, 900))
    assert flops == 100 * 6 * 3 * LAYER + 30 * 6 * HEAD + 900 * PER_PAIR


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_lora_by_hand(tied: bool) -> None:
    """Frozen weights need no gradient of their own: 4 per weight and token instead of 6."""
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(small_llama(tied=tied), settings)
    adapters = 3 * (4 * (16 + 16) + 4 * (24 + 16))
    flops = StepFlops(model).count(BatchCounts(30, 100, 900))
    assert flops == 100 * (4 * 3 * LAYER + 6 * adapters) + 30 * 4 * HEAD + 900 * PER_PAIR


def test_position_embeddings_that_only_look_rows_up_cost_nothing() -> None:
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=4, n_positions=64)
    weights = 16 * 48 + 16 * 16 + 2 * 16 * 64 + 50 * 16
    assert StepFlops(AutoModelForCausalLM.from_config(config)).count(BatchCounts(10, 10, 0)) == 10 * 6 * weights


def test_delta_nets_cost_products_with_their_states_and_only_full_attention_costs_pairs() -> None:
    config = transformers.Qwen3_5TextConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        head_dim=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=6,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    )
    mlp, attention = 3 * 16 * 24, 16 * (32 + 8 + 8) + 16 * 16  # the query's half is a gate
    convolved = 2 * 2 * 4 + 4 * 6  # queries, keys and values
    delta_net = 16 * (convolved + 24 + 4 + 4) + 24 * 16 + 4 * convolved
    weights = 2 * (delta_net + mlp) + attention + mlp
    products = 2 * 3 * 3 * 2 * 4 * 4 * 6  # layers; passes; products; 2 x heads x key_dim x value_dim
    flops = StepFlops(AutoModelForCausalLM.from_config(config)).count(BatchCounts(0, 10, 100))
    assert flops == 10 * (6 * weights + products) + 100 * 3 * 4 * 16


def test_mamba_costs_two_products_with_its_states() -> None:
    config = transformers.BambaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        mamba_n_heads=8,
        mamba_d_head=4,
        mamba_d_state=8,
        mamba_n_groups=1,
        attn_layer_indices=[1],
    )
    flops = StepFlops(AutoModelForCausalLM.from_config(config))
    assert flops.of_states == 3 * 2 * 2 * 32 * 8
    assert flops.per_pair == 3 * 4 * 16


def test_layers_have_heads_of_their_own_widths() -> None:
    config = transformers.Gemma4TextConfig(
        vocab_size=50,
        vocab_size_per_layer_input=50,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_hidden_layers=3,
        num_kv_shared_layers=0,
    )
    flops = StepFlops(AutoModelForCausalLM.from_config(config)).count(BatchCounts(0, 0, 10))
    assert flops == 10 * 3 * 4 * 4 * (8 + 8 + 16)


@pytest.mark.parametrize(
    ("config", "length", "share"),
    [
        (transformers.MistralConfig(sliding_window=4, num_hidden_layers=2), 10, (1 + 2 + 3 + 4 + 6 * 4) / 55),
        (transformers.MistralConfig(sliding_window=None, num_hidden_layers=2), 10, 1.0),
        (transformers.MistralConfig(sliding_window=16, num_hidden_layers=2), 10, 1.0),
        # Of heads of 8 and 16: two of four parts are cut.
        (
            transformers.Gemma4TextConfig(
                sliding_window=4,
                head_dim=8,
                global_head_dim=16,
                num_hidden_layers=3,
                num_kv_shared_layers=0,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            ),
            10,
            0.5 * (34 / 55) + 0.5,
        ),
    ],
    ids=["cut", "no window", "wide", "some layers"],
)
def test_a_window_leaves_a_share_of_attention(config: Any, length: int, share: float) -> None:
    """Of model FLOPs, too: those of pairs are as many less."""
    with torch.device("meta"):
        flops = StepFlops(AutoModelForCausalLM.from_config(config))
    pairs = 3 * length * (length + 1) // 2  # of three sequences
    assert flops.share_in_windows(BatchCounts(0, 3 * length, pairs)) == pytest.approx(share)
    without = flops.count(BatchCounts(0, 3 * length, 0))
    counted = flops.count(BatchCounts(0, 3 * length, pairs)) - without
    assert counted == pytest.approx(pairs * flops.per_pair * share)


def test_a_token_costs_the_experts_that_it_is_routed_to() -> None:
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 8 * 16 + 2 * (3 * 16 * 24)  # attention, router, two experts
    flops = StepFlops(AutoModelForCausalLM.from_config(config)).count(BatchCounts(30, 100, 900))
    assert flops == 100 * 6 * 3 * layer + 30 * 6 * HEAD + 900 * PER_PAIR
