"""Plans for a CPU: its own kernels, and the resident memory of the whole process."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from configs.flags import parse_flags
from planning.machines.cards import Card
from planning.machines.hardware import Hardware
from planning.memory.host_memory import CPU_PROCESS_BYTES, WORKER_BYTES
from planning.planned_run import Plan, plan_of
from utils.units import GIB

CPU = Hardware(Card("CPU", 24.0, is_gpu=False, host_memory_gib=24.0))
SIZES = {"vocab_size": 600, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}


def planned(folder: Path, *flags: str, key_heads: int = 8, workers: int = 0, hardware: Hardware = CPU) -> Plan:
    model = folder / f"heads-{key_heads}"
    heads = {"num_attention_heads": 8, "num_key_value_heads": key_heads, "max_position_embeddings": 8192}
    LlamaConfig(**SIZES, **heads, architectures=["LlamaForCausalLM"]).save_pretrained(model)
    given = ["--model_name", str(model), "--num_workers_dataloader", str(workers), *flags]
    return plan_of(parse_flags(given), hardware)


def test_shared_key_heads_need_less_and_not_more_and_length_counts_once(tmp_path: Path) -> None:
    lengths = ("--context_length", "2048"), ("--context_length", "4096")
    for method in ((), ("--use_peft",)):
        short, long = (planned(tmp_path, *method, *length, key_heads=2).memory for length in lengths)
        all_heads = planned(tmp_path, *method, *lengths[1]).memory
        assert long.most("activations") < all_heads.most("activations")
        assert long.most("activations") < 2.1 * short.most("activations")


def test_the_process_and_its_heap_count_besides_tensors(tmp_path: Path) -> None:
    memory = planned(tmp_path, "--context_length", "4096").memory
    peak = memory.at_peak
    heap = 0.3 * (peak.activations + peak.temporaries)
    assert abs(memory.overhead_gib - CPU_PROCESS_BYTES / GIB - heap) < 0.01
    assert memory.host_training_gib == memory.peak_gib + memory.overhead_gib
    with_workers = planned(tmp_path, "--context_length", "4096", workers=2).memory
    assert with_workers.host_training_gib - memory.host_training_gib == 2 * WORKER_BYTES / GIB


def test_the_copy_of_a_checkpoint_counts_if_it_was_asked_for(tmp_path: Path) -> None:
    plain, copies = (planned(tmp_path, "--async_save", asked).memory for asked in ("False", "True"))
    assert copies.host_training_gib - plain.host_training_gib == pytest.approx(plain.checkpoint_gib, rel=1e-6)


def test_ranks_on_a_cpu_share_its_memory_with_their_loading_processes(tmp_path: Path) -> None:
    """A run may fit each rank's memory, and not leave room for the processes that read its data."""
    two = Hardware(Card("CPU", 1.5, is_gpu=False, host_memory_gib=3.0), cards_per_node=2)
    fits, full = (planned(tmp_path, workers=workers, hardware=two).memory for workers in (0, 2))
    assert (fits.verdict, full.verdict, full.device_verdict) == ("fits", "does_not_fit", "fits")
