"""Training by TRL's SFTTrainer; benchmarks compare finetuning.py with it.

    python -m benchmarks.peers.trl_trainer MODEL_FOLDER --method=lora --micro_batch=2 --length=4096 --steps=30
    torchrun --nproc_per_node 4 -m benchmarks.peers.trl_trainer MODEL_FOLDER ...        FSDP2 over four GPUs

Needs trl, and liger-kernel but for LIGER=0. TRL 1.16 computes the loss by its own fused head in chunks and refuses
Liger's, so Liger's kernels are those of the layers. Attention is flash-attn-4's if that is installed.
"""

from __future__ import annotations

import os
import tempfile

import datasets
import peft
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from transformers.utils import is_flash_attn_4_available

from benchmarks.peers.peer_work import COMPARED_LOSSES, LORA_ALPHA, PeerWork, parse_work, report, trainer_arguments
from benchmarks.peers.step_times import StepTimes


def build(work: PeerWork, device: torch.device) -> PreTrainedModel:
    """The model of the folder in bf16, or in 4 bits."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=work.double_quant,
    )
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        work.model,
        quantization_config=quantization if work.method == "qlora" else None,
        dtype=torch.bfloat16,
        device_map={"": device},
        attn_implementation="flash_attention_4" if device.type == "cuda" and is_flash_attn_4_available() else "sdpa",
    )
    return found


def adapter_of(work: PeerWork) -> peft.LoraConfig:
    """LoRA on the modules that are asked for, without dropout."""
    return peft.LoraConfig(
        r=work.rank, lora_alpha=LORA_ALPHA, target_modules=work.modules.split(","), task_type="CAUSAL_LM"
    )


def main() -> None:
    work, liger = parse_work(), os.environ.get("LIGER", "1") == "1"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    times, adapter = StepTimes(COMPARED_LOSSES), None
    if work.method != "full":
        adapter = adapter_of(work)
    model = build(work, device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_dict({"input_ids": work.rows(tokenizer)}),
            peft_config=adapter,
            callbacks=[times],
            args=trl.SFTConfig(
                **trainer_arguments(work, folder),
                max_length=work.length,
                packing=work.batching == "packed",
                use_liger_kernel=has_gpu and liger,
                activation_offloading=has_gpu and work.activation_offloading,  # it asks for an accelerator
                fsdp=world_size > 1,
            ),
        )
        lengths = [len(row) for row in trainer.train_dataset["input_ids"]]
        trainer.train()
    if trainer.is_world_process_zero():
        kernels = "Liger" if trainer.args.use_liger_kernel else "transformers' layers"
        report(
            times.seconds,
            work.tokens_of_steps(lengths),
            times.losses,
            f"{model.config._attn_implementation}, {kernels}, TRL's fused head",
            trained_dtypes=sorted({str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}),
        )


if __name__ == "__main__":
    main()
