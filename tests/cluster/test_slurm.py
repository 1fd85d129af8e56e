"""The shipped Slurm scripts on a real Slurm of two nodes: they train, are requeued, go on, and fail with a reason."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.helpers import slurm_cluster
from tests.helpers.resuming import SHARDED, assert_bit_equal, flags_of
from tests.helpers.slurm_cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())]

LIMIT_SECONDS = 300  # a start imports torch in four processes
FAILING = """
import os

def get_rows(dataset_config, tokenizer, split):
    if os.environ["RANK"] == "1":
        raise RuntimeError("this rank's disk is gone")
    return [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster.slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def long_run(model: Path, folder: Path) -> list[str]:
    given = ["--max_train_step", "120", "--num_epochs", "50", "--save_every_steps", "50", "--run_validation", "False"]
    return flags_of(model, folder, *SHARDED, *given)


def ranks_of(job: str) -> list[psutil.Process]:
    """The ranks of a job, on whichever host."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if variables.get("SLURM_JOB_ID") == job and "finetuning.py" in process.cmdline() and "RANK" in variables:
                found[int(variables["RANK"])] = process
    return [found[rank] for rank in sorted(found)]


def is_past(run: Path, step: int) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and f'{{"event": "train", "step": {step},' in metrics.read_text()


def test_two_nodes_that_are_stopped_and_requeued_end_as_one_node_does(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    # Two tasks for each node are no reason for two torchruns.
    asked = ["--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=2", "--time=60"]
    job = cluster.submit(*asked, "slurm/multi_node.slurm", *long_run(tiny_model, run))
    cluster.wait_for(job, lambda: is_past(run, 20), LIMIT_SECONDS)
    rank = ranks_of(job)[1]
    rank.suspend()  # the run waits until Slurm has signalled it
    cluster.run(
        "scontrol", "update", f"JobId={job}", "TimeLimit=10"
    )  # minutes: those before which the script is signalled
    cluster.wait_for(job, (run / "STOP").exists, 90)
    rank.resume()
    cluster.wait_for(job, lambda: "stopped before the time limit; requeued" in cluster.log(job), 60)
    assert "stopped by the file" in cluster.log(job)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")

    cluster.wait_for(job, lambda: is_past(run, 70), LIMIT_SECONDS)
    rank = ranks_of(job)[0]
    rank.suspend()
    cluster.run("scontrol", "requeue", job)
    rank.send_signal(signal.SIGCONT)
    assert cluster.wait(job, LIMIT_SECONDS) == "COMPLETED", cluster.log(job)
    log = cluster.log(job)
    assert "2 nodes reach each other by name" in log
    assert "on 2 hosts" in log
    assert len(re.findall(r"going on after step|resum", log)) >= 2, log
    ranks = sorted((cluster.checkout / f"logs/slurm-{job}/start-2").glob("node-*/*/attempt_0/0/stdout.log"))
    assert len(ranks) == 2, "each rank has a log"

    recipe = tmp_path / "recipe.yaml"
    flags = long_run(tiny_model, whole)
    recipe.write_text(yaml.safe_dump({"lr": flags[flags.index("--lr") + 1]}))
    del flags[flags.index("--lr") : flags.index("--lr") + 2]
    words = ["--gpus-per-node=2", "--cpus-per-gpu=1", "--mem-per-gpu=100", "--array=1-1", "slurm/recipes.slurm"]
    job = cluster.submit(*words, "absent.yaml", str(recipe), "--", *flags)
    assert cluster.wait(job, LIMIT_SECONDS) == "COMPLETED", cluster.log(job)
    assert_bit_equal(run, whole)


def test_a_rank_that_fails_fails_the_job_with_its_error_in_the_log(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    flags = flags_of(tiny_model, tmp_path / "run", *SHARDED, "--dataset", f"{tmp_path}/failing.py:get_rows")
    job = cluster.submit("--nodes=2", "--gpus-per-node=1", "slurm/multi_node.slurm", *flags)
    assert cluster.wait(job, LIMIT_SECONDS) == "FAILED"
    assert cluster.log(job).count("this rank's disk is gone") >= 1, cluster.log(job)


def test_flags_that_are_refused_end_the_job_before_any_node_starts(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(
        "--nodes=2", "--gpus-per-node=1", "slurm/multi_node.slurm", "--model_name", "M", "--batch_size_training", "x"
    )
    assert cluster.wait(job, 60) == "FAILED"
    assert re.search(r"^error: --batch_size_training: ", cluster.log(job), re.MULTILINE)
    assert "doctor" not in cluster.log(job)
