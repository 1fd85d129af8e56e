"""What `python -m tools.launch` writes: commands and files that finetuning.py and Kubernetes take."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.planned_run import plan_of
from tests.helpers.documented import DOCUMENTS
from tests.helpers.processes import ROOT
from tools.launch import main

KUSTOMIZATIONS = ["indexed_job", "two_deployments", "overlays/lora"]
VERSIONS = ["1.29", "1.33", "1.37"]
# `make test-cluster` installs it there: with its schemas it takes 100 MB.
VALIDATOR = Path(os.environ.get("KUBERNETES_VALIDATE", ROOT / ".venv-k8s/bin/kubernetes-validate"))
FLAGS = ["--enable_fsdp", "--model_name", "my models/M", "--lr", "2e-5"]
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, to render overlays")


def written(*words: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    assert main(list(words)) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def typed(start: str) -> list[list[str]]:
    """The words of the lines that start so, in documents and at the top of shipped scripts."""
    files = [*DOCUMENTS, *sorted((ROOT / "slurm").glob("*.slurm"))]
    return [
        shlex.split(line)
        for file in files
        for line in re.findall(f"^[# ]*({start} .*)$", file.read_text(), re.MULTILINE)
    ]


def render(folder: Path) -> str:
    return subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True).stdout


def pods_in(text: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The workloads in a manifest, and the container of each."""
    for document in yaml.safe_load_all(text):
        if document["kind"] in ("Job", "Deployment"):
            (container,) = document["spec"]["template"]["spec"]["containers"]
            yield document, container


def test_one_node_is_started_by_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = written("--to", "torchrun", "--gpus_per_node", "4", "--", *FLAGS, capsys=capsys)
    assert words == ["torchrun", "--standalone", "--nproc_per_node", "4", "finetuning.py", *FLAGS]
    (words,) = written("--to", "slurm", "--gpus_per_node", "4", "--", *FLAGS, capsys=capsys)
    assert words == ["sbatch", "--gpus-per-node", "4", "slurm/single_node.slurm", *FLAGS]


def test_several_nodes_are_checked_before_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--to", "torchrun", "--nodes", "2", "--gpus_per_node", "8", "--rdzv_endpoint", "node-0:29500", "--"]
    check, launch = written(*words, *FLAGS, capsys=capsys)
    assert check[:3] == ["python", "-m", "tools.doctor"]
    assert launch[-len(FLAGS) - 1 :] == ["finetuning.py", *FLAGS]
    assert main([word for word in words[:-1] if word not in ("--rdzv_endpoint", "node-0:29500")] + ["--", *FLAGS]) == 2
    assert "error: --rdzv_endpoint: " in capsys.readouterr().err


