"""The rows of benchmarks/gpu_matrix.py: every pair of settings that a user may combine, on one and on two devices.

A row trains on the shipped dialogues. Each row has the same global batches as its reference, the plain run on one
device, so their losses can be compared step by step.

Rows on a quantized base train a model whose weights were packed and unpacked before. So packing changes nothing, in any
precision, and their reference is LoRA on that model as it is. (Other weights are rounded to the dtype of computation
before they are packed, as transformers does it. By that 0.1 to 1 % of them get the neighbouring code.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.matrix.pairwise import covering, groups_of
from benchmarks.runs.launch import ROOT
from configs.flags import parse_flags
from utils.errors import ConfigError

SAMPLES = ROOT / "datasets/samples/dialogue_summary"
GLOBAL_BATCH, NUM_STEPS, RESUMED_AFTER = 4, 6, 3  # rows, optimizer steps
NUM_DRAWN = 300  # cases to choose from: each pair of values is in a dozen of them

_LORA = "--use_peft --lora_dropout 0 --lr 2e-3"
_FSDP = "--enable_fsdp --sharding_strategy"
AXES: dict[str, dict[str, str]] = {
    "layout": {
        "one": "",
        "FULL_SHARD": f"{_FSDP} FULL_SHARD",
        "SHARD_GRAD_OP": f"{_FSDP} SHARD_GRAD_OP",
        "HYBRID_SHARD": f"{_FSDP} HYBRID_SHARD --sharding_group_size 1",
        "NO_SHARD": f"{_FSDP} NO_SHARD",
    },
    "trained": {
        "full": "--lr 2e-5",  # at ten times that the loss rises on GPUs, and small differences grow
        "LoRA": _LORA,
        "DoRA": f"{_LORA} --use_dora",
        "nf4": f"{_LORA} --quantization 4bit --use_double_quant",
        "int8": f"{_LORA} --quantization 8bit",
    },
    "rows": {
        "packed": "--batching_strategy packing",
        "padded": "--batching_strategy padding",
        "streamed": "--samsum_dataset.streaming",
    },
    "precision": {
        "fp32": "--mixed_precision False",
        "bf16-mixed": "--mixed_precision True",
        "bf16-true": "--pure_bf16",
        "fp16": "--use_fp16 True",
    },
    "optimizer": {
        "AdamW": "",
        "8-bit": "--optimizer AdamW8bit",
        "anyprecision": "--optimizer anyprecision",
        "offload": "--optimizer_cpu_offload",
    },
    "checkpointing": {mode: f"--activation_checkpointing {mode}" for mode in ("off", "full", "selective")},
    "compiled": {"no": "--compile False", "yes": "--compile"},
    "accumulation": {"1": "1", "2": "2"},
    "clipping": {"no": "", "yes": "--gradient_clipping --gradient_clipping_threshold 0.3"},
    "evaluation": {"no": "--run_validation False", "yes": "--max_eval_step 4"},
    "resumed": {"no": "", "yes": ""},
}
"""The flags for each value of each axis. The first value is the plain one."""

ALWAYS = (
    # It crashed on torch 2.11, on two GPUs, in its first step.
    {"layout": "FULL_SHARD", "trained": "nf4", "precision": "bf16-mixed", "compiled": "yes", "accumulation": "2"},
    # Nothing but the base differs from the reference.
    {"trained": "nf4", "evaluation": "yes"},
    {"trained": "int8", "evaluation": "yes"},
)

PACKED = ("nf4", "int8")
"""What `trained` is in rows on a quantized base."""

APART = {
    "fp32": 2e-5,  # the bound of tests/distributed/test_exactness.py
    "bf16-mixed": 0.005,
    "bf16-true": 0.01,
    "fp16": 0.002,
    "8-bit": 0.005,
    "anyprecision": 0.005,
    "nf4": 5e-4,  # double quantization: the scales are packed, too, and packing them again changes them by 1e-4
}
"""How far the losses of a right row may be from its reference's, as a share of them, for each value that rounds."""


def model_name(packing: str) -> str:
    """The name of the folder of the model whose weights have been through one of PACKED, or through none ("")."""
    return f"model-{packing}" if packing else "model"


