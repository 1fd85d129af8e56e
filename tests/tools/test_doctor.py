"""What the doctor says without any network: wrong options, nodes that differ, and what speeds mean for a step."""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.flags import parse_flags
from planning.cost.link_speeds import expected_speeds
from planning.cost.traffic import Traffic, find_traffic, seconds_per_step
from planning.machines.group_speeds import GroupSpeeds, Speed, Speeds, read_speeds
from planning.machines.hardware import Hardware, parse_hardware
from planning.machines.planned_environment import planned_environment, planned_hardware
from planning.model.planned_model import build_planned_model
from planning.planned_run import plan_of
from policies.sharding import Layout
from ranks.environment import lone_process
from resolving.resolved import resolve
from tests.helpers.processes import ROOT, ProcessGroup
from tools.doctor import main
from tools.network import one_machine
from tools.network.identity import code_digest, describe_node, differences
from tools.network.names import interfaces_for_nccl
from tools.network.ranks import planned_step, prediction
from utils.errors import ConfigError
from utils.parameters import count_weights

FULL = Layout("fully_shard", "FULL_SHARD", (1, 4), reshard_after_forward=True)


def ring(size: int, bytes_per_second: float) -> GroupSpeeds:
    """A ring in which every rank sends and receives so many bytes per second together."""
    per_byte = 2 * (size - 1) / size / bytes_per_second  # what it sends, and as much that it receives
    return GroupSpeeds(size, Speed(0, per_byte), Speed(0, per_byte), Speed(0, 2 * per_byte))


def traffic(num_bytes: int) -> Traffic:
    return Traffic(
        units_bytes=num_bytes,
        root_bytes=0,
        gradient_bytes=num_bytes,
        num_units=33,
        num_trained_units=32,
        num_micro_batches=1,
        reduces_once=True,
    )


def test_one_machine_is_checked_without_an_endpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_machine, "shared_memory_bytes", lambda: 64 * 2**20)
    assert main(["--", "--model_name", "M"]) == 0
    checked, warning, _ = capsys.readouterr().out.splitlines()
    assert checked.startswith(f"doctor: checked this machine alone, {socket.gethostname()}: ")
    assert f"torch {torch.__version__}" in checked
    assert "/dev/shm has 64.00 MiB" in warning
    assert "docker run --shm-size 16g" in warning
    assert main(["--", "--lr", "x"]) == 2


def test_a_machine_that_cannot_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^peft: not installed here; pip install"):
        one_machine.check_machine({"torch": "2", "transformers": "5"}, print)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME=ib: this node has no such interface"):
        one_machine.check_machine(describe_node([])["versions"], print)


@pytest.mark.parametrize("endpoint", ["node-0", "node-0:", ":29500", "node-0:http", "node-0:70000", "node-0:0"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rdzv_endpoint", endpoint]) == 2
    assert capsys.readouterr().err.startswith("error: --rdzv_endpoint: ")


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("ib", {"ib0", "ib1"}),
        ("ib1,eth", {"ib1", "eth0"}),
        ("=ib", set()),
        ("=ib1:1,eth0", {"ib1", "eth0"}),
        ("^lo,ib", {"eth0"}),
        ("^=ib0", {"ib1", "eth0", "lo"}),
        ("ens", set()),
    ],
)
def test_interfaces_are_those_that_nccl_would_use(text: str, used: set[str]) -> None:
    assert interfaces_for_nccl(text, ["lo", "eth0", "ib0", "ib1"]) == used


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--nnodes", "0"], "--nnodes"),
        (["--nnodes", "1:2:3"], "--nnodes"),
        (["--node_rank", "2"], "--node_rank"),
        (["--", "--model_name", "M", "--lr", "fast"], "--lr"),
    ],
)
def test_options_that_cannot_hold_are_refused_before_anyone_waits(
    words: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--rdzv_endpoint", "node-0:29500", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag}: ")


def test_the_endpoint_is_required_for_several_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nnodes", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: --rdzv_endpoint: ")


