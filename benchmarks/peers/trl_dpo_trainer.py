"""Training by TRL's DPOTrainer; benchmarks compare finetuning.py --loss_type dpo with it.

    python -m benchmarks.peers.trl_dpo_trainer MODEL_FOLDER --micro_batch 2 --length 4096 --steps 30

Needs trl. Weights are random. The pairs are those of benchmarks/runs/random_rows.py, padded: TRL 1.16 has turned
`padding_free` of its DPOTrainer off. Prints one JSON object: median tokens/s without padding after warm-up, peak GiB
allocated, the first step's loss, and the seconds of the pass over the reference.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from typing import Any

import datasets
import fire
import peft
import torch
import trl
from transformers import AutoTokenizer

from benchmarks.peers.step_times import StepTimes
from benchmarks.peers.trl_trainer import build
from benchmarks.runs import random_rows
from benchmarks.runs.measurements import WARMUP_STEPS
from utils.units import GIB


class TokenizedDPOTrainer(trl.DPOTrainer):
    """Takes pairs of token ids as they are, and measures the pass over the reference."""

    reference_seconds = 0.0

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

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
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [columns_of(row) for row in getattr(random_rows, dataset_function)(None, tokenizer, "train")]
    num_tokens = sum(2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows)
    times, pairs = StepTimes(), 2 * micro_batch
    with tempfile.TemporaryDirectory() as folder:
        trainer = TokenizedDPOTrainer(
            model=build(model, device, quantized=False),
            processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_list(rows),
            peft_config=peft.LoraConfig(
                r=16,
                lora_alpha=32,
                lora_dropout=0.0,
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                task_type="CAUSAL_LM",
            ),
            callbacks=[times],
            args=trl.DPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=pairs,
                max_length=length // 4,
                learning_rate=1e-4,
                precompute_ref_log_probs=True,
                gradient_checkpointing=activation_checkpointing,
                max_grad_norm=1.0,
                bf16=device.type == "cuda",
                use_cpu=device.type == "cpu",
                optim="adamw_torch_fused",
                report_to="none",
                save_strategy="no",
                logging_strategy="steps",
                logging_steps=steps + 1,
                logging_first_step=True,
                disable_tqdm=True,
            ),
        )
        trainer.train()
    figures = {
        "tokens_per_second": pairs * num_tokens / len(rows) / statistics.median(times.seconds[WARMUP_STEPS:]),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else math.nan,
        "first_loss": trainer.state.log_history[0]["loss"],
        "reference_seconds": trainer.reference_seconds,
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
