"""Pods of k8s/indexed_job: hosts of this machine that run what its manifest says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from tests.helpers.hosts import Host, HostProcess, made_hosts
from tests.helpers.processes import ROOT, SHORT_GRACE


@contextlib.contextmanager
def made_pods(folder: Path) -> Iterator[list[Host]]:
    names = [f"finetuning-{index} finetuning-{index}.finetuning" for index in range(2)]
    elsewhere = {"elsewhere": "10.77.0.99", "loopback": "127.0.1.1"}
    with made_hosts(folder, *names, more_names=elsewhere) as pods:
        yield pods


def container(manifest: str) -> tuple[list[str], dict[str, str]]:
    """The command of the container in a manifest, without its arguments, and its plain variables."""
    documents = yaml.safe_load_all((ROOT / "k8s" / manifest).read_text())
    (spec,) = [document["spec"]["template"]["spec"] for document in documents if document["kind"] != "Service"]
    (run,) = spec["containers"]
    return run["command"], {entry["name"]: entry["value"] for entry in run["env"] if "value" in entry}


def start_pod(pod: Host, index: int, flags: Sequence[str], log: Path, **changed: str) -> HostProcess:
    """Start pod `index` of k8s/indexed_job with these flags, and variables that Kubernetes would have filled in."""
    command, given = container("indexed_job/job.yaml")
    given |= {"NODE_RANK": str(index), "LOCAL_ADDR": given["LOCAL_ADDR"].replace("$(NODE_RANK)", str(index))}
    given |= {"HOME": str(log.parent), "HF_HOME": str(log.parent)}
    return pod.start([*command, *flags], log, given | SHORT_GRACE | changed)
