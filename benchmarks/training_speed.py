"""Speed and memory of real runs of finetuning.py with random weights of a named shape, as a table.

    python -m benchmarks.training_speed --rows tinyllama-full tinyllama-lora
    python -m benchmarks.training_speed --rows layouts

Each row is one command, which is printed before it runs. Tokens/s is the median over the steps after warm-up. Held
memory is that of one rank after backward. Rows for one GPU run side by side, one on each GPU. Rows of the same global
batch see the same tokens at each step, so their losses are compared with those of the first such row. With --output_dir
the run folders are kept, and rows that finished there are read instead of run again, so a table can be made in several
calls.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs.launch import LIMITER, UNCOMPILED, launch
from benchmarks.runs.long_workloads import LONG_ROWS
from benchmarks.runs.measurements import WARMUP_STEPS, read_events
from benchmarks.runs.shapes import make_shape
from benchmarks.runs.workload import LORA, ON_ALL, R8, R16, Workload

COMPILED, FSDP = ["--pure_bf16", "--compile"], ["--enable_fsdp", "--compile"]
STRATEGIES = {
    "full_shard": [],
    "shard_grad_op": ["--sharding_strategy", "SHARD_GRAD_OP"],
    "hybrid_shard": ["--hsdp", "--sharding_group_size", "2"],
    "no_shard": ["--sharding_strategy", "NO_SHARD"],
}
CHECKPOINTING = {"": ["--activation_checkpointing", "off"], "-ac": ["--activation_checkpointing", "full"]}
ROWS = {
    "tiny-full": Workload("tiny", 2, 128, [*UNCOMPILED]),
    "tiny-lora": Workload("tiny", 2, 128, [*LORA, *UNCOMPILED]),
    "tiny-4": Workload("tiny", 2, 128, FSDP, nproc=4),
    "tiny-shared": Workload("tiny", 2, 128, [*UNCOMPILED], nproc=2, num_sharing=2),
    "tinyllama-full": Workload("tinyllama", 8, 2048, ["--pure_bf16", *UNCOMPILED]),
    "tinyllama-full-compiled": Workload("tinyllama", 8, 2048, COMPILED),
    "tinyllama-mixed": Workload("tinyllama", 8, 2048, [*UNCOMPILED]),
    "tinyllama-lora": Workload("tinyllama", 8, 2048, [*LORA, *UNCOMPILED]),
    "tinyllama-lora-compiled": Workload("tinyllama", 8, 2048, [*LORA, "--compile"]),
    "llama70b-4": Workload("llama70b-60layers", 1, 4096, [*FSDP, "--pure_bf16", "--low_cpu_fsdp"], nproc=4),
    "llama70b-8": Workload("llama70b", 1, 4096, [*FSDP, "--pure_bf16", "--low_cpu_fsdp"], nproc=8),
}
# Sequences as long as SAMSum's, packed; and with the dense attention mask that other tools use.
ROWS["tiny-packed"] = Workload("tiny", 2, 128, [*UNCOMPILED], dataset_function="get_documents")
ROWS["tinyllama-packed"] = Workload("tinyllama", 8, 2048, COMPILED, dataset_function="get_documents")
ROWS["tinyllama-packed-dense"] = replace(ROWS["tinyllama-packed"], flags=[*COMPILED, "--use_fast_kernels", "False"])
for ac, flags in CHECKPOINTING.items():
    ROWS[f"llama8b-full{ac}"] = Workload("llama8b", 2, 4096, [*COMPILED, *flags])
    ROWS[f"llama8b-full-1row{ac}"] = replace(ROWS[f"llama8b-full{ac}"], micro_batch=1)
    ROWS[f"llama8b-lora{ac}"] = Workload("llama8b", 2, 4096, [*LORA, "--compile", *flags])
    for strategy, more in STRATEGIES.items():
        ROWS[f"llama8b-full-4-{strategy}{ac}"] = Workload(
            "llama8b", 2, 4096, [*FSDP, *more, "--pure_bf16", *flags], nproc=4
        )
    ROWS[f"llama8b-lora-4{ac}"] = Workload("llama8b", 2, 4096, [*FSDP, *LORA, *flags], nproc=4)
    ROWS[f"llama8b-mixed-4{ac}"] = Workload("llama8b", 2, 4096, [*FSDP, *flags], nproc=4)
# QLoRA; the whole 70B shape, on one GPU and over several.
QLORA = [*LORA, "--quantization", "4bit"]
for ac, flags in CHECKPOINTING.items():
    ROWS[f"llama8b-qlora{ac}"] = Workload("llama8b", 2, 4096, [*QLORA, "--compile", *flags])
SHARDED_QLORA = [*QLORA, *FSDP, "--use_double_quant"]
ROWS["llama8b-qlora-double"] = Workload("llama8b", 2, 4096, [*QLORA, "--compile", "--use_double_quant"])
for nproc in (2, 4):
    ROWS[f"llama8b-qlora-double-{nproc}"] = Workload("llama8b", 2, 4096, SHARDED_QLORA, nproc=nproc)
    ROWS[f"llama70b-qlora-{nproc}"] = Workload("llama70b", 1, 4096, SHARDED_QLORA, nproc=nproc)
ROWS["llama70b-qlora"] = Workload("llama70b", 1, 4096, [*QLORA, "--use_double_quant", *UNCOMPILED])
# The 13B shape on a GPU of 80 GB (74.5 GiB), which has no room for AdamW's states.
for name, flags in {
    "adamw": [],
    "sgd": ["--optimizer", "SGD", "--momentum", "0"],
    "adamw-offload": ["--optimizer_cpu_offload"],
}.items():
    ROWS[f"llama13b-{name}"] = Workload("llama13b", 1, 512, ["--pure_bf16", *UNCOMPILED, *flags], gpu_memory_gib=74.5)
ROWS["llama13b-adamw-offload-8rows"] = replace(ROWS["llama13b-adamw-offload"], micro_batch=8)
# The same global batch on one GPU, for comparison with the losses over four GPUs.
ROWS["llama8b-full-batch8"] = Workload("llama8b", 2, 4096, COMPILED, accumulation=4)
ROWS["llama8b-lora-batch8"] = Workload("llama8b", 2, 4096, [*LORA, "--compile"], accumulation=4)
# fp32 weights, gradients and moments of 8B parameters are 120 GiB: one GPU needs its moments in host memory.
OFFLOADED = ["--optimizer_cpu_offload", "--activation_checkpointing", "full"]
ROWS["llama8b-mixed-batch8"] = Workload("llama8b", 2, 4096, ["--compile", *OFFLOADED], accumulation=4)
# The models of today, by default flags but for the adapter: whether they pack and fit is the run's own choice.
ON_ATTENTION = [*LORA, "--lora_config.target_modules", "q_proj,k_proj,v_proj,o_proj", "--lora_config.r", "16"]
ON_ALL_IN_4_BITS = [*ON_ALL, "--quantization", "4bit", "--use_double_quant"]
MOE, DOCUMENTS = "qwen3-30b-a3b-16layers", "get_documents"
TODAY = {
    "qwen3-8b-lora": Workload("qwen3-8b", 2, 4096, ON_ATTENTION),
    "gemma3-lora": Workload("gemma3-4b", 2, 4096, ON_ATTENTION, dataset_function=DOCUMENTS),
    "qwen3-moe-lora": Workload(MOE, 2, 4096, ON_ATTENTION),
    "qwen3-moe-lora-experts": Workload(MOE, 2, 4096, [*ON_ALL, *R16]),
    "qwen3-moe-qlora-experts": Workload(MOE, 2, 4096, [*ON_ALL_IN_4_BITS, *R16]),
    "qwen3.5-lora": Workload("qwen3.5-4b", 4, 4096, [*ON_ALL, *R16], dataset_function=DOCUMENTS),
    "qwen3-30b-qlora": Workload("qwen3-30b-a3b", 1, 4096, [*ON_ALL_IN_4_BITS, *R8]),
    "gpt-oss-20b-qlora": Workload("gpt-oss-20b", 1, 4096, [*ON_ALL_IN_4_BITS, *R8]),
}
ROWS |= TODAY
# Preferences: pairs of texts of 1,024 tokens, two in a row; and of many lengths up to that.
DPO = ["--loss_type", "dpo", "--lora_config.lora_dropout", "0", "--activation_checkpointing", "full"]
for name, function in (("", "get_pairs"), ("-uneven", "get_uneven_pairs")):
    ROWS[f"qwen3-8b-dpo-lora{name}"] = Workload("qwen3-8b", 2, 4096, [*ON_ATTENTION, *DPO], dataset_function=function)
    ROWS[f"qwen3-8b-dpo-lora{name}-off"] = replace(
        ROWS[f"qwen3-8b-dpo-lora{name}"], flags=[*ON_ATTENTION, *DPO[:-1], "off"]
    )
ROWS["tiny-dpo-lora"] = Workload("tiny", 2, 256, [*LORA, *DPO], dataset_function="get_uneven_pairs")
ROWS["gpt-oss-20b-qlora-attention"] = Workload(
    "gpt-oss-20b", 1, 4096, [*ON_ATTENTION[:-2], *R8, "--quantization", "4bit", "--use_double_quant"]
)
# Beside other tools: adapters on every linear layer, and documents packed or padded.
OFF = ["--compile", "--activation_checkpointing", "off"]
ROWS["llama8b-lora-all"] = Workload("llama8b", 2, 4096, [*ON_ALL, *R16, *OFF])
ROWS["llama8b-qlora-all"] = Workload("llama8b", 2, 4096, [*ON_ALL_IN_4_BITS, *R16, *OFF])
ROWS["llama8b-lora-all-packed"] = replace(ROWS["llama8b-lora-all"], dataset_function=DOCUMENTS)
ROWS["llama8b-lora-all-padded"] = replace(
    ROWS["llama8b-lora-all-packed"],
    micro_batch=16,
    length=2048,
    flags=[*ON_ALL, *R16, *OFF, "--batching_strategy", "padding"],
)
TINY_ALL = [*ON_ALL, *R16, *UNCOMPILED]
ROWS["tiny-lora-all"] = Workload("tiny", 2, 128, TINY_ALL)
ROWS["tiny-padded"] = Workload(
    "tiny", 4, 128, [*TINY_ALL, "--batching_strategy", "padding"], dataset_function=DOCUMENTS
)
# Over two GPUs, packed and without; the short step shows communication best.
for name, micro_batch in (("llama8b-full-2", 2), ("llama8b-full-2-1row", 1)):
    for kind, flags in (("", []), ("-direct", ["--direct_collectives"])):
        ROWS[f"{name}{kind}"] = Workload(
            "llama8b", micro_batch, 4096, ["--enable_fsdp", "--pure_bf16", *flags], nproc=2
        )
for name, flags in (("", []), ("-gathered", ["--num_replicated_layers", "0"])):
    ROWS[f"qwen3-moe-lora-2{name}"] = Workload(MOE, 2, 4096, [*ON_ATTENTION, "--enable_fsdp", *flags], nproc=2)
# Attention with sinks: packed documents, rows of one document each, and transformers' own attention in padded rows.
EAGER = ["--use_fast_kernels", "False", "--batching_strategy", "padding"]
for name, flags, documents in (("", [], "get_rows"), ("-packed", [], "get_documents"), ("-eager", EAGER, "get_rows")):
    ROWS[f"gpt-oss-lora{name}"] = Workload(
        "gpt-oss-20b-12layers", 2, 4096, [*ON_ATTENTION, *flags], dataset_function=documents
    )
# Padded rows that windows cut: by the kernel, and with transformers' dense masks.
for name, flags in (("", ["--batching_strategy", "padding"]), ("-masks", EAGER)):
    ROWS[f"windows-padded{name}"] = Workload("tinyllama-windows", 2, 4096, [*COMPILED, *flags])
# A small model and padded rows: the host cannot start kernels as fast as the GPU computes them.
for micro_batch in (4, 16, 32):
    ROWS[f"qwen2.5-0.5b-padded-{micro_batch}rows"] = Workload(
        "qwen2.5-0.5b", micro_batch, 1024, ["--batching_strategy", "padding"], dataset_function=DOCUMENTS
    )
ROWS |= LONG_ROWS
SUITES = {
    "shared-rows": [f"llama8b-shared-{length}-{n}" for length in (65536, 131072) for n in (1, 2)],
    "long": [
        name
        for name in LONG_ROWS
        if name.startswith("llama8b-long-") and not name.endswith(("-full-on-host", "-shared-2"))
    ],
    "offloading": [f"llama8b-long-{length}{kept}" for length in (32768, 65536) for kept in ("", "-offloaded")],
    "windows": ["windows-padded", "windows-padded-masks"],
    "sinks": ["gpt-oss-lora-packed", "gpt-oss-lora", "gpt-oss-lora-eager"],
    "preferences": [f"qwen3-8b-dpo-lora{lengths}{kept}" for lengths in ("", "-uneven") for kept in ("", "-off")],
    "today": [*TODAY, "gpt-oss-lora-packed"],
    "packed": ["tinyllama-packed", "tinyllama-packed-dense", "tinyllama-full-compiled"],
    "small": [name for name in ROWS if name.startswith("qwen2.5-0.5b")],
    "13b": [name for name in ROWS if name.startswith("llama13b")],
    "layouts": ["tinyllama-full-compiled", *(name for name in ROWS if name.startswith("llama8b"))],
}
# Float8 next to bf16. Over four GPUs weights are gathered in float8: llama8b-full-4-full_shard-tensorwise.
for name, recipe in product(
    ("tinyllama-full-compiled", "llama8b-full", "llama8b-full-batch8", "llama8b-lora", "llama8b-full-4-full_shard"),
    ("tensorwise", "rowwise"),
):
    ROWS[f"{name}-{recipe}"] = replace(ROWS[name], flags=[*ROWS[name].flags, "--float8", recipe])
SUITES["float8"] = [
    *("tinyllama-full-compiled", "tinyllama-full-compiled-tensorwise", "tinyllama-full-compiled-rowwise"),
    *("llama8b-full", "llama8b-full-tensorwise", "llama8b-full-rowwise"),
    *("llama8b-lora", "llama8b-lora-tensorwise", "llama8b-lora-rowwise"),
]


def run(
    name: str,
    row: Workload,
    steps: int,
    extra: list[str],
    folder: Path,
    gpu: int | None,
    limit_seconds: float | None = None,
) -> list[dict[str, Any]]:
    """The events of one run, or of an earlier one that finished in `folder`; empty if it failed, which is printed.

    Args:
        gpu: the GPU to run on; None leaves all of them visible.

    Raises:
        subprocess.TimeoutExpired: if it took longer than `limit_seconds`.
    """
    model, output = folder / row.shape, folder / f"run-{name}"
    before = read_events(output)
    if before and before[-1].get("status") == "finished":
        return before
    flags = row.words(model, output, steps, extra)
    by_torchrun = row.nproc > 1 or "--enable_fsdp" in flags
    launcher = f"torchrun --nproc_per_node {row.nproc}" if by_torchrun else "python"
    print("$", launcher, "finetuning.py", *flags, flush=True)
    environment = row.variables(steps)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    less_memory = ["-m", LIMITER, str(row.gpu_memory_gib)] if row.gpu_memory_gib else []
    failure = launch(
        flags,
        row.nproc,
        environment,
        by_torchrun=by_torchrun,
        before_script=less_memory,
        limit_seconds=limit_seconds,
    )
    if failure:
        print(f"{name}: {failure}", flush=True)
        return []
    events = read_events(output)
    print(f"{name}:", *summarise(name, row, extra, events).values(), sep=" | ", flush=True)
    return events


def run_all(
    names: list[str], rows: dict[str, Workload], steps: int, extra: list[str], folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """The events of every row. Rows for one GPU share the GPUs; the others run one after the other."""
    lanes = max(1, torch.cuda.device_count())
    for shape in {rows[name].shape for name in names}:
        if not (folder / shape).exists():
            make_shape(folder / shape, shape)
    alone = [name for name in names if rows[name].nproc == 1 and lanes > 1]

    def run_lane(lane: int) -> dict[str, list[dict[str, Any]]]:
        return {name: run(name, rows[name], steps, extra, folder, lane) for name in alone[lane::lanes]}

    with ThreadPoolExecutor(lanes) as executor:
        events = {name: found for lane in executor.map(run_lane, range(lanes)) for name, found in lane.items()}
    return events | {n: run(n, rows[n], steps, extra, folder, None) for n in names if n not in alone}


def summarise(name: str, row: Workload, extra: list[str], events: list[dict[str, Any]]) -> dict[str, str]:
    cells = {"row": name, "GPUs": str(row.nproc), "flags": " ".join(row.flags + extra)}
    if not events:
        return cells | {"tokens/s/GPU": "failed"}
    train = [event for event in events if event["event"] == "train"]
    steady = train[min(WARMUP_STEPS, len(train) - 1) :]
    memory = [event for event in events if event["event"] == "memory"]
    backward = [event for event in memory if event["phase"] == "after_backward"]
    held = " + ".join(f"{backward[-1][f'{part}_gib']:.2f}" for part in ("params", "grads", "optimizer"))
    wait = sum(event["data_wait_seconds"] for event in steady) / sum(event["step_seconds"] for event in steady)
    return cells | {
        "tokens/s/GPU": f"{statistics.median(event['tokens_per_second_per_device'] for event in steady):,.0f}",
        "TFLOP/s": f"{statistics.median(event['model_tflops_per_device'] for event in steady):.0f}",
        "peak GiB": f"{events[-1]['peak_allocated_gib']:.1f}",
        "params + grads + optimizer GiB": held,
        "host GiB": f"{max(event['host_rss_gib'] for event in memory):.1f}",
        "data wait": f"{100 * wait:.1f} %",
        "loss": f"{train[0]['loss']:.3f} -> {train[-1]['loss']:.3f}",
    }


def compare_losses(names: list[str], rows: dict[str, Workload], events: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The largest difference from the first row's losses, per shape, global batch, kind of weights and precision."""
    lines = []
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        if events[name]:
            row = rows[name]
            kind = ("--use_peft" in row.flags, "--pure_bf16" in row.flags)
            groups.setdefault((row.shape, row.global_batch, *kind), []).append(name)
    for group in groups.values():
        losses = {name: [event["loss"] for event in events[name] if event["event"] == "train"] for name in group}
        for name in group[1:]:
            apart = max(abs(a - b) for a, b in zip(losses[name], losses[group[0]], strict=False))
            lines.append(f"loss of {name}: at most {apart:.4f} from {group[0]}'s at any step")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", choices=sorted([*ROWS, *SUITES]), required=True)
    parser.add_argument("--nproc", type=int, help="processes, instead of the row's number")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--flags", default="", help="flags of finetuning.py to add to every row, in one string")
    parser.add_argument("--output_dir", help="keep run folders here, and read those of finished rows")
    options = parser.parse_args()
    names = [name for asked in options.rows for name in SUITES.get(asked, [asked])]
    rows = {name: replace(ROWS[name], nproc=options.nproc or ROWS[name].nproc) for name in names}
    extra = options.flags.split()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.output_dir or temporary)
        events = run_all(names, rows, options.steps, extra, folder)
    table = [summarise(name, rows[name], extra, events[name]) for name in names]
    headings = list(dict.fromkeys(key for cells in table for key in cells))
    print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for cells in table:
        print("| " + " | ".join(cells.get(heading, "") for heading in headings) + " |")
    print("\n".join(compare_losses(names, rows, events)))


if __name__ == "__main__":
    main()
