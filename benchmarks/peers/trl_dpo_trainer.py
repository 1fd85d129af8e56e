"""Training by TRL's DPOTrainer; benchmarks compare finetuning.py --loss_type dpo with it.

    python -m benchmarks.peers.trl_dpo_trainer MODEL_FOLDER --micro_batch 2 --length 4096 --steps 30

Needs trl, and takes Liger's kernels for the layers if they are installed. The pairs are those of
benchmarks/runs/random_rows.py. TRL 1.16 has turned `padding_free` of its DPOTrainer off, so pairs of like lengths share
a batch, which leaves as little padding as its collator can. Only steps are timed: reference scores are computed before.
Prints one JSON object: median tokens/s without padding after warm-up, peak GiB allocated, the losses of the first and
the last step, the seconds of the pass over the reference, and what part of the batches was padding.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from typing import Any
from unittest import mock

import datasets
import fire
import torch
import trl
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer
from transformers.utils import is_liger_kernel_available

from benchmarks.peers.peer_work import ATTENTION, PeerWork
from benchmarks.peers.step_times import StepTimes
from benchmarks.peers.trl_trainer import adapter_of, build
from benchmarks.runs import random_rows
from benchmarks.runs.measurements import WARMUP_STEPS
from utils.units import GIB


class TokenizedDPOTrainer(trl.DPOTrainer):
    """Takes pairs of token ids as they are and in their order, and measures the pass over the reference."""

    reference_seconds = 0.0

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = super()._precompute_ref_logps(*args, **kwargs)
        self.reference_seconds += time.perf_counter() - began
        return found


def columns_of(row: dict[str, Any]) -> dict[str, list[int]]:
    """A pair by the names that TRL's collator reads."""
    ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
    cut = row["sample_lengths"][0]
    prompt = next(place for place, label in enumerate(labels) if label != -100)
    return {"prompt_ids": ids[:prompt], "chosen_ids": ids[prompt:cut], "rejected_ids": ids[cut + prompt :]}


def lengths_of(pair: dict[str, list[int]]) -> list[int]:
    """The tokens of both texts, the longer one first."""
    return sorted(len(pair["prompt_ids"]) + len(pair[answer]) for answer in ("chosen_ids", "rejected_ids"))[::-1]


def make_trainer(
    model: str, device: torch.device, pairs: list[dict[str, list[int]]], times: StepTimes, **arguments: Any
) -> TokenizedDPOTrainer:
    """The trainer, with the reference's scores of all pairs."""
    work = PeerWork(model, rank=16, modules=ATTENTION)
    # TRL names the file of these scores by a hash of the weights; in a new folder any name will do.
    with mock.patch("trl.trainer.dpo_trainer.hash_module", return_value="random weights"):
        return TokenizedDPOTrainer(
            model=build(work, device),
            processing_class=AutoTokenizer.from_pretrained(model),
            train_dataset=datasets.Dataset.from_list(pairs),
            peft_config=adapter_of(work),
            callbacks=[times],
            args=trl.DPOConfig(
                learning_rate=1e-4,
                precompute_ref_log_probs=True,
                max_grad_norm=1.0,
                bf16=device.type == "cuda",
                use_cpu=device.type == "cpu",
                use_liger_kernel=device.type == "cuda" and is_liger_kernel_available(),
                optim="adamw_torch_fused",
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                **arguments,
            ),
        )


def main(
    model: str,
    micro_batch: int = 2,
    length: int = 4096,
    steps: int = 30,
    activation_checkpointing: bool = False,
    dataset_function: str = "get_pairs",
) -> None:
    """Train for some steps.

    Args:
        model: folder with config.json and a tokenizer.
        micro_batch: rows of finetuning.py, each of `length` tokens: two pairs of texts of a quarter of it.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    rows = getattr(random_rows, dataset_function)(None, AutoTokenizer.from_pretrained(model), "train")
    per_batch = 2 * micro_batch
    pairs = sorted(map(columns_of, rows[: steps * per_batch]), key=lengths_of)
    batches = [pairs[first : first + per_batch] for first in range(0, len(pairs), per_batch)]
    num_tokens = [sum(sum(lengths_of(pair)) for pair in batch) for batch in batches]
    num_places = [2 * len(batch) * lengths_of(batch[-1])[0] for batch in batches]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            *(model, device, pairs, times),
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=per_batch,
            max_length=length // 4,
            gradient_checkpointing=activation_checkpointing,
            logging_steps=1,
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    rates = [tokens / seconds for tokens, seconds in zip(num_tokens, times.seconds, strict=True)]
    figures = {
        "tokens_per_second": statistics.median(rates[WARMUP_STEPS:]),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else math.nan,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "reference_seconds": trainer.reference_seconds,
        "padding": 1 - sum(num_tokens) / sum(num_places),
        "liger": trainer.args.use_liger_kernel,
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
