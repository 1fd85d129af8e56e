"""Speed and memory of conversations about pictures, packed and padded, next to TRL on the same pictures, as one table.

    python -m benchmarks.image_speed --results images.jsonl
    python -m benchmarks.image_speed --results images.jsonl --workloads mix --minutes 4 --peer_path peers

LoRA on the language model of Qwen2.5-VL-7B's shape, random weights, one GPU: `uniform` are pictures of 448 x 448 pixels
with short answers, `mix` are one to four pictures of 224 to 1,344 pixels a side with answers of 5 to 300 tokens.
`uniform-half` and `mix-half` are those on half the layers; `qwen3-vl-4b-2` trains all weights over two GPUs, whose
tokens/s are those of each. TRL trains in several forms, since neither packs. Runs of finetuning.py share a process.
Lines that --results holds are not run again, and a call begins nothing after --minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.matrix.run_workers import RunWorkers
from benchmarks.peers.calls import printed_figures
from benchmarks.pictures.chats import write_picture_chats
from benchmarks.pictures.shapes import make_image_shape
from benchmarks.pictures.workloads import WORKLOADS, PictureWorkload, StepForm
from benchmarks.runs.launch import last_line
from benchmarks.runs.measurements import WARMUP_STEPS, read_events, speed_figures, teraflops_per_token
from data.processors.processor_loading import read_processor


def lines_of(names: Sequence[str], with_peers: bool) -> Iterator[tuple[str, str]]:
    """Workload and tool of each line, the most telling ones first."""
    for name in names:
        yield name, "packed"
        yield from ((name, _peer_name(form)) for form in WORKLOADS[name].peers[:1] if with_peers)
    for name in names:
        if WORKLOADS[name].padded is not None:
            yield name, "padded"
    for name in names:
        yield from ((name, _peer_name(form)) for form in WORKLOADS[name].peers[1:] if with_peers)


def _peer_name(form: StepForm) -> str:
    more = ", recomputing" if form.recomputes else ""
    return f"TRL, {form.micro_batch} x {form.accumulation}{more}"


def measure(name: str, tool: str, options: argparse.Namespace, folder: Path, workers: RunWorkers) -> dict[str, Any]:
    """The figures of one line; `failed` says why there are none.

    Args:
        workers: of as many ranks as the workload.
    """
    workload, model, pictures = WORKLOADS[name], folder / WORKLOADS[name].shape, folder / f"pictures-{name}"
    if not model.exists():
        make_image_shape(model, workload.shape)
    if not pictures.exists():
        tokenizer = read_processor(str(model), "").tokenizer
        write_picture_chats(pictures, workload.chats, workload.num_samples, tokenizer)
    output = folder / f"run-{name}-{tool}".replace(" ", "").replace(",", "-")
    peer = next((form for form in workload.peers if _peer_name(form) == tool), None)
    if peer is not None:
        return peer_figures(peer, options, model, pictures)
    failures = []
    for compiles in dict.fromkeys((options.compile, "False")):
        flags = ours(workload, tool == "packed", options, model, pictures, output)
        flags += ["--compile", compiles]
        print("$ finetuning.py", *flags, flush=True)
        ends = workers.run(flags, options.seconds)
        output.with_suffix(".log").write_text("\n".join(end.text for end in ends))
        if not any(end.status for end in ends):
            return figures_of(output) | {"compiled": compiles}
        said = last_line(next(end.text for end in ends if end.status))
        failures.append(f"--compile {compiles}: exit {[end.status for end in ends]}: {said}")
        print(failures[-1], flush=True)
    return {"failed": "; ".join(failures)}


def peer_figures(form: StepForm, options: argparse.Namespace, model: Path, pictures: Path) -> dict[str, Any]:
    """The figures of TRL's run; with torch's own attention if it does not take the fastest that is installed."""
    asked: dict[str, Any] = {"micro_batch": form.micro_batch, "accumulation": form.accumulation}
    asked |= {"activation_checkpointing": form.recomputes, "steps": options.steps, "workers": options.workers}
    words = [sys.executable, "-m", "benchmarks.peers.trl_image_trainer", str(model), str(pictures)]
    words += [f"--{name}={value}" for name, value in asked.items()]
    failures = []
    for attention in ("auto", "sdpa"):
        found = printed_figures([*words, f"--attention={attention}"], {}, options.peer_path, options.seconds)
        if "failed" not in found:
            return found
        failures.append(f"{attention}: {found['failed']}")
        print(failures[-1], flush=True)
        if "OutOfMemory" in failures[-1]:
            break
    return {"failed": "; ".join(failures)}


def ours(
    workload: PictureWorkload, packed: bool, options: argparse.Namespace, model: Path, pictures: Path, output: Path
) -> list[str]:
    """The flags of finetuning.py."""
    form = workload.packed if packed else workload.padded
    assert form is not None
    settings = {
        "--model_name": model,
        "--output_dir": output,
        "--dataset": "chat_dataset",
        "--chat_dataset.data_path": pictures,
        "--batching_strategy": "packing" if packed else "padding",
        "--context_length": workload.length,
        "--batch_size_training": form.micro_batch,
        "--gradient_accumulation_steps": form.accumulation,
        "--num_workers_dataloader": options.workers,
        "--lr": 1e-4,
        "--gradient_clipping_threshold": 1.0,
        "--max_train_step": options.steps,
        "--num_epochs": 100,
        "--run_validation": False,
        "--save_model": False,
        "--save_every_steps": 0,
        "--save_every_minutes": 0,
    }
    switches = ["--random_weights", "--gradient_clipping", "--overwrite"]
    return [*(str(word) for pair in settings.items() for word in pair), *switches, *workload.flags, *options.ours]


def figures_of(run_folder: Path) -> dict[str, Any]:
    """The figures of a run of finetuning.py after warm-up."""
    events = read_events(run_folder)
    steady = [event for event in events if event["event"] == "train"][WARMUP_STEPS:]
    seconds = [event["step_seconds"] for event in steady]
    waited = sum(event["data_wait_seconds"] for event in steady) / sum(seconds)
    return speed_figures(events) | {"waited": waited, "longest_step_seconds": max(seconds)}


def table(lines: Sequence[tuple[str, str]], results: Mapping[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """The lines of the table, in Markdown. The ratio is to TRL's fastest form of the workload."""
    yield "| workload | tool | tokens/s per GPU | of TRL's best | TFLOP/s | peak GiB | data wait | longest step |"
    yield "|---" * 8 + "|"
    for name, tool in lines:
        found = results.get((name, tool), {"failed": "not run yet"})
        if "failed" in found:
            yield f"| {name} | {tool} | {found['failed']} |"
            continue
        beside = {other: results[name, other] for where, other in lines if where == name and (name, other) in results}
        best = max((of["tokens_per_second"] for other, of in beside.items() if _is_peer(other, of)), default=math.nan)
        per_token = teraflops_per_token(beside.values())
        speed, waited = found["tokens_per_second"], found.get("waited")
        yield (
            f"| {name} | {tool} | {speed:,.0f} | {speed / best:.2f} | {per_token * speed:.0f} "
            f"| {found['peak_gib']:.1f} | {'' if waited is None else f'{100 * waited:.1f} %'} "
            f"| {found['longest_step_seconds']:.2f} s |"
        )


