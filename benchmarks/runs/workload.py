"""A run of random rows for a benchmark: what it trains, on how many GPUs, and its command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.runs.launch import ROOT

LORA = ["--use_peft"]
ON_ALL = [*LORA, "--lora_config.target_modules", "all-linear"]
R8, R16 = ["--lora_config.r", "8"], ["--lora_config.r", "16"]


@dataclass(frozen=True)
class Workload:
    shape: str
    micro_batch: int
    length: int
    flags: list[str] = field(default_factory=list)
    nproc: int = 1
    accumulation: int = 1
    dataset_function: str = "get_rows"  # of benchmarks/runs/random_rows.py
    num_sharing: int = 1  # ranks that share each row
    gpu_memory_gib: float | None = None  # limit of the allocator, as if the GPU were smaller

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.nproc // self.num_sharing

    def words(self, model: Path, output: Path, steps: int, extra: Sequence[str] = ()) -> list[str]:
        """The command line of finetuning.py, with `extra` flags. Weights are random if the model folder has none."""
        flags = ["--model_name", str(model), "--output_dir", str(output), "--overwrite"]
        if not any(model.glob("*.safetensors")):
            flags.append("--random_weights")
        flags += ["--dataset", f"{ROOT}/benchmarks/runs/random_rows.py:{self.dataset_function}"]
        flags += ["--run_validation", "False", *self.sizes()]
        flags += ["--max_train_step", str(steps), "--num_epochs", "100", "--save_model", "False"]
        if "--save_every_steps" not in extra:
            flags += ["--save_every_steps", "0", "--save_every_minutes", "0"]
        flags += [*self.flags, *extra]
        if "--compile" not in flags:
            flags.append("--compile")  # by default so few steps are not, but they stand for many
        return flags

    def sizes(self) -> list[str]:
        """The flags of its batch."""
        flags = ["--context_length", str(self.length), "--batch_size_training", str(self.micro_batch)]
        flags += ["--gradient_accumulation_steps", str(self.accumulation)]
        return flags + (["--context_parallel_size", str(self.num_sharing)] if self.num_sharing > 1 else [])

    def variables(self, steps: int) -> dict[str, str]:
        """The variables by which random_rows.py makes as many rows as the steps take."""
        return {"ROW_LENGTH": str(self.length), "NUM_ROWS": str(self.global_batch * steps)}
