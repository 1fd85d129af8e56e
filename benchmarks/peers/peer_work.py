"""What another tool is asked to train, and the figures it prints: one form for all of benchmarks/peers.

A runner is called as `python -m benchmarks.peers.RUNNER MODEL_FOLDER --method=lora --micro_batch=2 ...` with the fields
of `PeerWork`. It takes the weights of the folder and the rows of benchmarks/runs/random_rows.py in the order in which
finetuning.py takes them, so losses can be compared step by step. Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from benchmarks.runs.measurements import WARMUP_STEPS
from benchmarks.runs.random_rows import get_documents, get_rows
from data.batches.order import epoch_order
from utils.units import GIB

LEARNING_RATE = 1e-4
LORA_ALPHA = 32
ATTENTION = "q_proj,k_proj,v_proj,o_proj"
SEED = 42  # of finetuning.py
COMPARED_LOSSES = 10
OUR_FLAGS = ["--lr", str(LEARNING_RATE), "--scheduler", "constant", "--weight_decay", "0"]
OUR_ADAPTER_FLAGS = ["--lora_config.lora_dropout", "0"]  # Unsloth's kernels want none, and losses could not be compared
"""Flags of finetuning.py for the same work."""


@dataclass(frozen=True)
class PeerWork:
    """One run of another tool.

    Attributes:
        model: folder with config.json, a tokenizer and weights.
        method: full, lora or qlora (nf4).
        micro_batch: rows of a step; with batching padded, documents.
        length: tokens of a row, or of a document at most.
        modules: names of the linear layers with adapters, separated by commas.
        batching: rows (of one document each, exactly full), packed or padded (documents as long as SAMSum's).
    """

    model: str
    method: str = "full"
    micro_batch: int = 2
    length: int = 4096
    steps: int = 30
    rank: int = 8
    modules: str = "q_proj,v_proj"
    batching: str = "rows"
    double_quant: bool = False
    activation_checkpointing: bool = False
    activation_offloading: bool = False  # of TRL

    @property
    def words(self) -> list[str]:
        """The command line that `parse_work` reads."""
        return [self.model, *(f"--{field.name}={getattr(self, field.name)}" for field in fields(self)[1:])]

    def rows(self, tokenizer: Any) -> list[list[int]]:
        """Token ids of the rows or documents, in the order in which they are to be trained on."""
        get = get_rows if self.batching == "rows" else get_documents
        found = [row["input_ids"] for row in get(None, tokenizer, "train")]
        if self.batching == "packed":  # each tool packs them in its own way
            return [row.tolist() for row in found]
        lengths = np.array([len(row) for row in found]) if self.batching == "padded" else None
        order = epoch_order(len(found), seed=SEED, epoch=0, global_batch_size=self.micro_batch, lengths=lengths)
        return [found[place].tolist() for place in order]

    def tokens_of_steps(self, lengths: Sequence[int]) -> list[float]:
        """Tokens of each step without padding.

        Args:
            lengths: tokens of each row as it is given to the model; of packed ones only their mean counts.
        """
        if self.batching == "packed":
            return [self.micro_batch * statistics.fmean(lengths)] * self.steps
        starts = range(0, self.steps * self.micro_batch, self.micro_batch)
        return [float(sum(lengths[start : start + self.micro_batch])) for start in starts]


def parse_work(argv: Sequence[str] | None = None) -> PeerWork:
    """The work that a command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for field in fields(PeerWork)[1:]:
        kind = type(field.default)
        parser.add_argument(f"--{field.name}", type="True".__eq__ if kind is bool else kind, default=field.default)
    return PeerWork(**vars(parser.parse_args(argv)))


def report(
    seconds: Sequence[float], tokens: Sequence[float], losses: Sequence[float], settings: str, **more: Any
) -> None:
    """Print the figures of a run as one JSON object.

    Args:
        seconds: of each step.
        tokens: of each step, without padding.
        settings: what of the tool was chosen: attention, kernels, recomputation.
    """
    speeds = [n / s for n, s in zip(tokens, seconds, strict=False)]
    steady = speeds[min(WARMUP_STEPS, len(speeds) - 1) :]
    figures = {
        "tokens_per_second": statistics.median(steady),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else math.nan,
        "first_loss": losses[0],
        "losses": list(losses[:COMPARED_LOSSES]),
        "settings": settings,
    }
    print(json.dumps(figures | more), flush=True)


def trainer_arguments(work: PeerWork, folder: str) -> dict[str, Any]:
    """Arguments of transformers' Trainer, for the tools that are built on it."""
    has_gpu = torch.cuda.is_available()
    return {
        "output_dir": folder,
        "max_steps": work.steps,
        "per_device_train_batch_size": work.micro_batch,
        "gradient_checkpointing": work.activation_checkpointing,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "bf16": has_gpu,
        "use_cpu": not has_gpu,
        "optim": "adamw_torch_fused",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": work.steps + 1,  # StepTimes asks for those that are compared
        "disable_tqdm": True,
    }
