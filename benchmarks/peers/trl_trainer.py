"""Training by TRL's SFTTrainer with Liger's kernels; benchmarks compare finetuning.py with it.

    python -m benchmarks.peers.trl_trainer MODEL_FOLDER --method lora --micro_batch 2 --length 4096 --steps 30
    torchrun --nproc_per_node 4 -m benchmarks.peers.trl_trainer MODEL_FOLDER ...        FSDP2 over four GPUs

Needs trl and liger-kernel. Weights are random, or for method qlora those of the folder. Rank 0 prints one JSON object:
median tokens/s per GPU after warm-up, peak GiB allocated, the first step's loss, and the dtypes of what is trained.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile

import datasets
import fire
import numpy as np
import peft
import torch
import trl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from benchmarks.peers.step_times import StepTimes
from benchmarks.runs.measurements import WARMUP_STEPS
from benchmarks.runs.random_rows import get_documents, get_rows
from utils.units import GIB


def build(folder: str, device: torch.device, *, quantized: bool) -> PreTrainedModel:
    """The model in bf16, or in 4 bits."""
    if quantized:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": device}
        )
        return found
    with device:
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    return made


def main(
    model: str,
    method: str = "full",
    micro_batch: int = 2,
    length: int = 4096,
    steps: int = 30,
    activation_checkpointing: bool = False,
    documents: bool = False,
) -> None:
    """Train for some steps.

    Args:
        model: folder with config.json and a tokenizer, and with weights for method qlora.
        method: full, lora or qlora.
        documents: rows are packed from documents as long as SAMSum's, instead of one document each.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = (get_documents if documents else get_rows)(None, tokenizer, "train")
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=build(model, device, quantized=method == "qlora"),
            processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in found]}),
            peft_config=None
            if method == "full"
            else peft.LoraConfig(
                r=8, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
            ),
            callbacks=[times],
            args=trl.SFTConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=micro_batch,
                max_length=length,
                packing=documents,
                gradient_checkpointing=activation_checkpointing,
                max_grad_norm=1.0,
                bf16=has_gpu,
                use_cpu=not has_gpu,
                use_liger_kernel=has_gpu,
                optim="adamw_torch_fused",
                fsdp=world_size > 1,
                report_to="none",
                save_strategy="no",
                logging_strategy="steps",
                logging_steps=steps + 1,
                logging_first_step=True,
                disable_tqdm=True,
            ),
        )
        fill = 1.0
        if documents:
            fill = float(np.mean([len(row) for row in trainer.train_dataset["input_ids"]])) / length
        trainer.train()
    if trainer.is_world_process_zero():
        seconds = statistics.median(times.seconds[WARMUP_STEPS:])
        figures = {
            "tokens_per_second": micro_batch * length * fill / seconds,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB if has_gpu else math.nan,
            "first_loss": trainer.state.log_history[0]["loss"],
            "trained_dtypes": sorted({str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
