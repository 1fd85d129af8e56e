"""What plans say of times and bills, next to measured and documented ones: the tables of docs/planning.md.

python -m benchmarks.planned_times            (reads shapes only; a minute on two cores)

Nothing is fitted to a row of other tools. Their runs are described by general settings alone: llama-recipes reduces
gradients in fp16 after every micro-batch; the BART scripts train in fp32, pad to 1,024 and 128 tokens, reduce fp32
gradients after every micro-batch, and on several machines average them after computing, so that nothing is hidden.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, BartConfig

from benchmarks.runs.random_rows import samsum_like_lengths
from benchmarks.runs.shapes import SHAPES, TODAY
from benchmarks.training_speed import ROWS
from configs.flags import parse_flags
from data.batches.counts import BatchCounts
from planning.cost.step_time import HIDDEN_SHARE
from planning.cost.step_work import micro_batch_work
from planning.cost.time_plan import TimePlan, plan_time
from planning.cost.traffic import find_traffic
from planning.machines.hardware import Hardware, parse_hardware
from planning.machines.planned_environment import planned_environment
from planning.model.planned_model import PlannedModel, build_planned_model
from resolving.resolved import resolve

# Tokens per second and GPU of rows of benchmarks/training_speed.py on H200s of one machine, from docs/performance.md.
MEASURED = {
    "tinyllama-full-compiled": 74_000,
    "tinyllama-full": 52_700,
    "llama8b-full": 11_560,
    "llama8b-full-ac": 9_740,
    "llama8b-full-batch8": 12_070,
    "llama8b-lora": 16_070,
    "llama8b-qlora": 15_960,
    "llama8b-qlora-ac": 11_920,
    "llama8b-full-4-full_shard": 10_400,
    "llama8b-full-4-full_shard-ac": 8_730,
    "llama8b-full-4-shard_grad_op": 10_410,
    "llama8b-full-4-hybrid_shard": 9_790,
    "llama8b-full-4-no_shard": 10_450,
    "llama8b-lora-4": 13_780,
    "llama8b-mixed-4": 10_320,
    "llama70b-4": 1_200,
    "llama13b-sgd": 3_410,
    "llama8b-mixed-batch8": 6_160,
    "llama13b-adamw-offload": 196,
}
# The same on H100s. Activations are kept, as `--activation_checkpointing auto` chose there.
MEASURED_ON_H100S = {"qwen3-moe-lora": 56_610, "qwen3-moe-lora-2-gathered": 37_370}

# Llama-2 7B (Meta, 2023), from its published config.json
_LLAMA_2_7B = SHAPES["llama13b"] | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


@dataclass(frozen=True)
class Documented:
    """A run that others wrote down."""

    plan: TimePlan
    seconds_per_epoch: float
    bill: float | None = None

    @property
    def epoch_error(self) -> float:
        assert self.plan.seconds_per_epoch is not None
        return self.plan.seconds_per_epoch / self.seconds_per_epoch - 1

    @property
    def bill_error(self) -> float:
        assert self.plan.price is not None
        assert self.bill is not None
        return self.plan.price / self.bill - 1


def measured_row(name: str, folder: Path) -> TimePlan:
    """The plan of a row of benchmarks/training_speed.py on the cards that it was measured on."""
    row = ROWS[name]
    hardware = parse_hardware(f"{row.nproc}x{'H100-80GB' if name in MEASURED_ON_H100S else 'H200'}")
    flags = [*row.flags, "--context_length", str(row.length), "--batch_size_training", str(row.micro_batch)]
    flags += ["--gradient_accumulation_steps", str(row.accumulation)]
    flags += ["--activation_checkpointing", "off"] if name in MEASURED_ON_H100S else []
    planned = plan_model(folder, (SHAPES | TODAY)[row.shape], hardware, flags)
    plan = plan_time(planned, hardware, causal_counts(row.micro_batch, row.length))
    assert plan is not None
    return plan


def llama_recipes(shape: str, hardware: Hardware, seconds_per_epoch: float, folder: Path) -> Documented:
    """One per cent of SAMSum under FSDP in fp16 with SGD, one row per rank, four micro-batches: rows A14, A19 and A20.

    Rows that do not fill a micro-batch of all ranks are left out, and an epoch's time is training's alone, as there.
    """
    model = _LLAMA_2_7B if shape == "llama7b" else SHAPES[shape]
    flags = "--enable_fsdp --use_fp16 --optimizer SGD --momentum 0.9 --batch_size_training 1 --num_epochs 1"
    flags += " --gradient_accumulation_steps 4 --batching_strategy padding --accumulate_unsharded False"
    planned = plan_model(folder, model, hardware, [*flags.split(), "--run_validation", "False", "--compile", "False"])
    traffic = find_traffic(planned)
    mean, longest = samsum_lengths(hardware.world_size)
    plan = plan_time(
        planned,
        hardware,
        causal_counts(1, mean),
        work=micro_batch_work(planned, causal_counts(1, longest)),
        num_rows=147 // hardware.world_size * hardware.world_size,
        traffic=replace(traffic, gradient_bytes=traffic.gradient_bytes // 2),
    )
    assert plan is not None
    return Documented(plan, seconds_per_epoch)


def bart(
    hardware: Hardware, seconds_per_epoch: float, bill: float | None, folder: Path, accumulation: int = 16
) -> Documented:
    """bart-large-cnn on SAMSum; if there is a bill, with ROUGE by beam search at the end of an epoch: section E."""
    flags = f"--mixed_precision False --batch_size_training 1 --gradient_accumulation_steps {accumulation}"
    flags += " --num_epochs 1 --compile False"
    if bill is not None:
        flags += " --eval_generate --num_beams 2 --max_new_tokens 128 --eval_every_steps 500"
    planned = plan_model(folder, None, hardware, flags.split())
    source, target = 1024, 128
    counts = BatchCounts(
        num_label_tokens=target,
        num_tokens=source + target,
        num_attended_pairs=source**2,
        num_decoder_tokens=target,
        num_decoder_pairs=target * (target + 1) // 2,
        num_cross_pairs=source * target,
    )
    plan = plan_time(
        planned,
        hardware,
        counts,
        num_rows=14_732,
        eval_work=micro_batch_work(planned, counts, trains=False),
        num_eval_rows=0 if bill is None else 818,
        traffic=replace(find_traffic(planned), reduces_once=False),
        hidden_share=HIDDEN_SHARE if hardware.nodes == 1 else 0.0,
    )
    assert plan is not None
    return Documented(plan, seconds_per_epoch, bill)


def documented_rows(folder: Path) -> dict[str, Documented]:
    """The rows with a time or a bill.

    The network of E3 and E4 is Amazon's 10 Gb/s for one flow in a placement group (EC2 user guide, "Amazon EC2 instance
    network bandwidth"). That is all that a p3.2xlarge has.
    """
    v100 = parse_hardware("2xV100-32GB", nodes=2, network_gbps=6)
    six = parse_hardware("3xV100-32GB", nodes=2, network_gbps=6)
    apart: dict[str, Any] = {"nodes": 4, "network_gbps": 10}
    return {
        "A14": llama_recipes("llama7b", parse_hardware("4xV100-32GB"), 27, folder),
        "A19": llama_recipes("llama7b", v100, 1487, folder),
        "A20": llama_recipes("llama13b", six, 2119, folder),
        "E1": bart(parse_hardware("4xV100-16GB", price_per_hour=13), 1500, 5.5, folder),
        "E2, 4 processes": bart(parse_hardware("4xV100-16GB"), 955, None, folder, accumulation=1),
        "E2, 2 processes": bart(parse_hardware("2xV100-16GB"), 1675, None, folder, accumulation=1),
        "E3": bart(parse_hardware("V100-16GB", price_per_hour=3, **apart), 9000, 30, folder),
        "E4": bart(parse_hardware("T4", price_per_hour=0.5, **apart), 14_400, 8, folder),
    }


def plan_model(folder: Path, shape: dict[str, Any] | None, hardware: Hardware, flags: list[str]) -> PlannedModel:
    """The model of a plan, from a config.json that is written into `folder`: a Llama's, if the shape
    names no other family; None: bart-large-cnn's."""
    bart_large: dict[str, Any] = {
        "architectures": ["BartForConditionalGeneration"]
    }  # transformers' defaults are its shape
    llama: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 8192,
    }
    config = BartConfig(**bart_large) if shape is None else AutoConfig.for_model(**llama | shape)
    config.save_pretrained(folder)
    parsed = parse_flags(["--model_name", str(folder), "--random_weights", *flags])
    env = planned_environment(hardware, parsed.train_config)
    return build_planned_model(resolve(parsed, env), env)


