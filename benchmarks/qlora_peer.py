"""QLoRA by TRL's SFTTrainer with Liger's kernels; benchmarks/qlora.py compares finetuning.py with it.

    python -m benchmarks.qlora_peer MODEL_FOLDER --length 4096 --micro_batch 2 --steps 12

Needs trl and liger-kernel. Prints one JSON object with the peak GiB allocated and the median tokens/s after warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile

import datasets
import numpy as np
import peft
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from benchmarks.measurements import WARMUP_STEPS
from benchmarks.step_times import StepTimes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--micro_batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--activation_checkpointing", action="store_true")
    options = parser.parse_args()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(
        options.model, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": 0}
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = np.random.default_rng(0).integers(3, len(tokenizer), (options.micro_batch * options.steps, options.length))
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_dict({"input_ids": rows.tolist()}),
            peft_config=peft.LoraConfig(
                r=8, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
            ),
            callbacks=[times],
            args=trl.SFTConfig(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.micro_batch,
                max_length=options.length,
                gradient_checkpointing=options.activation_checkpointing,
                bf16=True,
                use_liger_kernel=True,
                optim="adamw_torch_fused",
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
            ),
        )
        trainer.train()
    adapters = {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}
    speed = options.micro_batch * options.length / statistics.median(times.seconds[WARMUP_STEPS:])
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"peak_gib": peak, "tokens_per_second": speed, "adapters": sorted(adapters)}), flush=True)


if __name__ == "__main__":
    main()