def _is_peer(tool: str, found: Mapping[str, Any]) -> bool:
    return tool.startswith("TRL") and "failed" not in found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file of the results, which is gone on with")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["mix", "uniform"])
    parser.add_argument("--no_peers", action="store_true", help="finetuning.py alone")
    parser.add_argument("--peer_path", help="folder of TRL's package, if it is not installed")
    parser.add_argument("--ours", type=str.split, default=[], help="more flags of finetuning.py, in one string")
    parser.add_argument(
        "--compile",
        choices=("True", "False"),
        default="True",
        help="of finetuning.py (True; if that fails, the line is run again without)",
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=6, help="processes that decode pictures")
    parser.add_argument("--seconds", type=float, default=100, help="a line that takes longer is ended")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after so long")
    parser.add_argument("--output_dir", type=Path, help="keep run folders here")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    results: dict[tuple[str, str], dict[str, Any]] = {}
    if options.results.exists():
        kept = [json.loads(line) for line in options.results.read_text().splitlines()]
        results = {(line.pop("workload"), line.pop("tool")): line for line in kept}
    lines = list(lines_of(options.workloads, with_peers=not options.no_peers))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = (options.output_dir or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {WORKLOADS[name].nproc for name, _ in lines}
        workers = {size: RunWorkers(size, Path(temporary), num_gpus=torch.cuda.device_count()) for size in sizes}
        for of_size in workers.values():
            stack.callback(of_size.close)
        for line in [line for line in lines if line not in results]:
            if time.monotonic() > deadline:
                break
            began = time.monotonic()
            results[line] = found = measure(*line, options, folder, workers[WORKLOADS[line[0]].nproc])
            print(f"{' '.join(line)}: {time.monotonic() - began:.0f} s, {json.dumps(found)}", flush=True)
            if "failed" not in found:  # else the next call tries again
                with options.results.open("a") as file:
                    file.write(json.dumps({"workload": line[0], "tool": line[1]} | found) + "\n")
    print("", *table(lines, results), sep="\n", flush=True)
    return 0 if all("failed" not in results.get(line, {"failed": ""}) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
