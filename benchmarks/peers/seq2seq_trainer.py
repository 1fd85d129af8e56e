"""Summarisation by transformers' own Seq2SeqTrainer; benchmarks/summarization.py compares finetuning.py with it.

    torchrun --nproc_per_node 2 -m benchmarks.peers.seq2seq_trainer MODEL_FOLDER ROWS.parquet --steps 20

Rank 0 prints one JSON object: median seconds of a step after warm-up, peak GiB allocated, and each step's loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile

import datasets
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from benchmarks.peers.step_times import StepTimes
from benchmarks.runs.measurements import WARMUP_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=16)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(options.model), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = datasets.load_dataset("parquet", data_files=options.rows, split="train")
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Seq2SeqTrainer(
            model=model,
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            callbacks=[times],
            args=Seq2SeqTrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.micro_batch,
                gradient_accumulation_steps=options.accumulation,
                learning_rate=5e-5,
                warmup_steps=500,
                weight_decay=0.01,
                max_grad_norm=1.0,
                bf16=torch.cuda.is_available(),
                optim="adamw_torch_fused",
                torch_compile=options.compile,
                ddp_find_unused_parameters=False,
                dataloader_num_workers=1,
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
        )
        trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        seconds = statistics.median(times.seconds[WARMUP_STEPS:])
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        print(json.dumps({"step_seconds": seconds, "peak_gib": peak, "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