@dataclass(frozen=True)
class MatrixRow:
    """The value of each axis, in the order of AXES.

    Attributes:
        unpacked_from: for the reference of rows on a quantized base: the one of PACKED that its weights are held in
            there; else "".
    """

    values: tuple[str, ...]
    unpacked_from: str = ""

    def __getitem__(self, axis: str) -> str:
        return self.values[list(AXES).index(axis)]

    @property
    def name(self) -> str:
        return " ".join(self.values) + (f" on weights of {self.unpacked_from}" if self.unpacked_from else "")

    @property
    def packing(self) -> str:
        """The one of PACKED that its model's weights have been through, or ""."""
        return self["trained"] if self["trained"] in PACKED else self.unpacked_from

    @property
    def model(self) -> str:
        """The name of its model's folder."""
        return model_name(self.packing)

    @property
    def num_ranks(self) -> int:
        return 1 if self["layout"] == "one" else 2

    @property
    def reference(self) -> MatrixRow:
        """The plain run of the same data and weights: fp32 on one device, evaluated.

        It is in bf16 where all weights are trained in bf16: they lose small updates, and so learn less.
        """
        kept = {axis: self[axis] for axis in ("trained", "rows", "clipping")}
        if (self["trained"], self["precision"]) == ("full", "bf16-true"):
            kept["precision"] = "bf16-true"
        if self.packing:
            kept["trained"] = "LoRA"
        return replace(row_of({"evaluation": "yes", **kept}), unpacked_from=self.packing)

    @property
    def bound(self) -> float:
        """How far its losses may be from its reference's, as a share of them: what each of its values adds."""
        return sum(APART.get(value, 0.0) for value in self.values)

    def flags(self, model: Path, output: Path, length: int) -> list[str]:
        """Its command line, without the program's name."""
        accumulation = int(self["accumulation"])
        flags = ["--model_name", str(model), "--output_dir", str(output), "--samsum_dataset.data_path", str(SAMPLES)]
        flags += ["--context_length", str(length), "--num_workers_dataloader", "0", "--show_sample", "False"]
        flags += ["--max_train_step", str(NUM_STEPS), "--save_model", "False", "--save_every_minutes", "0"]
        flags += ["--batch_size_training", str(GLOBAL_BATCH // (accumulation * self.num_ranks))]
        flags += ["--gradient_accumulation_steps", str(accumulation)]
        flags += ["--save_every_steps", str(RESUMED_AFTER if self["resumed"] == "yes" else 0)]
        for axis, values in AXES.items():
            flags += values[self[axis]].split() if axis != "accumulation" else []
        return flags


def row_of(values: dict[str, str]) -> MatrixRow:
    """A row with these values, and the plain ones of all other axes."""
    return MatrixRow(tuple(values.get(axis, next(iter(choices))) for axis, choices in AXES.items()))


def is_allowed(row: MatrixRow) -> bool:
    """Whether its flags alone hold; what depends on the machine is found by running it."""
    try:
        parse_flags(row.flags(Path("M"), Path("O"), 512))
    except ConfigError:
        return False
    return True


def matrix(*, compiles_slowly: bool = False) -> list[MatrixRow]:
    """The rows, the same ones every time: every pair of values occurs in a row on one device and in two on two devices.

    A pair that no command line may have stands in a row that is plain otherwise, and has to be refused.

    Args:
        compiles_slowly: let as few rows compile as hold every value of the other axes, on one device; and ALWAYS.
    """
    rows = [row_of(values) for values in ALWAYS]
    one, *two = AXES["layout"]
    for seed, layouts in enumerate(([one], two, two)):
        choices = [layouts, *(list(values) for values in list(AXES.values())[1:])]
        draw = random.Random(seed)
        drawn = [MatrixRow(tuple(map(draw.choice, choices))) for _ in range(NUM_DRAWN)]
        allowed = [row for row in drawn if is_allowed(row)]
        if compiles_slowly:
            rows += _covering([row for row in allowed if row["compiled"] == "no"], 2)
            rows += _covering([row for row in allowed if row["compiled"] == "yes" and row.num_ranks == 1], 1)
        else:
            rows += _covering(allowed, 2)
        rows += [_with_pair(pair, layouts[0]) for pair in sorted(_pairs(drawn) - _pairs(allowed))]
    return list(dict.fromkeys(rows))


def _covering(rows: Sequence[MatrixRow], size: int) -> list[MatrixRow]:
    return [rows[place] for place in covering([row.values for row in rows], size)]


def _pairs(rows: Sequence[MatrixRow]) -> set[Any]:
    return set().union(*(groups_of(row.values, 2) for row in rows))


def _with_pair(pair: Sequence[tuple[int, str]], layout: str) -> MatrixRow:
    axes = list(AXES)
    return row_of({"layout": layout} | {axes[place]: value for place, value in pair})
