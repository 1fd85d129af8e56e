"""A plan computes four chunks of the loss, and says what all of them would take."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import LlamaConfig

from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.memory import run_passes
from planning.memory.memory_plan import MemoryPlan
from planning.planned_run import plan_of


@pytest.mark.parametrize("size", [3000, 6000, 32768])  # of 32,768 tokens
@pytest.mark.parametrize("trained", ["", "--use_peft", "--use_peft --compile"])
def test_a_plan_of_four_chunks_is_that_of_all(
    trained: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 32000}
    config = LlamaConfig(**shape, num_hidden_layers=1, max_position_embeddings=65536)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    flags = ["--model_name", str(tmp_path), "--context_length", "32768", "--batch_size_training", "1", *trained.split()]

    def planned() -> MemoryPlan:
        cut = parse_flags([*flags, "--loss_chunk_size", str(size)])
        return plan_of(cut, parse_hardware("A100-40GB")).memory

    found = planned()
    monkeypatch.setattr(run_passes, "some_chunks", nullcontext)
    whole = planned()
    assert found.phases.keys() == whole.phases.keys()
    for phase, parts in whole.phases.items():
        assert asdict(found.phases[phase]) == pytest.approx(
            asdict(parts), abs=1e-7
        )  # GiB; the sums of chunks are scalars
