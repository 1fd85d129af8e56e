"""The commands of the Kubernetes manifests, on hosts whose names are known as headless Services make them known."""

from __future__ import annotations

import contextlib
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from planning.cost.network_waits import MUCH
from tests.helpers import hosts
from tests.helpers.hosts import Host, HostProcess, made_hosts, wait_for
from tests.helpers.processes import ROOT, SHORT_GRACE, ProcessGroup, read_metrics, train_events
from tests.helpers.refusals import dialogues, write_lines
from tests.helpers.resuming import PLAIN, SHARDED, assert_bit_equal, flags_of
from tools.make_tiny_model import make_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())]
_NO_LIMITS = hosts.missing_limits()
needs_limits = pytest.mark.skipif(bool(_NO_LIMITS), reason=_NO_LIMITS)

LIMIT_SECONDS = 400
LATE_SECONDS = 60


@contextlib.contextmanager
def made_pods(folder: Path) -> Iterator[list[Host]]:
    names = [f"finetuning-{index} finetuning-{index}.finetuning" for index in range(2)]
    elsewhere = {"elsewhere": "10.77.0.99", "loopback": "127.0.1.1"}
    with made_hosts(folder, *names, more_names=elsewhere) as pods:
        yield pods


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with made_pods(tmp_path_factory.mktemp("pods")) as pods:
        yield pods


class WaitingPod(NamedTuple):
    pods: list[Host]
    flags: list[str]
    log: Path
    process: HostProcess  # of the second pod
    since: float


@pytest.fixture(scope="module", autouse=True)
def waiting_pod(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WaitingPod]:
    """A pod that waits for the first one of its run, while other tests run."""
    folder = tmp_path_factory.mktemp("waiting")
    flags, log = flags_of(tiny_model, folder / "run", *SHARDED, "--resume", "auto"), folder / "log"
    with made_pods(folder / "hosts") as pods:
        process = start_pod(pods[1], 1, flags, log, NPROC_PER_NODE="2")
        yield WaitingPod(pods, flags, log, process, time.monotonic())
        process.kill()


def container(manifest: str) -> tuple[list[str], dict[str, str]]:
    """The command of the container in a manifest, without its arguments, and its plain variables."""
    documents = yaml.safe_load_all((ROOT / "k8s" / manifest).read_text())
    (spec,) = [document["spec"]["template"]["spec"] for document in documents if document["kind"] != "Service"]
    (run,) = spec["containers"]
    return run["command"], {entry["name"]: entry["value"] for entry in run["env"] if "value" in entry}


def start_pod(
    pod: Host, index: int, flags: Sequence[str], log: Path, hidden: Path | None = None, **changed: str
) -> HostProcess:
    """Start pod `index` of k8s/indexed_job with these flags, and variables that Kubernetes would have filled in.

    Args:
        hidden: a folder that this pod finds empty, as if its volume were not mounted.
    """
    command, given = container("indexed_job/job.yaml")
    given |= {"NODE_RANK": str(index), "LOCAL_ADDR": given["LOCAL_ADDR"].replace("$(NODE_RANK)", str(index))}
    given |= {"HOME": str(log.parent), "HF_HOME": str(log.parent)}
    if hidden is not None:
        command = ["bash", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden), *command]
    return pod.start([*command, *flags], log, given | SHORT_GRACE | changed)


def doctor(pod: Host, index: int, *words: str) -> list[str]:
    options = {"--rdzv_endpoint": "finetuning-0.finetuning:29500", "--local_addr": f"finetuning-{index}.finetuning"}
    given = [word for option, value in options.items() if option not in words for word in (option, value)]
    return ["python", "-m", "tools.doctor", *given, *words]


