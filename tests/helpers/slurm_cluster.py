"""A Slurm cluster on this machine: slurmctld and a slurmd per host, each host with a network of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.helpers import hosts
from tests.helpers.hosts import Host, made_hosts, wait_for
from tests.helpers.processes import ROOT, SHORT_GRACE

# cred_expire (default 120): how many seconds a node accepts what the controller has signed, and a requeued job waits. A
# node refuses all that was signed up to the second in which the job ended there. So a job that is made to start earlier
# (scontrol update StartTime=now) may be refused: "Job credential revoked". It has failed then.
_CONFIG = """
ClusterName=test
SlurmctldHost=control
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
ReturnToService=2
KillWait=30
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeAddr=n1 CPUs=16 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeAddr=n2 CPUs=16 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# Other states pass: PENDING, RUNNING, COMPLETING, and for a moment SIGNALING or REQUEUED.
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}
_PAUSE_SECONDS = 0.25  # asking Slurm for a job's state starts four programs
_NULL_DEVICE = os.makedev(1, 3)


def missing() -> str:
    """Why there can be no Slurm here, in words; empty if there can."""
    tools = [tool for tool in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(tool) is None]
    if tools:
        return f"needs {', '.join(tools)}: apt-get install --no-install-recommends slurm-wlm munge"
    return hosts.missing()


class Cluster:
    """Jobs are submitted from `checkout`, a folder that has what the repository has."""

    def __init__(self, control: Host, folder: Path) -> None:
        self.control, self.folder = control, folder
        self.checkout = folder / "checkout"
        self.checkout.mkdir()
        for entry in ROOT.iterdir():
            if entry.name not in ("outputs", "logs", ".git"):
                (self.checkout / entry.name).symlink_to(entry)

    def run(self, *command: str) -> str:
        """What a client of Slurm prints; it must succeed."""
        variables = hosts.variables({"SLURM_CONF": str(self.folder / "slurm.conf"), **SHORT_GRACE})
        given: dict[str, Any] = {"cwd": self.checkout, "env": variables}
        done = subprocess.run(
            self.control.inside(command), capture_output=True, text=True, timeout=60, check=False, **given
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str) -> str:
        """The number of the job that sbatch was given with these words."""
        return re.findall(r"Submitted batch job (\d+)", self.run("sbatch", *words))[0]

    def state(self, job: str) -> str:
        return re.findall(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))[0]

    def wait(self, job: str, seconds: float) -> str:
        """The state in which the job ended."""
        wait_for(lambda: self.has_ended(job), seconds, lambda: self.told(job), _PAUSE_SECONDS)
        return self.state(job)

    def wait_for(self, job: str, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition holds, while the job has not ended."""
        wait_for(lambda: condition() or self.has_ended(job), seconds, lambda: self.told(job), _PAUSE_SECONDS)
        assert condition(), self.told(job)

    def has_ended(self, job: str) -> bool:
        return self.state(job) in _ENDED

    def told(self, job: str) -> str:
        """The job's log, and what Slurm and its controller say of it."""
        controller = (self.folder / "slurmctld.log").read_text()
        return "\n".join((self.log(job), self.run("scontrol", "show", "job", job), controller))

    def log(self, job: str) -> str:
        found = [*self.checkout.glob(f"slurm-{job}.log"), *self.checkout.glob(f"slurm-{job}-*.log")]
        return found[0].read_text(errors="replace") if found else ""


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Two nodes, n1 and n2, with two GPUs each that are none, and a third host that controls them."""
    folder.mkdir(parents=True)
    (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder))
    for number in range(2):
        os.mknod(folder / f"gpu{number}", 0o666 | stat.S_IFCHR, _NULL_DEVICE)
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    with contextlib.ExitStack() as stack:
        munged = subprocess.Popen(
            ["munged", "--foreground", "--force", *(f"--{option}={file}" for option, file in files.items())],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(munged.wait)
        stack.callback(munged.kill)
        control, *nodes = stack.enter_context(made_hosts(folder / "hosts", "control", "n1", "n2"))
        wait_for(lambda: (folder / "munge.socket").exists(), 20)
        variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        daemons = [control.start(["slurmctld", "-D", "-c"], folder / "control.out", variables)]
        daemons += [node.start(["slurmd", "-D", "-N", node.name], folder / "nodes.out", variables) for node in nodes]
        for daemon in daemons:
            stack.callback(daemon.kill)
        cluster = Cluster(control, folder)

        def is_up() -> bool:
            with contextlib.suppress(AssertionError):
                return cluster.run("sinfo", "--noheader", "--format=%t %D").split() == ["idle", "2"]
            return False

        wait_for(is_up, 60, lambda: (folder / "control.out").read_text() + (folder / "nodes.out").read_text())
        yield cluster
