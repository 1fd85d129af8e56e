"""Write the command (torchrun, Slurm) or the files (Kubernetes) that start a run with these flags.

    python -m tools.launch --to torchrun --nodes 2 --gpus_per_node 8 --rdzv_endpoint HOST:29500 -- FLAGS
    python -m tools.launch --to slurm --nodes 2 --gpus_per_node 8 --account A --partition P -- FLAGS
    python -m tools.launch --to k8s --nodes 2 --gpus_per_node 8 --image REGISTRY/NAME:TAG --out my_run -- FLAGS
    python -m tools.launch --to slurm --nodes 2 --gpus_per_node 8 --card H100-80GB -- FLAGS
    python -m tools.launch --to folder -- FLAGS

FLAGS are those of finetuning.py, and refused as it refuses them. `folder` prints their --output_dir, if they have one.
With --card, host memory is requested as the plan of these flags says; otherwise the shipped files' requests stay.
Nothing is started. Exit status: 0 written, 2 refused.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before the imports below, which take a while.
if __name__ == "__main__":
    from tools.beginning import begin_tool

    begin_tool()

import yaml

from configs.flags import parse_flags
from configs.run import RunConfig
from tools.ending import status_of
from tools.network.names import parse_endpoint
from utils.errors import ConfigError
from utils.printing import print_line


class _Quoted(str):
    """Text that is written in quotes. Kubernetes' reader of YAML takes 2e-5 for a number, PyYAML's for text."""


class _Dumper(yaml.SafeDumper):
    """Writes `_Quoted`."""


_Dumper.add_representer(
    _Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"')
)

_SPARE = 1.25  # requested for each GiB that is planned: a request that is exceeded ends the run
_SHARED_GIB = 16  # /dev/shm of the manifest, which counts towards the limit
ROOT = Path(__file__).resolve().parent.parent
JOB = "k8s/indexed_job"
_IMAGE, _OUT = "finetuning:latest", "outputs/k8s"
_ONLY_FOR = {
    "rdzv_endpoint": ("torchrun",),
    "account": ("slurm",),
    "partition": ("slurm",),
    "card": ("slurm", "k8s"),
    "image": ("k8s",),
    "out": ("k8s",),
}
"""The launchers that use an option."""


def torchrun_command(nodes: int, gpus_per_node: int, endpoint: str | None, flags: Sequence[str]) -> list[str]:
    """The lines to type on every node.

    Raises:
        ConfigError: if several nodes have no place to meet, or one has.
    """
    script = ["finetuning.py", *flags]
    if nodes == 1:
        if endpoint is not None:
            raise ConfigError("--rdzv_endpoint: one node meets nobody; leave it out, or give --nodes")
        return [shlex.join(["torchrun", "--standalone", "--nproc_per_node", str(gpus_per_node), *script])]
    if endpoint is None:
        raise ConfigError("--rdzv_endpoint: is required for several nodes; give HOST:PORT of the first")
    parse_endpoint(endpoint)
    meeting = ["--nnodes", str(nodes), "--rdzv_endpoint", endpoint]
    check = ["python", "-m", "tools.doctor", *meeting, "--", *flags]
    launch = ["torchrun", *meeting, "--rdzv_backend", "c10d", "--rdzv_id", "1", "--nproc_per_node", str(gpus_per_node)]
    return [shlex.join(check), shlex.join([*launch, *script])]


def planned_host_gib(config: RunConfig, nodes: int, gpus_per_node: int, card: str) -> int:
    """Host memory to request for each node, in GiB, for its ranks' loading and training, whichever needs more.

    Raises:
        ConfigError: if the card is not known, or such a run would be refused.
    """
    # Here, since the other commands need no torch: sbatch's scripts check flags in the job's first second.
    from planning.machines.hardware import parse_hardware
    from planning.planned_run import plan_of

    plan = plan_of(config, parse_hardware(f"{gpus_per_node}x{card}", nodes=nodes))
    return math.ceil(plan.memory.host_gib * gpus_per_node * _SPARE)


def slurm_command(
    nodes: int,
    gpus_per_node: int,
    account: str | None,
    partition: str | None,
    flags: Sequence[str],
    host_gib: int | None = None,
) -> str:
    """The line to type in the repository's folder on a login node."""
    words = ["sbatch"]
    for option, value in (("--account", account), ("--partition", partition)):
        words += [] if value is None else [option, value]
    words += [] if nodes == 1 else ["--nodes", str(nodes)]
    if host_gib is not None:  # by the option that the script gives, too
        per_gpu = f"--mem-per-gpu={math.ceil(host_gib / gpus_per_node)}G"
        words += [per_gpu if nodes == 1 else f"--mem={host_gib}G"]
    script = "slurm/single_node.slurm" if nodes == 1 else "slurm/multi_node.slurm"
    return shlex.join([*words, "--gpus-per-node", str(gpus_per_node), script, *flags])