def test_a_pod_that_is_lost_or_deleted_costs_nothing_but_time(
    pods: list[Host], tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    """A lost pod is replaced, and the run goes on. A deleted one stops it, and no pod counts as done."""
    given = ["--max_train_step", "240", "--num_epochs", "100", "--save_every_steps", "40", "--run_validation", "False"]
    flags = flags_of(tiny_model, tmp_path / "run", *SHARDED, *given, "--resume", "auto")
    log, metrics = tmp_path / "log", tmp_path / "run/metrics.jsonl"
    started = [start_pod(pod, index, flags, log, NPROC_PER_NODE="1") for index, pod in enumerate(pods)]
    wait_for(lambda: metrics.is_file() and '"step": 60,' in metrics.read_text(), LIMIT_SECONDS, log.read_text)
    started[1].kill()
    wait_for(lambda: "error: rank 1 ended in step" in log.read_text(), 60, log.read_text)
    started[1] = start_pod(pods[1], 1, flags, log, NPROC_PER_NODE="1")
    restarted = re.compile('"event": "start".*"event": "start".*"event": "train"', re.DOTALL)
    wait_for(lambda: restarted.search(metrics.read_text()) is not None, LIMIT_SECONDS, log.read_text)
    assert "taken for the torchrun of a run that waits for this node" in log.read_text()
    started[1].terminate()
    assert [pod.wait(120) for pod in started] == [75, 75], log.read_text()
    assert "stopped by SIGTERM on rank 1 after step" in log.read_text()
    process_group.train(flags, 2)
    process_group.train(flags_of(tiny_model, tmp_path / "one", *SHARDED, *given), 2)
    assert_bit_equal(tmp_path / "run", tmp_path / "one")


@pytest.mark.parametrize("lacking", [(0, 1), (1,), (0,)], ids=["everywhere", "on-node-1", "on-node-0"])
def test_a_path_that_is_not_there_ends_every_node_after_one_start(
    lacking: tuple[int, ...], pods: list[Host], tiny_model: Path, tmp_path: Path
) -> None:
    """With status 2, which ends the Job (podFailurePolicy). torchrun would start the ranks ten times more."""
    write_lines(tmp_path / "data/train.jsonl", dialogues(8))
    given = ["--dataset", "samsum_dataset", "--samsum_dataset.data_path", str(tmp_path / "data/train.jsonl")]
    flags = flags_of(tiny_model, tmp_path / "run", *SHARDED, *given, *PLAIN, "--resume", "auto")
    logs = [tmp_path / f"log-{index}" for index in range(2)]
    started = [
        start_pod(pod, index, flags, logs[index], tmp_path / "data" if index in lacking else None, NPROC_PER_NODE="1")
        for index, pod in enumerate(pods)
    ]
    statuses = [pod.wait(90) for pod in started]
    printed = [log.read_text() for log in logs]
    assert statuses == [2, 2], printed
    for text in printed:
        assert re.search(r"^error: .*--samsum_dataset.data_path: .*train.jsonl", text, re.MULTILINE), text
        assert text.count("error: ") == 1, text
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_an_elastic_run_loses_a_node_and_gets_it_back(
    pods: list[Host], tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    """`--nnodes 1:2`: two ranks, then one, then two, each from the newest checkpoint with the same global batch."""
    given = ["--num_epochs", "5000", "--save_every_steps", "20", "--run_validation", "False", "--save_model", "False"]
    flags = flags_of(tiny_model, tmp_path / "run", *SHARDED, *given, "--max_train_step", "20000", "--resume", "auto")
    log, metrics = tmp_path / "log", tmp_path / "run/metrics.jsonl"
    meeting = ["--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3", "--rdzv_backend", "c10d"]
    meeting += ["--rdzv_id", "1", "--rdzv_endpoint", "finetuning-0.finetuning:29500"]

    def start(index: int) -> HostProcess:
        conf = f"is_host={str(index == 0).lower()},last_call_timeout=5"
        own = ["--rdzv_conf", conf, "--local_addr", f"finetuning-{index}.finetuning"]
        quiet = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return pods[index].start(["torchrun", *meeting, *own, "finetuning.py", *flags], log, quiet)

    def is_at(num_starts: int, world_size: int, steps_later: int) -> bool:
        """Whether the newest of so many starts has this many ranks, and has trained so many steps."""
        events = read_metrics(tmp_path / "run") if metrics.is_file() else []
        starts = [place for place, event in enumerate(events) if event["event"] == "start"]
        return len(starts) >= num_starts and (
            events[starts[-1]]["world_size"] == world_size
            and sum(event["event"] == "train" for event in events[starts[-1] :]) >= steps_later
        )

    started = [start(index) for index in range(2)]
    wait_for(lambda: is_at(1, 2, 25), LIMIT_SECONDS, log.read_text)
    started[1].kill()
    wait_for(lambda: is_at(2, 1, 10), LIMIT_SECONDS, log.read_text)
    started[1] = start(1)
    wait_for(lambda: is_at(3, 2, 10), LIMIT_SECONDS, log.read_text)
    (tmp_path / "run/STOP").touch()
    assert [process.wait(LIMIT_SECONDS) for process in started] == [0, 0], log.read_text()

    events = train_events(tmp_path / "run")
    assert [event["step"] for event in events] == list(range(1, len(events) + 1))
    whole = flags_of(tiny_model, tmp_path / "whole", *SHARDED, *given, "--max_train_step", str(len(events)))
    process_group.train(whole, 2)
    wanted = [event["loss"] for event in train_events(tmp_path / "whole")]
    assert [event["loss"] for event in events] == pytest.approx(wanted, rel=1e-3)
    assert [event["num_tokens"] for event in events] == [e["num_tokens"] for e in train_events(tmp_path / "whole")]


@pytest.mark.parametrize(
    ("words", "status", "cause"),
    [
        (
            ["--rdzv_endpoint", "finetunning-0:29500", "--name_seconds", "3"],
            1,
            "no machine has the name 'finetunning-0'",
        ),
        (["--wait_seconds", "3"], 1, r"finetuning-0.finetuning:29500 \(10.77.0.10\) is there, and nothing listens"),
        (["--rdzv_endpoint", "elsewhere:29500", "--wait_seconds", "3"], 1, r"elsewhere:29500 \(10.77.0.99\) cannot be"),
        (["--rdzv_endpoint", "loopback:29500"], 2, "loopback is 127.0.1.1 here, which no other node can reach"),
        (
            ["--local_addr", "loopback"],
            2,
            "--local_addr: loopback is 127.0.1.1 here.*give a name for one of 10.77.0.11",
        ),
        (["--local_addr", "finetuning-0"], 2, r"finetuning-0 is 10.77.0.10, which is no address of this node \(10.77"),
        (["--node_rank", "0"], 2, "finetuning-0.finetuning is 10.77.0.10, no address of this node, which is node 0"),
    ],
    ids=[
        "unknown-name",
        "closed-port",
        "no-machine",
        "loopback",
        "own-loopback",
        "address-of-another",
        "rank-of-another",
    ],
)
def test_a_wrong_place_is_named(pods: list[Host], words: list[str], status: int, cause: str) -> None:
    found, printed = pods[1].run(doctor(pods[1], 1, *words))
    assert found == status, printed
    assert re.search(f"^error: .*{cause}", printed, re.MULTILINE), printed


def test_a_wrong_interface_is_named(pods: list[Host]) -> None:
    found, printed = pods[1].run(doctor(pods[1], 1), NCCL_SOCKET_IFNAME="ib")
    assert found == 2, printed
    assert re.search(
        r"^error: NCCL_SOCKET_IFNAME=ib: this node has no such interface; it has 10.77.0.11", printed, re.M
    )


def test_a_missing_route_is_named(pods: list[Host]) -> None:
    block = "ip route add blackhole 10.77.0.10/32 && exec python -m tools.doctor"
    words = "--rdzv_endpoint finetuning-0:29500 --local_addr finetuning-1 --wait_seconds 3"
    try:
        status, printed = pods[1].run(["bash", "-c", f"{block} {words}"])
    finally:
        pods[1].run(["ip", "route", "del", "blackhole", "10.77.0.10/32"])
    assert status == 1
    assert "no route leads from this node to 10.77.0.10" in printed


@pytest.mark.full
@needs_limits
def test_the_doctor_foresees_what_sharding_inside_nodes_saves(tmp_path: Path) -> None:
    """On a network that is slow enough for traffic to be all that a step waits for."""
    sizes = {"vocab_size": 600, "hidden_size": 128, "intermediate_size": 384, "num_layers": 4, "num_heads": 4}
    model = make_tiny_model(tmp_path / "model", tie_word_embeddings=False, **sizes)
    given = ["--max_train_step", "5", "--run_validation", "False", "--save_every_steps", "0", "--save_model", "False"]
    flags = flags_of(model, tmp_path / "unused", *SHARDED, *given)
    del flags[flags.index("--output_dir") : flags.index("--output_dir") + 2]
    meeting = ["--nnodes", "2", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_id", "1"]
    command = ["torchrun", *meeting, "--rdzv_endpoint", "node-0:29500", "-m", "tests.helpers.step_times"]
    log = tmp_path / "log"
    with made_hosts(tmp_path / "hosts", "node-0", "node-1") as pair:
        for host in pair:
            host.limit(megabits_per_second=40)
        started = [
            host.start([*command, str(tmp_path), *flags], log, {"TORCH_CPP_LOG_LEVEL": "ERROR"}) for host in pair
        ]
        assert [process.wait(LIMIT_SECONDS) for process in started] == [0, 0], log.read_text()
    (foreseen,) = re.findall(r"FULL_SHARD communicates ([\d.]+) s per step", log.read_text())
    (saved,) = re.findall(r"warning: --hsdp, .* would communicate ([\d.]+) s", log.read_text())
    full, hybrid = (
        statistics.median(event["step_seconds"] for event in train_events(tmp_path / name)[1:])
        for name in ("full", "hybrid")
    )
    assert full / hybrid == pytest.approx(float(foreseen) / float(saved), rel=0.3)
    assert full == pytest.approx(float(foreseen), rel=0.3)


@needs_limits
def test_a_run_says_that_its_steps_wait_for_the_network(tmp_path: Path) -> None:
    """The share that is measured is the one by which steps got slower when the network was limited."""
    sizes = {"vocab_size": 600, "hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 4}
    model = make_tiny_model(tmp_path / "model", tie_word_embeddings=False, **sizes)
    given = ["--run_validation", "False", "--save_every_steps", "0", "--save_model", "False"]
    flags = flags_of(model, tmp_path / "unused", *given, "--global_batch_size", "8", "--batch_size_training", "4")
    for flag in ("--output_dir", "--max_train_step"):
        del flags[flags.index(flag) : flags.index(flag) + 2]
    meeting = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_id", "1"]
    command = ["torchrun", *meeting, "--rdzv_endpoint", "node-0:29500", "-m", "tests.helpers.limited_network"]
    log, megabits_per_second = tmp_path / "log", 30
    with made_hosts(tmp_path / "hosts", "node-0", "node-1") as pair:
        started = [
            host.start([*command, str(tmp_path), *flags], log, {"TORCH_CPP_LOG_LEVEL": "ERROR"}) for host in pair
        ]
        metrics = tmp_path / "free/metrics.jsonl"
        wait_for(lambda: metrics.is_file() and '"event": "end"' in metrics.read_text(), LIMIT_SECONDS, log.read_text)
        for host in pair:
            host.limit(megabits_per_second)
        (tmp_path / "is-limited").touch()
        assert [process.wait(LIMIT_SECONDS) for process in started] == [0, 0], log.read_text()

    def measured(run: str) -> tuple[float, float, float]:
        """Seconds of a step that was measured, and the fractions of them that it waited: for the network, and for
        ranks that came later (medians)."""
        events = read_metrics(tmp_path / run)
        waited = {event["step"]: event for event in events if event["event"] == "communication"}
        steps = {e["step"]: e["step_seconds"] for e in events if e["event"] == "train" and e["step"] in waited}
        step = statistics.median(steps.values())
        network, later = (
            statistics.median(event[name] for event in waited.values())
            for name in ("exposed_seconds", "straggler_seconds")
        )
        return step, network / step, later / step

    step, share, of_later = measured("limited")
    fastest = min(event["step_seconds"] for event in train_events(tmp_path / "free"))
    # On a slow host a rank ends a collective later than the other, which then waits for it in the next one.
    assert share + of_later == pytest.approx((step - fastest) / step, abs=0.05)
    assert share > 3 * of_later
    copies_step, copies_share, _ = measured("copies")
    _, free_share, _ = measured("free")
    lines = re.findall(r"communication: .*", log.read_text(), re.MULTILINE)
    said = re.findall(r"waits (\d+) % .* each rank sends ([\d.]+) Gbit/s", "\n".join(lines))
    # A host that is busy with other work delays the ranks of the first run, too: by its own figures, that is said.
    assert len(said) == 2 + (free_share > MUCH), "a line is missing, or of a run that hardly waited"
    for (percent, gigabits), found in zip(said[-2:], (share, copies_share), strict=True):
        assert float(percent) == pytest.approx(100 * found, abs=2)
        assert 1e3 * float(gigabits) == pytest.approx(megabits_per_second, rel=0.2)
    advised = [line for line in lines if "would communicate" in line]
    (foreseen,) = re.findall(r"--sharding_strategy NO_SHARD .* about ([\d.]+) s a step", "\n".join(advised))
    assert float(foreseen) == pytest.approx(copies_step, rel=0.3)


def meet(pods: list[Host], folder: Path, *words: Sequence[str]) -> list[str]:
    """What the doctors of both pods print, each with words of its own; they must refuse."""
    started = [
        pod.start(doctor(pod, index, *words[index]), folder / f"doctor-{index}") for index, pod in enumerate(pods)
    ]
    assert [process.wait(60) for process in started] == [2, 2]
    return [process.log.read_text() for process in started]


def test_nodes_with_other_flags_are_refused(pods: list[Host], tmp_path: Path) -> None:
    for printed in meet(pods, tmp_path, *(["--", "--model_name", "M", "--lr", lr] for lr in ("1e-4", "2e-4"))):
        assert re.search(r"error: the nodes differ; flags: \S+ has --lr 1e-4, \S+ has --lr 2e-4", printed), printed


def test_a_node_with_other_code_is_refused(pods: list[Host], tmp_path: Path) -> None:
    other = tmp_path / "checkout"
    rooms = [path for path in ROOT.iterdir() if (path / "__init__.py").is_file() and path.name != "tests"]
    for room in [*rooms, ROOT / "datasets"]:
        shutil.copytree(room, other / room.name, ignore=shutil.ignore_patterns("__pycache__", "samples"))
    for file in ROOT.glob("*.py"):
        shutil.copy(file, other)
    (other / "finetuning.py").write_text((other / "finetuning.py").read_text() + "\n# another commit\n")
    logs = [tmp_path / "doctor-0", tmp_path / "doctor-1"]
    started = [pods[0].start(doctor(pods[0], 0), logs[0]), pods[1].start(doctor(pods[1], 1), logs[1], cwd=other)]
    assert [process.wait(60) for process in started] == [2, 2]
    for log in logs:
        assert re.search(r"error: the nodes differ; this repository: \S+ has \w+, \S+ has \w+", log.read_text())


def test_pods_one_of_them_late_train_to_the_losses_of_one_node(
    waiting_pod: WaitingPod, tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    """The last test here: the pod has waited while the others ran."""
    pods, flags, log, second, since = waiting_pod
    time.sleep(max(0.0, LATE_SECONDS - (time.monotonic() - since)))
    assert second.popen.poll() is None, log.read_text()
    assert re.search(
        r"doctor: finetuning-0\S+ \(10.77.0.10\) is there, and nothing listens on the port", log.read_text()
    )
    first = start_pod(pods[0], 0, flags, log, NPROC_PER_NODE="2")
    assert [pod.wait(LIMIT_SECONDS) for pod in (first, second)] == [0, 0], log.read_text()
    process_group.train(flags_of(tiny_model, tmp_path / "one", *SHARDED), 4)
    run = Path(flags[flags.index("--output_dir") + 1])
    losses = [[event["loss"] for event in train_events(folder)] for folder in (run, tmp_path / "one")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
