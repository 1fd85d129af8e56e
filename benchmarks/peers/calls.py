"""How benchmarks/peer_speed.py calls each of the other tools, and what it asks them for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.peer_work import PeerWork
from benchmarks.runs.launch import LIMITER, ROOT, last_line
from benchmarks.runs.workload import Workload


@dataclass(frozen=True)
class Peer:
    """How a tool is run.

    Attributes:
        module: its runner.
        folder: that of its packages in --peer_path.
        preferences: its runner for --loss_type dpo, if it has one.
        batchings: what it can be asked for, of those of `PeerWork`.
    """

    module: str
    folder: str
    preferences: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    batchings: tuple[str, ...] = ("rows", "packed", "padded")
    several_gpus: bool = False
    mixtures: bool = True


TRL = "benchmarks.peers.trl_trainer"
PEERS = {
    "TRL + Liger": Peer(TRL, "trl", "benchmarks.peers.trl_dpo_trainer", several_gpus=True),
    "TRL": Peer(TRL, "trl", variables={"LIGER": "0"}, several_gpus=True),
    "torchtune": Peer("benchmarks.peers.torchtune_recipe", "torchtune", batchings=("rows", "packed"), mixtures=False),
    "Unsloth": Peer("benchmarks.peers.unsloth_trainer", "unsloth"),
    "Axolotl": Peer("benchmarks.peers.axolotl_config", "axolotl"),
    "NeMo AutoModel": Peer("benchmarks.peers.nemo_automodel_recipe", "nemo_automodel", batchings=("rows",)),
}
ALL_LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def batching_of(row: Workload) -> str:
    """The `PeerWork.batching` of a row."""
    if row.dataset_function != "get_documents":
        return "rows"
    return "padded" if "padding" in row.flags else "packed"


def work_of(row: Workload, steps: int, model: Path) -> PeerWork:
    """What a peer is asked for, from the row's flags of finetuning.py."""
    values = dict(zip(row.flags, [*row.flags[1:], ""], strict=True))
    modules = values.get("--lora_config.target_modules", "q_proj,v_proj")
    return PeerWork(
        str(model),
        method="qlora" if "--quantization" in row.flags else "lora" if "--use_peft" in row.flags else "full",
        micro_batch=row.micro_batch,
        length=row.length,
        steps=steps,
        rank=int(values.get("--lora_config.r", "8")),
        modules=ALL_LINEAR if modules == "all-linear" else modules,
        batching=batching_of(row),
        double_quant="--use_double_quant" in row.flags,
        activation_checkpointing="full" in row.flags,
        activation_offloading="--activation_offloading" in row.flags,
    )


def command_of(tool: Peer, row: Workload, steps: int, model: Path) -> list[str]:
    """The command of a peer's run."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(row.nproc)]
    command = [sys.executable, *(launcher if row.nproc > 1 else []), "-m"]
    if row.gpu_memory_gib:
        command += [LIMITER, str(row.gpu_memory_gib), "-m"]
    work = work_of(row, steps, model)
    if "--loss_type" not in row.flags:
        return [*command, tool.module, *work.words]
    asked: dict[str, Any] = {"micro_batch": work.micro_batch, "length": work.length, "steps": steps}
    asked |= {"activation_checkpointing": work.activation_checkpointing, "dataset_function": row.dataset_function}
    return [*command, tool.preferences, str(model), *(f"--{name}={value}" for name, value in asked.items())]


def run_peer(
    tool: Peer, row: Workload, steps: int, folder: Path, peer_path: str | None, limit_seconds: float | None
) -> dict[str, Any]:
    """The figures of a peer's run."""
    packages = str(Path(peer_path) / tool.folder) if peer_path else None
    command = command_of(tool, row, steps, folder / row.shape)
    return printed_figures(command, tool.variables | row.variables(steps), packages, limit_seconds)


def printed_figures(
    command: Sequence[str], variables: Mapping[str, str], packages: str | None, limit_seconds: float | None
) -> dict[str, Any]:
    """The figures that a command prints as its last JSON object; `failed` says why there are none.

    Args:
        packages: folder that its packages are imported from, before installed ones.
        limit_seconds: it is ended after so long.
    """
    paths = [str(Path(packages).resolve()) if packages else "", str(ROOT), os.environ.get("PYTHONPATH", "")]
    print("$", *command[1:], flush=True)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it began
        process.communicate()
        return {"failed": f"not finished in {limit_seconds:.0f} s"}
    lines = [line for line in said.splitlines() if line.startswith("{") and "peak_gib" in line]
    if process.returncode or not lines:
        return {"failed": last_line(errors) or f"exit status {process.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def can_run(tool: Peer, row: Workload) -> bool:
    """Whether a peer's runner has what a row asks for."""
    if "--loss_type" in row.flags:
        return bool(tool.preferences)
    fits = row.nproc == 1 or tool.several_gpus
    return (
        fits
        and batching_of(row) in tool.batchings
        and (tool.mixtures or ("moe" not in row.shape and "a3b" not in row.shape))
    )