def write_overlay(
    out: Path,
    nodes: int,
    gpus_per_node: int,
    image: str,
    config: RunConfig,
    flags: Sequence[str],
    host_gib: int | None = None,
) -> None:
    """Write a Kustomize overlay of k8s/indexed_job into a new folder.

    Raises:
        ConfigError: if the folder is there, or the flags name no folder for the run.
    """
    if not config.was_given("train_config.output_dir"):
        raise ConfigError("--output_dir: is required; a pod that is replaced has to find its run: /data/runs/NAME")
    if out.exists():
        raise ConfigError(f"--out: {out} is there; give a new folder")
    name, _, tag = image.rpartition(":")
    if not name or "/" in tag:
        raise ConfigError(f"--image: {image} has no tag; give NAME:TAG, so that every node runs the same")
    resumes = [] if config.was_given("train_config.resume") else ["--resume", "auto"]
    resources: dict[str, dict[str, Any]] = {"limits": {"nvidia.com/gpu": gpus_per_node}}
    if host_gib is not None:
        resources["requests"] = {"memory": f"{host_gib}Gi"}
        resources["limits"]["memory"] = f"{host_gib + _SHARED_GIB}Gi"
    container: dict[str, Any] = {
        "name": "run",
        "args": [_Quoted(word) for word in (*flags, *resumes)],
        "env": [{"name": "NNODES", "value": str(nodes)}, {"name": "NPROC_PER_NODE", "value": str(gpus_per_node)}],
        "resources": resources,
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "finetuning"},
        "spec": {"completions": nodes, "parallelism": nodes, "template": {"spec": {"containers": [container]}}},
    }
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(ROOT / JOB, out.resolve())],
        "images": [{"name": "finetuning", "newName": name, "newTag": tag}],
        "patches": [{"path": "run.yaml"}],
    }
    out.mkdir(parents=True)
    for file, contents in (("kustomization.yaml", overlay), ("run.yaml", job)):
        (out / file).write_text(yaml.dump(contents, Dumper=_Dumper, sort_keys=False, width=math.inf), encoding="utf-8")


def refuse_unused(given: argparse.Namespace) -> None:
    """Refuse options of another launcher.

    Raises:
        ConfigError: for the first of them.
    """
    for option, launchers in _ONLY_FOR.items():
        if getattr(given, option) is not None and given.to not in launchers:
            raise ConfigError(f"--{option}: is for --to {' and '.join(launchers)}; leave it out")


def launch(given: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """The lines to print; for Kubernetes files are written, too.

    Raises:
        ConfigError: if finetuning.py or the launcher would refuse them.
    """
    config = parse_flags(flags)
    if given.to == "folder":
        return [config.train_config.output_dir or ""]
    for option, value in (("--nodes", given.nodes), ("--gpus_per_node", given.gpus_per_node)):
        if value < 1:
            raise ConfigError(f"{option}: {value} is none; give 1 or more")
    refuse_unused(given)
    host_gib = None
    if given.card is not None:
        host_gib = planned_host_gib(config, given.nodes, given.gpus_per_node, given.card)
    if given.to == "torchrun":
        return torchrun_command(given.nodes, given.gpus_per_node, given.rdzv_endpoint, flags)
    if given.to == "slurm":
        return [slurm_command(given.nodes, given.gpus_per_node, given.account, given.partition, flags, host_gib)]
    out = given.out or Path(_OUT)
    write_overlay(out, given.nodes, given.gpus_per_node, given.image or _IMAGE, config, flags, host_gib)
    return [f"kubectl apply -k {shlex.quote(str(out))}"]


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch",
        usage="%(prog)s --to {torchrun,slurm,k8s,folder} [OPTIONS] -- FLAGS of finetuning.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--to", choices=("torchrun", "slurm", "k8s", "folder"), required=True)
    parser.add_argument("--nodes", type=int, default=1, help="default: 1")
    parser.add_argument("--gpus_per_node", type=int, default=1, help="default: 1")
    parser.add_argument("--rdzv_endpoint", help="torchrun: HOST:PORT of the first node")
    parser.add_argument("--account", help="slurm")
    parser.add_argument("--partition", help="slurm")
    parser.add_argument(
        "--card", help="slurm, k8s: the GPUs' name, as of --dry_run_hardware; host memory is then planned"
    )
    parser.add_argument("--image", help=f"k8s: NAME:TAG, of docker/Dockerfile (default: {_IMAGE})")
    parser.add_argument("--out", type=Path, help=f"k8s: the folder to write (default: {_OUT})")
    given = parser.parse_args(words[:at])
    return status_of(lambda: print_line("\n".join(launch(given, words[at + 1 :]))))


if __name__ == "__main__":
    sys.exit(main())
