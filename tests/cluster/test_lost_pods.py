"""A pod or a node that is lost costs nothing but time: the run goes on without it, or when it is back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import hosts
from tests.helpers.hosts import Host, HostProcess, wait_for
from tests.helpers.pods import made_pods, start_pod
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from tests.helpers.resuming import SHARDED, assert_bit_equal, flags_of

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())]

LIMIT_SECONDS = 400


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with made_pods(tmp_path_factory.mktemp("pods")) as pods:
        yield pods


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
