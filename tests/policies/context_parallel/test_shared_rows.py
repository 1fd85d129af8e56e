"""Rows that ranks share: losses and gradients are those of whole rows, and no part of a batch is lost or told twice."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from configs.flags import parse_flags
from data.batches.padding import PaddedWidth
from data.tokens.labels import IGNORE_INDEX
from policies.attention.choice import BY_OFFSETS
from policies.attention.flash_attention_4 import AttentionKind
from policies.context_parallel.choice import (
    check_attention,
    check_shared_rows,
    find_context_group,
    kinds_over_ranks,
    lengths_to_share,
)
from policies.context_parallel.exchange import repeats_of_keys
from ranks.context_group import ContextGroup
from ranks.environment import lone_process
from tasks.causal_batches import Collator
from tasks.row_shares import share_of
from tests.helpers.packed_models import make_documents, make_model
from tests.helpers.processes import ProcessGroup
from tests.helpers.shared_rows import LENGTHS, MODELS, compare, whole_batch
from tests.helpers.small_configs import SMALL
from utils.errors import ConfigError


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_losses_and_gradients_are_those_of_whole_rows(
    num_ranks: int, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Two key heads: four ranks get copies of them. Packed documents, padded rows, windows and sinks."""
    process_group.train(partial(compare, tmp_path), num_ranks)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    for name in MODELS:
        for packing in (True, False):
            assert max(found[0][f"{name} {packing}"]) < 1e-5, name
    assert max(max(of_rank["compiled"]) for of_rank in found) < 1e-6
    said = [of_rank["proof"] for of_rank in found]
    assert [of_whole for of_whole, _ in said] == [None] * num_ranks
    assert any(wrong and wrong.startswith("losses of rows that ranks share differ by ") for _, wrong in said)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parts_of_a_batch_are_the_whole(num_ranks: int, packing: bool) -> None:
    whole = whole_batch(num_ranks, packing=packing)
    parts = [share_of(whole, ContextGroup(num_ranks, rank)) for rank in range(num_ranks)]
    length = whole.input_ids.shape[1] // num_ranks
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1), whole.input_ids)
    positions = (
        torch.arange(whole.input_ids.shape[1]).expand(2, -1) if whole.position_ids is None else whole.position_ids
    )
    assert torch.equal(torch.cat([p.position_ids for p in parts if p.position_ids is not None], 1), positions)
    # Each label is where it was, also those of tokens that another rank has.
    predicted = torch.full_like(whole.input_ids, -1)
    for rank, part in enumerate(parts):
        columns = predicted[:, rank * length : (rank + 1) * length]
        columns[part.target_positions // length, part.target_positions % length] = part.targets
    wanted = torch.full_like(whole.input_ids, -1).flatten()
    wanted[whole.target_positions] = whole.targets
    assert torch.equal(predicted.flatten(), wanted)
    for count in ("num_tokens", "num_label_tokens", "num_attended_pairs"):
        assert sum(getattr(part, count) for part in parts) == getattr(whole, count)
    assert all(part.cu_seqlens is whole.cu_seqlens and part.max_seqlen == whole.max_seqlen for part in parts)
    assert sum(LENGTHS) > whole.num_tokens / 2


@pytest.mark.parametrize("lengths", [[], [3]])
def test_a_part_without_labels_counts_none_and_keeps_a_position(lengths: list[int]) -> None:
    """A batch of an idle group counted one label token more, so an evaluation's loss was too low."""
    collate = Collator(packing=True, padding_id=0, width=PaddedWidth(2, 96))
    whole = collate([make_documents(lengths)] if lengths else [])
    parts = [share_of(whole, ContextGroup(2, rank)) for rank in range(2)]
    assert sum(part.num_label_tokens for part in parts) == whole.num_label_tokens
    (empty, *_) = [part for part in parts if not part.num_label_tokens]
    assert (empty.targets.tolist(), empty.target_positions.tolist()) == ([IGNORE_INDEX], [0])


@pytest.mark.parametrize(("key_heads", "num_ranks", "times"), [(8, 2, 1), (8, 8, 1), (2, 4, 2), (1, 4, 4), (6, 4, 2)])
def test_every_rank_gets_as_many_key_heads(key_heads: int, num_ranks: int, times: int) -> None:
    assert repeats_of_keys(key_heads, num_ranks) == times


def test_flash_attention_4_is_tried_with_the_heads_that_a_rank_has() -> None:
    kind = AttentionKind(num_heads=8, num_key_heads=2, head_dim=64, window=15, packed=True)
    assert kinds_over_ranks([kind], ContextGroup()) == {kind}
    assert kinds_over_ranks([kind], ContextGroup(4)) == {kind._replace(num_heads=2, num_key_heads=1)}


def refusal(*flags: str, causal: bool = True, **of_model: object) -> str:
    config = parse_flags(["--model_name", "m", *flags])
    model_config = transformers.LlamaConfig(**{**SMALL, **of_model})
    group = ContextGroup(config.fsdp_config.context_parallel_size)
    with pytest.raises(ConfigError) as caught:
        check_shared_rows(group, config, model_config, is_causal_task=causal)
    return str(caught.value)


BY_TWO = ("--context_parallel_size", "2")


def test_what_cannot_be_shared_is_refused() -> None:
    refused = "--context_parallel_size: "
    assert refusal(*BY_TWO, causal=False) == (
        f"{refused}rows are shared with causal language models of text alone; leave it out"
    )
    assert refusal(*BY_TWO, "--use_peft", "--peft_method", "llama_adapter").startswith(f"{refused}--peft_meth")
    assert refusal(*BY_TWO, "--use_fast_kernels", "False").startswith(f"{refused}attention over ranks needs fast ker")
    assert refusal("--context_parallel_size", "3") == (
        f"{refused}4 attention heads of this model cannot be shared evenly by 3 ranks; give a divisor of 4"
    )
    with pytest.raises(ConfigError, match="1 rank cannot be grouped by 2"):
        find_context_group(2, lone_process())


def test_neighbours_share_rows_and_a_line_says_if_they_are_on_two_machines() -> None:
    env = replace(lone_process(rank=5), world_size=8, local_world_size=4)
    assert find_context_group(2, env) == (ContextGroup(2, 1), [])
    group, (note,) = find_context_group(8, env)
    assert group == ContextGroup(8, 5)
    assert note.startswith(
        "context_parallel_size: 4 ranks of a machine cannot be grouped by 8, so rows are shared over"
    )


def test_lengths_are_shared_evenly() -> None:
    group = ContextGroup(4)
    assert lengths_to_share((32,), group, asked=None) == ((32,), [])
    assert lengths_to_share((30,), group, asked=None)[0] == (28,)
    with pytest.raises(ConfigError, match=r"--context_length: 30 tokens cannot be shared evenly by 4 ranks .*give 28$"):
        lengths_to_share((30,), group, asked=30)


def test_models_whose_tokens_meet_elsewhere_are_refused() -> None:
    group = ContextGroup(2)
    with pytest.raises(ConfigError, match="flash attention, which it needs"):
        check_attention(make_model("llama", "sdpa"), group, 32)
    model = make_model("llama", BY_OFFSETS)
    check_attention(model, group, 32)
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    check_attention(model, group, 128)
    with pytest.raises(ConfigError, match="embeddings of type dynamic depend on the longest row beyond 128 tokens"):
        check_attention(model, group, 256)
