"""Training by Unsloth; benchmarks compare finetuning.py with it.

    python -m benchmarks.peers.unsloth_trainer MODEL_FOLDER --method=qlora --micro_batch=2 --length=4096 --steps=30

Needs unsloth, unsloth_zoo, cut_cross_entropy and the trl that they pin (at most 1.15 for 2026.10.9); one GPU. Attention
is what Unsloth finds: FlashAttention 2, xformers or torch's. It recomputes activations only if asked to, which is not
its default, but the faster one where they fit.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", tempfile.mkdtemp())
import unsloth  # isort: skip  # before trl, transformers and peft, which it changes

import datasets
import torch
import trl
from transformers import BitsAndBytesConfig

from benchmarks.peers.peer_work import COMPARED_LOSSES, LORA_ALPHA, parse_work, report, trainer_arguments
from benchmarks.peers.step_times import StepTimes


def main() -> None:
    work = parse_work()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=work.double_quant,
    )
    checkpointing = "unsloth" if work.activation_checkpointing else False
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        work.model,
        max_seq_length=work.length,
        dtype=torch.bfloat16,
        load_in_4bit=work.method == "qlora",
        full_finetuning=work.method == "full",
        use_gradient_checkpointing=checkpointing,
        **({"quantization_config": quantization} if work.method == "qlora" else {}),
    )
    if work.method != "full":
        model = unsloth.FastLanguageModel.get_peft_model(
            model,
            r=work.rank,
            lora_alpha=LORA_ALPHA,
            target_modules=work.modules.split(","),
            use_gradient_checkpointing=checkpointing,
        )
    times = StepTimes(COMPARED_LOSSES)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_dict({"input_ids": work.rows(tokenizer)}),
            callbacks=[times],
            args=trl.SFTConfig(
                **trainer_arguments(work, folder), max_length=work.length, packing=work.batching == "packed"
            ),
        )
        lengths = [len(row) for row in trainer.train_dataset["input_ids"]]
        trainer.train()
    report(times.seconds, work.tokens_of_steps(lengths), times.losses, f"{attention()}, Unsloth's kernels")


def attention() -> str:
    """Which attention Unsloth found."""
    found = sys.modules.get("unsloth.models._utils")  # on a GPU only
    if getattr(found, "HAS_FLASH_ATTENTION", False):
        return "FlashAttention 2"
    return "xformers" if getattr(found, "xformers_version", None) else "sdpa"


if __name__ == "__main__":
    main()