def test_flags_of_a_run_without_a_launcher_are_shown_where_they_go(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--enable_fsdp", "--model_name", "M x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --enable_fsdp: without a launcher, a run's flags come after --; ")
    assert said.endswith("give torchrun [...] -m tools.doctor --enable_fsdp --model_name 'M x'\n")


def test_what_nodes_differ_in_is_named_with_both_values() -> None:
    flags = ["--model_name", "M", "--lr", "1"]
    first, other = describe_node(flags), describe_node([*flags[:3], "2"])
    assert differences({"a": first, "b": describe_node(flags)}) == []
    other["versions"]["torch"] = "2.0"
    versions, words = differences({"a": first, "b": other})
    assert versions == f"torch: a has {first['versions']['torch']}, b has 2.0; give all nodes the same"
    assert words == "flags: a has --lr 1, b has --lr 2; give the same"
    (words,) = differences({"a": first, "b": describe_node([*flags, "--enable_fsdp"])})
    assert words == "flags: a has fewer flags, b has --enable_fsdp; give the same"


def test_a_changed_line_of_code_is_another_digest(tmp_path: Path) -> None:
    for name in ("finetuning.py", "tools/__init__.py", "tools/x.py", "datasets/y.py", "tests/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    before = code_digest(tmp_path)
    (tmp_path / "tests/test_z.py").write_text("2")
    assert code_digest(tmp_path) == before
    for name in ("finetuning.py", "tools/x.py", "datasets/y.py"):
        (tmp_path / name).write_text("2")
        assert code_digest(tmp_path) != before
        (tmp_path / name).write_text("1")
    assert code_digest(ROOT) != before


def test_full_shard_moves_six_times_the_parameters() -> None:
    """Gathered twice and reduced once, each sent and received: 6 x bytes x (N - 1) / N per micro-batch."""
    num_bytes, rate = 26e9, 0.734e9
    world, node = ring(4, rate), ring(2, 100 * rate)
    seconds = seconds_per_step("FULL_SHARD", traffic(int(num_bytes)), Speeds(world, node, ring(2, rate)))
    assert seconds == pytest.approx(6 * num_bytes * 3 / 4 / rate)


def test_sharding_inside_nodes_is_advised_where_it_communicates_less() -> None:
    slow, fast = 1e9, 100e9
    apart = Speeds(ring(4, slow), ring(2, fast), ring(2, slow))
    lines = prediction(FULL, traffic(10**9), apart)
    full, hybrid = (seconds_per_step(layout, traffic(10**9), apart) for layout in ("FULL_SHARD", "HYBRID_SHARD"))
    assert lines[0] == f"FULL_SHARD communicates {full:.3g} s per step, less what computing hides"
    assert lines[1].startswith(f"warning: --hsdp, sharded inside each node, would communicate {hybrid:.3g} s, ")
    assert f" {full / hybrid:.1f} times less" in lines[1]
    alone = GroupSpeeds(1, *[Speed(0, 0)] * 3)
    assert len(prediction(FULL, traffic(10**9), Speeds(ring(4, fast), ring(4, fast), alone))) == 1


@pytest.mark.parametrize("more", [[], ["--use_peft"], ["--pure_bf16"]], ids=["full", "lora", "bf16"])
def test_the_traffic_is_that_of_the_model(more: list[str], tiny_model: Path) -> None:
    config = parse_flags(["--model_name", str(tiny_model), "--enable_fsdp", *more])
    resolved = resolve(config, lone_process())
    found = find_traffic(build_planned_model(resolved, lone_process()))
    model: Any = resolved.task.AUTO_MODEL.from_pretrained(tiny_model)
    num_weights = sum(counted.num_weights for counted in count_weights(model))
    gathered = found.units_bytes + found.root_bytes
    assert found.num_units == 4  # two layers, the embedding, the root
    if "--use_peft" in more:
        num_adapter_weights = found.gradient_bytes // 4
        assert gathered == 4 * (num_weights + num_adapter_weights)
        assert (num_adapter_weights, found.num_trained_units) == (2 * 2 * 2 * 8 * 32, 2)  # A and B of q and v, rank 8
    else:
        assert gathered == (2 if "--pure_bf16" in more else 4) * num_weights
        assert (found.gradient_bytes, found.num_trained_units) == (4 * num_weights, 4)


def test_a_step_is_planned_at_the_speeds_that_were_measured(tiny_model: Path) -> None:
    hardware = parse_hardware("H200", nodes=2)  # nothing is known of their network but what was measured
    config = parse_flags(["--model_name", str(tiny_model), "--enable_fsdp"])
    env = planned_environment(hardware, config.train_config)
    planned = build_planned_model(resolve(config, env), env)
    node = GroupSpeeds(1, *[Speed(0, 0)] * 3)
    slow, slower = (planned_step(planned, hardware, Speeds(ring(2, r), node, ring(2, r))) for r in (1e6, 1e5))
    assert slow[0].startswith("a step should take ")
    assert slow[0].endswith(" tokens/s per device")
    assert "most of it for communication" in slower[0]
    assert float(slower[0].split()[4]) > 5 * float(slow[0].split()[4])


def test_what_ranks_measure_is_what_a_plan_takes(tiny_model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    report = tmp_path / "speeds.json"
    outcomes = process_group.run(partial(main, ["--json", str(report)]), 2)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes[0].stderr
    assert f"doctor: the speeds are in {report}, for --network_speeds" in outcomes[0].stdout
    speeds = read_speeds(report)
    assert (speeds.world.size, speeds.node.size, speeds.between.size) == (2, 2, 1)
    said = json.loads(report.read_text())["speeds"]["world"]["all_gather"]["seconds_per_byte"]
    assert speeds.world.all_gather.gigabytes_per_second == pytest.approx(1e-9 / said)

    flags = ["--model_name", str(tiny_model), "--enable_fsdp", "--dry_run", "--dry_run_hardware", "2xH200"]

    def planned(*more: str) -> float:
        config = parse_flags([*flags, *more])
        plan = plan_of(config, planned_hardware(config.train_config, config.planning_config, lone_process()))
        assert plan.time is not None
        return plan.time.communication_seconds

    assert planned("--network_speeds", str(report)) > 2 * planned(), "gloo over loopback, in place of NVLink"


def test_speeds_that_the_disk_refuses_are_said_in_one_line(process_group: ProcessGroup) -> None:
    (outcome,) = process_group.run(partial(main, ["--json", "/dev/full"]), 1)
    said = "error: /dev/full cannot be written (No space left on device); make room there"
    assert (outcome.status, outcome.stderr.splitlines()) == (1, [said])


def test_other_numbers_of_machines_count_with_the_links_that_were_measured() -> None:
    measured = Speeds(ring(4, 1e9), ring(2, 50e9), ring(2, 1e9))
    two = Hardware(parse_hardware("H200").card, cards_per_node=2, nodes=2, measured=measured)
    assert expected_speeds(two) == measured
    eight = expected_speeds(Hardware(two.card, cards_per_node=2, nodes=8, measured=measured))
    assert eight is not None
    assert eight.world.all_gather.seconds_per_byte == pytest.approx(15 / 16 * 2 / 1e9)
    assert eight.node.all_gather.seconds_per_byte == pytest.approx(measured.node.all_gather.seconds_per_byte)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("{", "holds no speeds of ranks"),
        ('{"speeds": {"world": 3}}', "holds no speeds of ranks"),
        ("{sizes}", "has groups whose sizes do not fit together"),
        ("{zero}", "holds no speeds of ranks"),
    ],
)
def test_a_file_without_speeds_is_refused(text: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    whole = Speeds(ring(4, 1e9), ring(2, 1e9), ring(2, 1e9)).to_dict()
    texts = {
        "{sizes}": whole | {"node": whole["world"]},
        "{zero}": whole | {"node": {**whole["node"], "all_reduce": {"latency_seconds": 0, "seconds_per_byte": 0}}},
    }
    if text is not None:
        path.write_text(json.dumps({"speeds": texts[text]}) if text in texts else text)
    with pytest.raises(ConfigError, match=f"--network_speeds: .*speeds.json {reason}"):
        read_speeds(path)
