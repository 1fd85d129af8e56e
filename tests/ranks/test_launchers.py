"""However a run is started, it is the same run; what `accelerate launch` asks for beside processes is not followed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks.accelerate_launch import not_followed
from ranks.environment import Environment
from ranks.meeting import meet
from tests.helpers.processes import ROOT, Captured, free_port, process_variables, train_events
from tests.helpers.resuming import flags_of
from utils.errors import TrainingError

ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
}


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, []),
        ({"ACCELERATE_USE_CPU": "False", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, []),
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            ["ACCELERATE_MIXED_PRECISION=bf16 is not followed; give --mixed_prec"],
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
            ["ACCELERATE_USE_FSDP=true is not followed; give --enable_fsdp", "its variables FSDP_* are not followed"],
        ),
        (
            {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
            ["ACCELERATE_DYNAMO_BACKEND=INDUCTOR is not followed; give --comp"],
        ),
        ({"ACCELERATE_DEBUG_MODE": "true"}, ["ACCELERATE_DEBUG_MODE=true is not followed; the flags of this run"]),
        ({"ACCELERATE_USE_CPU": "True"}, ["ACCELERATE_USE_CPU=True is not followed; hide the GPUs"]),
        ({"MASTER_ADDR": "127.0.0.1"}, ["it was asked for several processes and started one; add its --multi_gpu"]),
        ({"MASTER_ADDR": "127.0.0.1", "RANK": "0"}, []),
    ],
)
def test_what_accelerate_launch_asks_for_and_a_run_does_not_follow_has_a_line(
    variables: dict[str, str], named: list[str]
) -> None:
    lines = not_followed(ACCELERATE | variables, has_gpu=True)
    assert len(lines) == len(named), lines
    for line, words in zip(lines, named, strict=True):
        assert line.startswith("accelerate launch: ")
        assert words in line


def test_variables_of_accelerate_mean_nothing_without_it() -> None:
    assert not not_followed({"FSDP_VERSION": "2", "MASTER_ADDR": "127.0.0.1"}, has_gpu=True)


def test_a_cpu_that_was_asked_for_is_what_there_is_without_a_gpu() -> None:
    assert not not_followed(ACCELERATE | {"ACCELERATE_USE_CPU": "True"}, has_gpu=False)


def test_rank_0_says_who_joined_and_whom_it_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.meeting.LOOK_SECONDS", 0.2)
    monkeypatch.setattr("ranks.meeting._SAY_SECONDS", 0.4)
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    env = Environment(0, 0, world_size=5, local_world_size=5, launched=True, launcher_has_store=True)

    others = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # a store that waits answers nobody else

    def come() -> None:
        others.wait(["attempt"])
        name = others.get("attempt").decode()
        for rank in (1, 3, 4):
            others.set(f"{name}/{rank}", str(rank))

    with ThreadPoolExecutor() as threads:
        threads.submit(come)
        with pytest.raises(TrainingError, match=r"rank 2 did not come for 1 s"):
            meet(store, env, limit=timedelta(seconds=1))
    lines = capsys.readouterr().out.splitlines()
    assert "4 of 5 ranks are here; waiting for rank 2" in " ".join(line for line in lines if "joined" in line)
    assert any(line.startswith("waiting for rank 2 to come (") for line in lines)


@pytest.mark.slow
def test_every_launcher_starts_the_same_run(tiny_model: Path, tmp_path: Path) -> None:
    """python, torchrun, torchrun on two hosts, accelerate launch: the same losses, to rounding and bit by bit."""
    torchrun, accelerate = ["-m", "torch.distributed.run"], ["-m", "accelerate.commands.accelerate_cli", "launch"]
    host = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_id", "1"]
    host += ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    two = ["--num_machines", "1", "--num_processes", "2", "--main_process_port", str(free_port())]
    launchers: dict[str, list[list[str]]] = {
        "python": [[]],
        "torchrun": [[*torchrun, "--standalone", "--nproc_per_node", "2"]],
        "hosts": [[*torchrun, *host]] * 2,
        "accelerate": [[*accelerate, "--multi_gpu", *two, "--mixed_precision", "fp16", "--dynamo_backend", "no"]],
        "single": [[*accelerate, *two, "--mixed_precision", "no", "--dynamo_backend", "no"]],
    }
    losses, printed, variables = {}, {}, process_variables({})
    for name, words in launchers.items():
        given = [
            "--max_train_step",
            "3",
            "--save_every_steps",
            "0",
            "--save_model",
            "False",
            "--run_validation",
            "False",
        ]
        flags = [str(ROOT / "finetuning.py"), *flags_of(tiny_model, tmp_path / name, *given)]
        outcomes = [process.outcome(300) for process in [Captured([*w, *flags], ROOT, variables) for w in words]]
        assert [outcome.status for outcome in outcomes] == [0] * len(words), outcomes
        printed[name] = "".join(outcome.stdout for outcome in outcomes)
        losses[name] = [event["loss"] for event in train_events(tmp_path / name)]
    assert len(losses["torchrun"]) == 3
    assert losses["torchrun"] == losses["hosts"] == losses["accelerate"]
    assert losses["python"] == losses["single"] == pytest.approx(losses["torchrun"], rel=1e-5)
    assert "accelerate launch: ACCELERATE_MIXED_PRECISION=fp16 is not followed" in printed["accelerate"]
    assert "accelerate launch: it was asked for several processes and started one" in printed["single"]
    for name in ("python", "torchrun", "hosts"):
        assert "accelerate launch: " not in printed[name]
