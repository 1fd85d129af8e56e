"""What the Slurm scripts start, with stand-ins for the commands of Slurm, apptainer and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT

COMMANDS = {
    # It starts what follows its options, as a job step of one task.
    "srun": """
[ "$*" = --help ] && { echo "$SRUN_HELP"; exit; }
echo "srun $*" >> "$CALLS"
while [[ "$1" == --* ]]; do shift; done
exec "$@"
""",
    "apptainer": """
echo "apptainer $*" >> "$CALLS"
while [[ "$1" != *.sif ]]; do shift; done
shift
exec "$@"
""",
    "torchrun": 'echo "torchrun $*" >> "$CALLS"',
    "scontrol": "echo localhost",
}
JOB = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost", "SLURM_GPUS_ON_NODE": "2"}
JOB |= {"SLURM_NODEID": "0", "SLURMD_NODENAME": "localhost"}


def run_script(
    script: str, folder: Path, *flags: str, without: tuple[str, ...] = (), **variables: str
) -> tuple[int, list[str], str]:
    """The script's exit status, the commands that it started, and its standard error."""
    commands = folder / "bin"
    commands.mkdir()
    for name, text in COMMANDS.items():
        if name not in without:
            (commands / name).write_text(f"#!/usr/bin/env bash\n{text}")
            (commands / name).chmod(0o755)
    calls = folder / "calls"
    calls.touch()
    (commands / "python").symlink_to(sys.executable)
    for name in ("bash", "env", "grep", "head", "tail", "mktemp", "rm", "sleep", "cat"):  # no torchrun besides
        (commands / name).symlink_to(f"/usr/bin/{name}")
    given = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CONTAINER"))}
    given |= {"PATH": str(commands), "CALLS": str(calls), "SRUN_HELP": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        ["bash", f"slurm/{script}", *flags],
        cwd=ROOT,
        env=given | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, calls.read_text().splitlines(), done.stderr


@pytest.mark.parametrize("script", ["single_node.slurm", "multi_node.slurm"])
@pytest.mark.parametrize("by", ["apptainer", "pyxis"])
def test_checks_and_ranks_run_inside_the_image(script: str, by: str, tmp_path: Path) -> None:
    image = tmp_path / "finetuning.sif" if by == "apptainer" else "registry.example.com#finetuning:1"
    Path(tmp_path / "finetuning.sif").touch()
    variables = JOB | {"CONTAINER": str(image), "CONTAINER_MOUNTS": "/data:/data", "SRUN_HELP": "--container-image"}
    flags = ["--model_name", "M", "--output_dir", str(tmp_path / "run")]
    status, calls, errors = run_script(script, tmp_path, *flags, **variables)
    assert status == 0, errors
    mounts = f"{ROOT}:{ROOT},/data:/data"
    inside = {
        "apptainer": f"apptainer exec --nv --bind {mounts} --pwd {ROOT} {image} ",
        "pyxis": f"--container-image={image} --container-mounts={mounts} --container-workdir={ROOT} ",
    }[by]
    entered = [call.partition(inside)[2] for call in calls if call.startswith("apptainer ") or by == "pyxis"]
    check, start = [words for words in entered if words]
    assert check.startswith("python -m tools.launch --to folder -- --model_name M")
    assert start.startswith("torchrun " if script == "single_node.slurm" else "bash -c ")
    assert calls[-1].startswith("torchrun ")
    assert "finetuning.py --model_name M" in calls[-1]


@pytest.mark.parametrize(
    ("script", "variables", "without", "reason"),
    [
        ("recipes.slurm", JOB, (), "this is no task of a job array; start it by: sbatch --array 0-2 slurm/recipes"),
        ("recipes.slurm", JOB | {"SLURM_ARRAY_TASK_ID": "2"}, (), "--array: no recipe 2 among 1, counted from 0"),
        ("single_node.slurm", {}, (), "this is no job of Slurm; start this script by sbatch"),
        ("multi_node.slurm", {}, (), "this is no job of Slurm; start this script by sbatch"),
        ("single_node.slurm", JOB | {"CONTAINER": "no.sif"}, (), "CONTAINER: there is no file no.sif; apptainer build"),
        ("single_node.slurm", JOB | {"CONTAINER": "an#image"}, (), "CONTAINER: an#image needs pyxis, which this Slurm"),
        ("single_node.slurm", JOB | {"CONTAINER": "{sif}"}, ("apptainer",), "needs apptainer; load its module"),
    ],
)
def test_a_job_that_cannot_start_says_why_in_one_line(
    script: str, variables: dict[str, str], without: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "there.sif").touch()
    filled = {name: value.replace("{sif}", str(tmp_path / "there.sif")) for name, value in variables.items()}
    status, calls, errors = run_script(script, tmp_path, "a.yaml", without=without, **filled)
    assert status == 2
    assert errors.startswith("error: ")
    assert reason in errors
    assert errors.count("\n") == 1
    assert not calls


def test_what_runs_leave_in_the_repository_is_ignored_by_git() -> None:
    left = ["outputs/run/run.yaml", "model_checkpoints/fine-tuned/x", "wandb/run", "logs/slurm-7/x", "slurm-7.log"]
    done = subprocess.run(["git", "check-ignore", *left], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 128:
        pytest.skip("no git repository: an archive")
    assert done.stdout.splitlines() == left
