"""The memory ledger: bytes counted by hand for whole, replicated and sharded models, and when they are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from reporting.memory_ledger import MemoryLedger, is_observed_step, local_bytes
from reporting.memory_phases import PHASES
from tests.helpers import random_documents
from tests.helpers.made import Made
from tests.helpers.processes import ProcessGroup, read_metrics

GIB = 2**30
FP32 = 4
LAYOUTS = {
    "one process": (1, []),
    "NO_SHARD": (2, []),
    "FULL_SHARD": (2, ["--enable_fsdp"]),
    "FULL_SHARD, offloaded": (2, ["--enable_fsdp", "--fsdp_cpu_offload"]),
    "FULL_SHARD, optimizer offloaded": (2, ["--enable_fsdp", "--optimizer_cpu_offload"]),
}
# One process takes 58 steps, in two epochs, the layouts 10: rows are read two a step.
NUM_ROWS = {layout: 58 if layout == "one process" else 10 for layout in LAYOUTS}
OBSERVED = {58: [1, 2, 29, 50, 58], 10: [1, 2, 5, 10]}
COMPONENTS = ("params_gib", "grads_gib", "optimizer_gib", "activations_gib", "other_gib")


@pytest.fixture(scope="module")
def odd_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sizes that two ranks cannot share equally, and untied."""
    config = transformers.LlamaConfig(
        vocab_size=601,
        hidden_size=24,
        intermediate_size=65,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    folder = tmp_path_factory.mktemp("odd")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def memory(odd_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The memory events by layout."""

    def run(layout: str) -> list[dict[str, Any]]:
        ranks, flags = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("memory") / "run"
        flags = ["--model_name", str(odd_model), "--output_dir", str(folder), *flags, "--save_model", "False"]
        flags += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
        flags += ["--num_workers_dataloader", "0", "--context_length", "64", "--batching_strategy", "padding"]
        flags += ["--split_slice", str(NUM_ROWS[layout]), "--num_epochs", "2"]
        process_group.train([*flags, "--batch_size_training", "1", "--global_batch_size", "2"], ranks)
        return [event for event in read_metrics(folder) if event["event"] == "memory"]

    return Made(run)


def hand_count(folder: Path, layout: str, rank: int) -> tuple[int, int, int]:
    """Bytes of parameters with buffers, of gradients, and of AdamW's states on this rank.

    Sharded, a tensor's rows are dealt out in chunks of ceil(rows / ranks); parameters and gradients keep room for a
    whole chunk on the last rank too, AdamW's averages do not.
    """
    sharded = layout.startswith("FULL_SHARD")
    model = AutoModelForCausalLM.from_pretrained(folder)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    shapes = [parameter.shape for parameter in model.parameters()]
    chunks = [(shape[0] + 1) // 2 if sharded else shape[0] for shape in shapes]
    shares = [shape[0] - chunk if sharded and rank == 1 else chunk for shape, chunk in zip(shapes, chunks, strict=True)]
    room = sum(chunk * shape[1:].numel() for shape, chunk in zip(shapes, chunks, strict=True))
    own = sum(share * shape[1:].numel() for shape, share in zip(shapes, shares, strict=True))
    steps = FP32 * len(shapes)  # AdamW keeps the step of every parameter as a tensor of one number
    return FP32 * room + buffers, FP32 * room, FP32 * 2 * own + steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_gradients_and_optimizer_are_what_a_hand_count_gives(
    layout: str, memory: Made, odd_model: Path
) -> None:
    for event in memory[layout]:
        params, grads, states = hand_count(odd_model, layout, event["rank"])
        has_grads = event["phase"] in ("after_backward", "after_optimizer_step")
        has_states = event["step"] > 1 or event["phase"] == "after_optimizer_step"
        where = f"step {event['step']}, {event['phase']}, rank {event['rank']}"
        assert event["params_gib"] * GIB == pytest.approx(params), where
        assert event["grads_gib"] * GIB == pytest.approx(grads if has_grads else 0), where
        assert event["optimizer_gib"] * GIB == pytest.approx(states if has_states else 0), where
        assert event["optimizer_cpu_gib"] == 0, where  # on CPU the optimizer's home is the device itself


@pytest.mark.slow
def test_a_sharded_rank_holds_about_half(memory: Made) -> None:
    def largest(layout: str, name: str) -> float:
        return max(event[name] for event in memory[layout])

    for name in ("params_gib", "grads_gib", "optimizer_gib"):
        assert largest("FULL_SHARD", name) / largest("NO_SHARD", name) == pytest.approx(0.5, abs=0.02)
        assert largest("NO_SHARD", name) == pytest.approx(largest("one process", name))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_components_add_up_to_what_is_allocated(layout: str, memory: Made) -> None:
    for event in memory[layout]:
        assert sum(event[name] for name in COMPONENTS) == pytest.approx(event["allocated_gib"], abs=1e-9)
        assert 0 < event["allocated_gib"] <= event["peak_allocated_gib"]
        assert event["host_rss_gib"] > 0
        assert event["reserved_gib"] is None  # there is no allocator to ask on CPU


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_are_what_the_first_forward_added(layout: str, memory: Made) -> None:
    events = {(event["step"], event["rank"], event["phase"]): event for event in memory[layout]}
    for (step, rank, phase), event in events.items():
        before = events[step, rank, "before_forward"]["allocated_gib"]
        wanted = event["allocated_gib"] - before if phase == "after_forward" else 0
        assert event["activations_gib"] == pytest.approx(wanted, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_records_the_four_phases_of_the_observed_steps_and_of_no_other(layout: str, memory: Made) -> None:
    found = [(event["step"], event["rank"], event["phase"]) for event in memory[layout]]
    ranks = range(LAYOUTS[layout][0])
    observed = OBSERVED[NUM_ROWS[layout]]
    assert found == [(step, rank, phase) for step in observed for rank in ranks for phase in PHASES]


def test_observed_steps_are_1_2_multiples_of_50_and_ends_of_epochs() -> None:
    assert [step for step in range(1, 161) if is_observed_step(step, last_of_epoch=False)] == [1, 2, 50, 100, 150]
    assert is_observed_step(77, last_of_epoch=True)


def test_a_storage_that_several_tensors_share_counts_once() -> None:
    weight = torch.zeros(100, 10)
    tied = nn.Linear(10, 100, bias=False)
    tied.weight = nn.Parameter(weight)
    assert local_bytes([weight, weight[:3], tied.weight, None])["cpu"] == 4000
    assert local_bytes([weight, torch.zeros(5, dtype=torch.bfloat16)])["cpu"] == 4010
    assert local_bytes([])["cpu"] == 0


class LedgerOfAGpu(MemoryLedger):
    """As on a GPU where 5000 bytes are allocated."""

    def allocator(self) -> tuple[int, int, float, int]:
        return 5000, 6000, 7000.0, 0


def test_what_lives_in_host_memory_is_not_counted_as_the_gpus() -> None:
    model = nn.Linear(10, 20)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ledger = LedgerOfAGpu(model, optimizer, torch.device("cuda"))
    with ledger.step(is_observed=True) as entries:
        ledger.record("before_forward")
        model(torch.ones(1, 10)).sum().backward()
        ledger.record("after_backward")
        optimizer.step()
        ledger.record("after_optimizer_step")
    with ledger.step(is_observed=False) as none:
        ledger.record("before_forward")
    assert none is None
    assert len(entries) == 3
    for entry in entries:
        assert [entry[name] for name in COMPONENTS[:3]] == [0, 0, 0]
        assert sum(entry[name] for name in COMPONENTS) == entry["allocated_gib"] == 5000 / GIB
    states = 2 * 4 * (10 * 20 + 20) + 2 * 4  # two averages, and a step for each parameter
    assert [entry["optimizer_cpu_gib"] * GIB for entry in entries] == [0, 0, states]