def causal_counts(rows: int, length: int) -> BatchCounts:
    """Of rows of one sequence, all tokens labels."""
    return BatchCounts(rows * length, rows * length, rows * length * (length + 1) // 2)


def samsum_lengths(num_ranks: int) -> tuple[int, int]:
    """Tokens of a row on average, and of the longest of one row on each rank."""
    lengths = samsum_like_lengths(np.random.default_rng(0), 1000 * num_ranks, longest=4096)
    return int(lengths.mean()), int(lengths.reshape(-1, num_ranks).max(axis=1).mean())


def main() -> None:
    with tempfile.TemporaryDirectory() as created:
        print(measured_table(Path(created)), documented_table(Path(created)), sep="\n\n")


def measured_table(folder: Path) -> str:
    lines = [
        "| run on H200s (the last two: H100s) | tokens/s per GPU | planned | difference | most of a step |",
        "|---|---|---|---|---|",
    ]
    for name, measured in (MEASURED | MEASURED_ON_H100S).items():
        plan = measured_row(name, folder)
        planned = plan.tokens_per_second_per_device
        cells = f"`{name}` | {measured:,} | {planned:,.0f} | {planned / measured - 1:+.0%} | {plan.waits_for}"
        lines.append(f"| {cells} |".replace(",", " "))
    return "\n".join(lines)


def documented_table(folder: Path) -> str:
    lines = ["| row | epoch | planned | difference | bill | planned | difference |", "|---|---|---|---|---|---|---|"]
    for name, row in documented_rows(folder).items():
        bill = " | | " if row.bill is None else f"{row.bill:.2f} | {row.plan.price:.2f} | {row.bill_error:+.0%}"
        epoch = f"{row.seconds_per_epoch:.0f} s | {row.plan.seconds_per_epoch:.0f} s | {row.epoch_error:+.0%}"
        lines.append(f"| {name} | {epoch} | {bill} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
