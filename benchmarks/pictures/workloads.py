"""Workloads of models of images and text, by name: a shape, its pictures, and how samples make up a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.pictures.chats import PictureChats

LORA = ["--use_peft", "--freeze_vision", "--lora_config.target_modules", "q_proj,k_proj,v_proj,o_proj"]
LORA += ["--lora_config.r", "16", "--lora_config.lora_alpha", "32", "--lora_config.lora_dropout", "0"]


class StepForm(NamedTuple):
    """How samples make up a step."""

    micro_batch: int  # rows; of a padded batch these are samples
    accumulation: int
    recomputes: bool = False  # TRL's gradient_checkpointing; finetuning.py chooses by itself


class PictureWorkload(NamedTuple):
    shape: str
    chats: PictureChats
    length: int  # of a packed row, tokens
    packed: StepForm
    padded: StepForm | None = None
    peers: tuple[StepForm, ...] = ()
    flags: Sequence[str] = LORA
    nproc: int = 1
    num_samples: int = 96  # drawn; they are read again where a run needs more


# About 290 tokens a sample, of which 256 are the picture's; about 2,400 a sample of the mix, 9,600 at most.
SMALL = PictureChats(sides=(448, 448), pictures=(1, 1), answer=(2, 8))
MIX = PictureChats(sides=(224, 1344), pictures=(1, 4), answer=(5, 300))
UNIFORM_FORMS: dict[str, Any] = {
    "length": 8192,
    "packed": StepForm(1, 1),
    "padded": StepForm(28, 1),
    "peers": (StepForm(28, 1),),
    "num_samples": 336,
}
MIX_FORMS: dict[str, Any] = {
    "length": 10240,
    "packed": StepForm(1, 1),
    "padded": StepForm(4, 1),
    "peers": (StepForm(1, 4), StepForm(4, 1, recomputes=True)),
    "num_samples": 64,
}
TINY_FORMS: dict[str, Any] = {
    "length": 256,
    "packed": StepForm(1, 2),
    "padded": StepForm(2, 2),
    "peers": (StepForm(1, 4), StepForm(2, 2, recomputes=True)),
    "num_samples": 24,
}
ALL_WEIGHTS = ["--pure_bf16"]
WORKLOADS = {
    "uniform": PictureWorkload("qwen2.5-vl-7b", SMALL, **UNIFORM_FORMS),
    "mix": PictureWorkload("qwen2.5-vl-7b", MIX, **MIX_FORMS),
    "uniform-half": PictureWorkload("qwen2.5-vl-7b-half-the-layers", SMALL, **UNIFORM_FORMS),
    "mix-half": PictureWorkload("qwen2.5-vl-7b-half-the-layers", MIX, **MIX_FORMS),
    # A row holds some 35 of these samples, so 12 steps read each once.
    "qwen3-vl-4b": PictureWorkload("qwen3-vl-4b", SMALL, 8192, StepForm(1, 1), flags=ALL_WEIGHTS, num_samples=448),
    "qwen3-vl-4b-2": PictureWorkload(
        *("qwen3-vl-4b", SMALL, 8192, StepForm(1, 1)),
        flags=[*ALL_WEIGHTS, "--enable_fsdp"],
        nproc=2,
        num_samples=896,
    ),
    "tiny": PictureWorkload("tiny", PictureChats((24, 64), (1, 3), (2, 20)), **TINY_FORMS),
}
