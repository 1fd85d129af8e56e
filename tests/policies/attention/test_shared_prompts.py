"""Pairs that share their prompt: losses and gradients are those of pairs whose texts each have their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from configs.preference import PreferenceConfig
from data.batches.padding import PaddedWidth
from data.sequences.pairs import AnswerPair, AnswerPairs, build_pairs
from policies.attention.choice import BY_OFFSETS
from policies.attention.flash_attention_4 import NO_WINDOW, visible_keys
from policies.attention.functions import attention_by_flash_4, attention_by_offsets
from policies.attention.shared_keys import copy_keys
from policies.attention.shared_prompts import check_shared_prompts
from policies.attention.sinks import attention_with_sinks
from policies.compilation.layers import OFFSETS_OF_ROWS
from policies.loss.summed_loss import use_summed_loss
from tasks.causal_batches import Collator
from tasks.micro_batch import offsets_of
from tasks.pair_batches import PairCollator, keys_of
from tasks.preference import Preference
from tasks.preference_losses import PreferenceLoss
from tests.helpers.flash_attention_4 import has_kernels
from tests.helpers.packed_models import CONFIGS, make_model
from utils.errors import ConfigError

LENGTHS = ((7, 3, 4), (1, 2, 9), (2, 5, 1), (20, 3, 3), (33, 1, 1), (12, 8, 2))
"""Tokens of prompt, chosen and rejected answer; a window of 6 tokens ends in some prompts."""


def random_pairs(*, shares_prompts: bool, times: int = 1) -> AnswerPairs:
    generator, rows = np.random.default_rng(0), []
    for prompt_length, *of_answers in (times * np.array(LENGTHS)).tolist():
        prompt = generator.integers(3, 60, prompt_length).tolist()
        answers = [generator.integers(3, 60, length).tolist() for length in of_answers]
        rows.append(
            {
                "input_ids": [token for answer in answers for token in (*prompt, *answer)],
                "labels": [token for answer in answers for token in (*[-100] * len(prompt), *answer)],
                "sample_lengths": [len(prompt) + len(answer) for answer in answers],
            }
        )
    return build_pairs(rows, name="random", context_length=128 * times, shares_prompts=shares_prompts)


def losses_and_gradients(name: str, batches: list[list[list[int]]], *, shares_prompts: bool) -> tuple[Any, Any]:
    """The sum of the pairs' losses over micro-batches of rows of pairs, and the gradients of all parameters."""
    task = Preference(PreferenceLoss("simpo", PreferenceConfig()), shares_prompts)
    model, pairs = make_model(name, BY_OFFSETS), random_pairs(shares_prompts=shares_prompts)
    use_summed_loss(model, task.backbone(model), 0, task.compute_logits)
    collate = PairCollator(Collator(packing=True, padding_id=0, offsets="all"), shares_prompts)
    total = 0.0
    for rows in batches:
        loss = task.summed_loss(model, collate([[pairs[index] for index in row] for row in rows]))
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("batches", [[[[0, 1], [2, 3], [4, 5]]], [[[0]], [[1]], [[3], [4]], []]], ids=["packed", "one"])
@pytest.mark.parametrize("name", [*CONFIGS, "gpt_oss"])
def test_losses_and_gradients_are_those_of_pairs_that_share_nothing(name: str, batches: list[list[list[int]]]) -> None:
    wanted_loss, wanted = losses_and_gradients(name, batches, shares_prompts=False)
    loss, gradients = losses_and_gradients(name, batches, shares_prompts=True)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert (gradients - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_the_gradient_of_a_key_is_the_sum_of_its_own_and_its_copys() -> None:
    pairs = random_pairs(shares_prompts=True)
    batch = PairCollator(Collator(True, 0, offsets="all"), True)([[pairs[0], pairs[3]]])
    keys = torch.randn(batch.input_ids.numel(), 2, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(copy_keys, (keys, batch.key_places, batch.key_copies))
    copied = copy_keys(keys, batch.key_places, batch.key_copies)
    assert torch.equal(copied, keys[batch.key_places])
    probe = torch.randn_like(copied)
    (found,) = torch.autograd.grad(copied, keys, probe)
    (wanted,) = torch.autograd.grad(keys[batch.key_places], keys, probe)
    assert torch.equal(found, wanted)


def test_compiled_one_graph_serves_batches_with_other_prompts() -> None:
    """Attention with sinks: on CPUs that without reads the offsets outside of an operator."""
    pairs = random_pairs(shares_prompts=True)
    collate = PairCollator(Collator(True, 0, width=PaddedWidth(96, 96), offsets="all"), True)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    def attend(*leaves: torch.Tensor, **inputs: Any) -> list[torch.Tensor]:
        query, key, value, sinks = leaves
        options = inputs | {"s_aux": sinks, "sliding_window": 5}
        return [attention_by_offsets(nn.Module(), query, key, value, None, **options)[0]]

    torch._dynamo.reset()
    leaves = [torch.randn(1, heads, 96, 8, requires_grad=True) for heads in (4, 2, 2)]
    leaves.append(torch.randn(4, requires_grad=True))
    with torch.compiler.config.patch(dynamic_sources=OFFSETS_OF_ROWS):
        compiled = torch.compile(attend, backend=backend, fullgraph=True)
        for row in ([0, 3], [4, 0], [3, 5, 2]):
            batch = collate([[pairs[index] for index in row]])
            inputs = offsets_of(batch) | keys_of(batch)
            results = []
            for function in (compiled, attend):
                (output,) = function(*leaves, **inputs)
                results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
            assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(*results, strict=True))
    assert len(graphs) == 1


def test_flops_count_the_prompt_of_the_rejected_answer_as_keys_alone() -> None:
    offsets, of_keys = (torch.tensor(of, dtype=torch.int32) for of in ([0, 6, 10], [0, 6, 14]))
    query = torch.randn(10, 4, 8, requires_grad=True)
    key, value = (torch.randn(14, 4, 8, requires_grad=True) for _ in range(2))
    with FlopCounterMode(display=False) as counter:
        attention_with_sinks(query, key, value, torch.zeros(4), offsets, 6, (of_keys, 8)).sum().backward()
    pairs = 6 * 6 / 2 + 4 * 4 + 4 * 4 / 2
    assert counter.get_total_flops() == (2 + 5) * 2 * 4 * 8 * pairs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are a GPU's")
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("window", [None, 100], ids=["", "in windows"])
@pytest.mark.parametrize("kernel", ["torch", "flash-attn-4"])
def test_on_a_gpu_kernels_take_more_keys_than_queries_forward_backward_and_recomputed(
    kernel: str, window: int | None, compiled: bool
) -> None:
    if kernel == "flash-attn-4" and not has_kernels():
        pytest.skip("needs flash-attn-4, and a Hopper or Blackwell GPU")
    pairs = random_pairs(shares_prompts=True, times=20)
    collate = PairCollator(Collator(True, 0, width=PaddedWidth(2048, 2048), offsets="all"), True)
    attention = attention_by_offsets if kernel == "torch" else attention_by_flash_4

    def attend(*heads: torch.Tensor, **keys: Any) -> torch.Tensor:
        def compute(*heads: torch.Tensor) -> torch.Tensor:
            return attention(nn.Module(), *(2 * each for each in heads), None, sliding_window=window, **keys)[0]

        output: torch.Tensor = checkpoint(compute, *heads, use_reentrant=False)
        return output

    torch._dynamo.reset()
    function = torch.compile(attend, fullgraph=True) if compiled else attend
    torch.manual_seed(0)
    heads = [torch.randn(1, number, 2048, 128, device="cuda", requires_grad=True) for number in (8, 2, 2)]
    with torch.compiler.config.patch(dynamic_sources=OFFSETS_OF_ROWS):
        for row in ([0, 3], [5, 1, 2]):
            batch = collate([[pairs[index] for index in row]]).to(torch.device("cuda"))
            assert batch.cu_seqlens is not None
            assert batch.cu_seqlens_k is not None
            visible = visible_keys(batch.cu_seqlens, batch.cu_seqlens_k, NO_WINDOW if window is None else window - 1)
            query, *others = (2 * head for head in heads)
            others = [each[:, :, batch.key_places] for each in others]
            plain = F.scaled_dot_product_attention(query, *others, attn_mask=visible, enable_gqa=True).transpose(1, 2)
            output = function(*(head.bfloat16() for head in heads), **offsets_of(batch) | keys_of(batch)).float()
            probe = torch.randn_like(plain)
            for ours, theirs in zip(
                (output, *torch.autograd.grad(output, heads, probe)),
                (plain, *torch.autograd.grad(plain, heads, probe)),
                strict=True,
            ):
                assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def check(loss_of: Callable[[Any, Any, Any], float], row_length: int = 256) -> None:
    """The trial, with losses by the tokens of prompt, chosen and rejected answer."""

    def losses(rows: list[list[Any]]) -> torch.Tensor:
        (row,) = rows
        assert sum(len(each.input_ids) for each in row) <= row_length
        chosen, rejected = row[0].texts if isinstance(row[0], AnswerPair) else row[:2]
        num_prompt = int(np.argmax(rejected.labels != -100))
        parts = rejected.input_ids[:num_prompt], chosen.input_ids[num_prompt:], rejected.input_ids[num_prompt:]
        is_shared = isinstance(row[0], AnswerPair)
        return torch.full((4,), 10 + 1e-3 * loss_of(*parts) * (is_shared or loss_of is right), dtype=torch.float64)

    check_shared_prompts(nn.Linear(1, 1), losses, vocab_size=100, row_length=row_length, tolerance=1e-3)


def right(prompt: Any, chosen: Any, rejected: Any) -> float:
    return float(prompt.sum() + rejected.sum())


@pytest.mark.parametrize("row_length", [8, 9, 17, 48, 83, 256])
def test_a_rejected_answer_that_sees_its_prompt_alone_is_right_in_rows_of_any_length(row_length: int) -> None:
    check(right, row_length)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda prompt, chosen, rejected: float(prompt.sum() + 1e-1 * chosen[-1]),
        lambda prompt, chosen, rejected: 0.0,
        lambda prompt, chosen, rejected: float(1000 + prompt.sum()),
    ],
    ids=["sees the chosen one", "does not see the prompt", "other positions"],
)
def test_another_attention_is_refused(wrong: Callable[[Any, Any, Any], float]) -> None:
    with pytest.raises(ConfigError, match="would not see its prompt alone; give --share_prompts False"):
        check(wrong)
