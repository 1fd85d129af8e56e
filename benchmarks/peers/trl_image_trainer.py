"""Conversations about pictures by TRL's SFTTrainer; benchmarks/image_speed.py compares finetuning.py with it.

    python -m benchmarks.peers.trl_image_trainer MODEL_FOLDER PICTURE_FOLDER --micro_batch 8 --steps 12

Needs trl; Liger's kernels and flash-attn-4 are used if they are installed. LoRA on the language model's attention,
random weights, and the picture folder of benchmarks/pictures/chats.py. TRL 1.16 neither packs samples with images
nor frees them of padding. Prints one JSON object: median tokens/s without padding after warm-up, the longest step after
it, peak GiB allocated, and the first step's loss.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import fire
import torch
import trl
from transformers import AutoConfig, AutoModelForImageTextToText, TrainerCallback

from benchmarks.peers.peer_work import ATTENTION, PeerWork
from benchmarks.peers.trl_trainer import adapter_of
from benchmarks.runs.measurements import WARMUP_STEPS
from data.processors.processor_loading import PLACE, read_processor
from utils.units import GIB


class StepEnds(TrainerCallback):
    """When each step ended, with all work on the GPU done: what lies between holds the wait for the next batch, too."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ended.append(time.perf_counter())


class CountingTrainer(trl.SFTTrainer):
    """Counts the tokens of each micro-batch, without padding."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.counted = [*getattr(self, "counted", []), inputs["attention_mask"].sum()]
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss


def read_rows(folder: Path) -> datasets.Dataset:
    """The conversations in TRL's form, with pictures that are decoded in the loader's workers."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    asked, answered = ([row["messages"][place] for row in rows] for place in (0, 1))
    columns = {
        "prompt": [[turn | {"content": turn["content"].replace(PLACE, "")}] for turn in asked],
        "completion": [[turn] for turn in answered],
        "images": [[str(folder / file) for file in row["images"]] for row in rows],
    }
    return datasets.Dataset.from_dict(columns).cast_column("images", datasets.List(datasets.Image()))


def attention_of(wanted: str) -> Any:
    """transformers' name of the fastest attention that is there; flash-attn-4 has no heads of the tower's size."""
    if wanted != "auto":
        return wanted
    has_kernel = torch.cuda.is_available() and find_spec("flash_attn") and find_spec("flash_attn.cute")
    return {"text_config": "flash_attention_4", "vision_config": "sdpa"} if has_kernel else "sdpa"


def build(folder: str, attention: str) -> Any:
    """The model in bf16 with random weights."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation=attention_of(attention)
        )


def main(
    model: str,
    pictures: str,
    micro_batch: int = 8,
    accumulation: int = 1,
    steps: int = 12,
    activation_checkpointing: bool = False,
    workers: int = 8,
    attention: str = "auto",
) -> None:
    """Train for some steps.

    Args:
        model: folder with config.json and a processor.
        pictures: folder with train.jsonl.
        workers: processes that decode pictures.
        attention: transformers' name of one.
    """
    has_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    ends = StepEnds()
    with tempfile.TemporaryDirectory() as folder:
        trainer = CountingTrainer(
            model=build(model, attention),
            processing_class=read_processor(model, "MODEL_FOLDER"),
            train_dataset=read_rows(Path(pictures)),
            peft_config=adapter_of(PeerWork(model, rank=16, modules=ATTENTION)),
            callbacks=[ends],
            args=trl.SFTConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                max_length=None,
                learning_rate=1e-4,
                gradient_checkpointing=activation_checkpointing,
                max_grad_norm=1.0,
                bf16=has_gpu,
                use_cpu=not has_gpu,
                use_liger_kernel=has_gpu and find_spec("liger_kernel") is not None,
                optim="adamw_torch_fused",
                dataloader_num_workers=workers,
                dataloader_prefetch_factor=2 if workers else None,
                report_to="none",
                save_strategy="no",
                logging_strategy="steps",
                logging_steps=steps + 1,
                logging_first_step=True,
                disable_tqdm=True,
            ),
        )
        trainer.train()
    tokens = torch.stack(trainer.counted).view(steps, accumulation).sum(1).tolist()
    seconds = [end - began for began, end in zip(ends.ended, ends.ended[1:], strict=False)]  # of all but the first
    rates = [number / taken for number, taken in zip(tokens[1:], seconds, strict=True)]
    warm = WARMUP_STEPS - 1
    figures = {
        "tokens_per_second": statistics.median(rates[warm:]),
        "longest_step_seconds": max(seconds[warm:]),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if has_gpu else math.nan,
        "first_loss": trainer.state.log_history[0]["loss"],
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