def test_slurm_gets_account_and_partition(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--to", "slurm", "--nodes", "4", "--gpus_per_node", "8", "--account", "a", "--partition", "p", "--"]
    (line,) = written(*words, *FLAGS, capsys=capsys)
    assert line[:10] == shlex.split(
        "sbatch --account a --partition p --nodes 4 --gpus-per-node 8 slurm/multi_node.slurm"
    )
    assert line[10:] == FLAGS


def test_what_documents_and_scripts_say_to_type_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = typed(r"(?:CONTAINER=\S+ )?sbatch")
    assert len(jobs) >= 9
    for words in jobs:
        (script,) = [word for word in words if word.endswith(".slurm")]
        assert (ROOT / script).is_file()
        flags = words[words.index("--" if "--" in words else script) + 1 :]
        parse_flags(flags)
    monkeypatch.chdir(tmp_path)
    launches = typed("python -m tools.launch")
    assert len(launches) >= 4
    for words in launches:
        assert main(words[3:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("script", ["multi_node", "single_node"])
@pytest.mark.parametrize(
    ("files", "variables", "reason"),
    [
        (["slurm/container.sh"], {}, "this is no job of Slurm; "),
        ([], {"SLURM_JOB_ID": "1"}, "is not the repository's folder; "),
        (["slurm/container.sh"], {"SLURM_JOB_ID": "1"}, "torchrun is not in PATH; "),
    ],
    ids=["no-job", "elsewhere", "no-torchrun"],
)
def test_a_job_that_lacks_something_says_what(
    script: str, files: list[str], variables: dict[str, str], reason: str, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir()
        shutil.copy(ROOT / file, tmp_path / file)
    words = [shutil.which("bash") or "bash", str(ROOT / f"slurm/{script}.slurm"), "--model_name", "M"]
    environment = {"PATH": str(tmp_path), **variables}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(f"error: .*{reason}.*\n", done.stderr), done.stderr


@pytest.mark.parametrize("to", ["torchrun", "slurm", "k8s", "folder"])
def test_flags_are_refused_as_finetuning_refuses_them(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--to", to, "--out", str(tmp_path / "out"), "--", "--model_name", "M", "--learning_rte", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: --learning_rte: ")
    assert not (tmp_path / "out").exists()


def test_a_run_of_pods_needs_a_folder_to_find_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--to", "k8s", "--out", str(tmp_path / "out"), "--", *FLAGS]) == 2
    assert capsys.readouterr().err.startswith("error: --output_dir: ")


def test_host_memory_is_requested_as_the_plan_says(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--enable_fsdp", "--model_name", str(tiny_model), "--output_dir", "/data/runs/1"]
    words = ["--nodes", "2", "--gpus_per_node", "4", "--card", "H100-80GB"]
    plan = plan_of(parse_flags(flags), parse_hardware("4xH100-80GB", nodes=2)).memory
    wanted = math.ceil(1.25 * 4 * plan.host_gib)
    assert wanted > 0
    (line,) = written("--to", "slurm", *words, "--", *flags, capsys=capsys)
    assert f"--mem={wanted}G" in line[: line.index("slurm/multi_node.slurm")]
    (line,) = written("--to", "slurm", *words, "--nodes", "1", "--", *flags, capsys=capsys)
    assert [word for word in line if word.startswith("--mem-per-gpu=")] == [f"--mem-per-gpu={-(-wanted // 4)}G"]
    written("--to", "k8s", *words, "--image", "ours:7", "--out", str(tmp_path / "out"), "--", *flags, capsys=capsys)
    patch = yaml.safe_load((tmp_path / "out/run.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"memory": f"{wanted}Gi"}
    assert container["resources"]["limits"]["memory"] == f"{wanted + 16}Gi", "/dev/shm counts, too"
    assert main(["--card", "H1000", "--to", "slurm", "--", *flags]) == 2
    assert "H1000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("torchrun --card H100-80GB", "--card: is for --to slurm and k8s; leave it out"),
        ("torchrun --account A", "--account: is for --to slurm; leave it out"),
        ("torchrun --rdzv_endpoint h:1", "--rdzv_endpoint: one node meets nobody; leave it out, or give --nodes"),
        ("slurm --image ours:7", "--image: is for --to k8s; leave it out"),
        ("slurm --nodes 2 --rdzv_endpoint h:1", "--rdzv_endpoint: is for --to torchrun; leave it out"),
        ("k8s --partition P", "--partition: is for --to slurm; leave it out"),
    ],
)
def test_an_option_of_another_launcher_is_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--to", *words.split(), "--", *FLAGS]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert list(tmp_path.iterdir()) == []


@needs_kubectl
def test_a_written_overlay_renders_these_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--output_dir", "/data/runs/1"]
    words = ["--to", "k8s", "--nodes", "3", "--gpus_per_node", "2", "--image", "there:5000/ours:7"]
    written(*words, "--out", str(tmp_path / "out"), "--", *flags, capsys=capsys)
    ((job, container),) = pods_in(render(tmp_path / "out"))
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    assert container["image"] == "there:5000/ours:7"
    assert container["args"] == [*flags, "--resume", "auto"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (variables["NNODES"], variables["NPROC_PER_NODE"]) == ("3", "2")
    assert variables["RDZV_ENDPOINT"] == "finetuning-0.finetuning:29500", "what the base says stays"


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_shipped_manifests_hold_commands_and_flags_that_exist(folder: str) -> None:
    pods = list(pods_in(render(ROOT / "k8s" / folder)))
    assert pods
    for workload, container in pods:
        parse_flags(container["args"])
        assert container["command"] == ["bash", "tools/start_node.sh"]
        read = set(re.findall(r"\$\{?([A-Z_]+)", (ROOT / "tools/start_node.sh").read_text()))
        theirs = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "HF_HOME", "HOME", "XDG_CACHE_HOME"}  # of torchrun and of libraries
        assert {entry["name"] for entry in container["env"]} <= read | theirs
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        if workload["kind"] == "Job":
            nodes = int(variables["NNODES"])
            assert (workload["spec"]["completions"], workload["spec"]["parallelism"]) == (nodes, nodes)


@pytest.mark.cluster
@pytest.mark.skipif(not VALIDATOR.is_file(), reason=f"needs {VALIDATOR}, which `make test-cluster` installs")
@needs_kubectl
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_shipped_manifests(version: str, tmp_path: Path) -> None:
    for folder in KUSTOMIZATIONS:
        file = tmp_path / "rendered.yaml"
        file.write_text(render(ROOT / "k8s" / folder))
        command = [str(VALIDATOR), "--kubernetes-version", version, "--strict", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "find schema" not in done.stdout + done.stderr  # an unknown kind is only warned of


@needs_kubectl
@pytest.mark.parametrize("kind", ["Service", "Deployment"])
def test_the_deployments_differ_by_their_number_alone(kind: str) -> None:
    objects = [one for one in yaml.safe_load_all(render(ROOT / "k8s/two_deployments")) if one["kind"] == kind]
    assert [one["metadata"]["name"] for one in objects] == ["finetuning-0", "finetuning-1"]
    for deployed in objects if kind == "Deployment" else []:  # the order of variables means nothing
        deployed["spec"]["template"]["spec"]["containers"][0]["env"].sort(key=lambda entry: entry["name"])
    # The names of the node and its number, but not node 0's as the place where both meet, which is followed by a port.
    first = re.sub(r'(?<=")0(?=")|(?<="finetuning-)0(?=")', "1", json.dumps(objects[0]))
    assert json.loads(first) == objects[1]


def test_the_image_copies_what_is_there_and_runs_as_nobody() -> None:
    lines = (ROOT / "docker/Dockerfile").read_text().splitlines()
    (base,) = [line for line in lines if line.startswith("FROM ")]
    assert re.fullmatch(r"FROM nvidia/cuda:\d+\.\d+\.\d+-runtime-ubuntu\d\d\.\d\d", base)
    for line in lines:
        if line.startswith("COPY "):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    installed = " ".join(lines)
    for needs in ("", "-tracking", "-images", "-evaluation"):  # flags of a run must not need another image
        assert f"--requirement requirements{needs}.txt" in installed
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"tools", "datasets", "configs", "requirements.txt"} & set(ignored)
    assert {".git", ".venv*", "outputs"} <= set(ignored)
