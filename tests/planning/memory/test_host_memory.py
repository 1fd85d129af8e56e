"""Host memory of what is offloaded: to the byte if we pin it, in powers of two if torch does."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.memory.host_memory import PROCESS_BYTES
from planning.planned_run import plan_of
from utils.units import GIB

SHAPE = {"hidden_size": 96, "intermediate_size": 320, "num_attention_heads": 4, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    LlamaConfig(**SHAPE, vocab_size=1000, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def offloaded(model: Path, given: str) -> tuple[int, list[int]]:
    """Bytes in host memory that the plan counts beside the process, and each parameter's."""
    shape = "--batch_size_training 1 --context_length 64 --run_validation False --num_workers_dataloader 0 --pure_bf16"
    config = parse_flags(["--model_name", str(model), *shape.split(), *given.split()])
    plan = plan_of(config, parse_hardware("2xA100-40GB" if "fsdp" in given else "A100-40GB"))
    sizes = [parameter.nbytes for parameter in plan.model.adapted.model.parameters()]
    return round(plan.memory.host_training_gib * GIB) - PROCESS_BYTES, sizes


def test_what_fully_shard_pins_is_rounded_up_and_states_are_not(model: Path) -> None:
    found, sizes = offloaded(model, "--enable_fsdp --fsdp_cpu_offload")
    parts = [size // 2 for size in sizes]
    rounded = sum(next(2**n for n in range(40) if 2**n >= part) for part in parts)
    assert rounded > 1.1 * sum(parts)
    # Weights and gradients; AdamW's averages; weights before their update, if steps begin in backward.
    assert found == pytest.approx(2 * rounded + 3 * sum(parts), abs=64)
    found, _ = offloaded(model, "--enable_fsdp --fsdp_cpu_offload --gradient_clipping")
    assert found == pytest.approx(2 * rounded + 2 * sum(parts), abs=64)


def test_copies_of_an_offloaded_optimizer_take_their_own_bytes(model: Path) -> None:
    found, sizes = offloaded(model, "--optimizer_cpu_offload")
    assert found == pytest.approx(4 * sum(sizes), abs=64)  # copies of weights and gradients, and two averages
