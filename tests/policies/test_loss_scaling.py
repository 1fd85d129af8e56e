"""fp16's loss scale: torch's own sequence of scales, and a step that overflows changes nothing on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from policies.loss_scaling import FIRST_SCALE, LEAST_SCALE, LossScaler
from tests.helpers.overflowing import SILENT, make_overflowing_model, write_dataset_function
from tests.helpers.pairwise import keep_fast
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from tests.helpers.refusals import error_lines

LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0"]


@given(
    growth_interval=st.integers(1, 4),
    stretches=st.lists(st.tuples(st.booleans(), st.integers(1, 25)), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_scales_are_those_of_torchs_own_scaler_down_to_1(
    growth_interval: int, stretches: list[tuple[bool, int]]
) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.amp.GradScaler("cpu", growth_interval=growth_interval)
    ours = LossScaler(active=True, growth_interval=growth_interval)
    for overflowed in (overflows for overflows, length in stretches for _ in range(length)):
        if overflowed and not ours.can_fall:
            assert theirs.get_scale() == LEAST_SCALE
            break  # the run ends here
        theirs.scale(weight.sum())
        weight.grad = torch.full((3,), torch.inf if overflowed else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflowed=overflowed)
        their_state = theirs.state_dict()
        assert ours.state_dict() == {"scale": their_state["scale"], "growth_tracker": their_state["_growth_tracker"]}


def test_the_scale_begins_as_torchs_and_never_becomes_infinite() -> None:
    theirs = torch.amp.GradScaler("cpu")
    scaler = LossScaler(active=True)
    assert scaler.scale == FIRST_SCALE == theirs.get_scale()
    assert scaler.growth_interval == theirs.get_growth_interval()
    scaler = LossScaler(active=True, growth_interval=1)
    for _ in range(300):
        scaler.update(overflowed=False)
    assert scaler.scale == 2.0**127
    for _ in range(300):
        scaler.update(overflowed=True)
    assert scaler.scale == 1.0
    assert not scaler.can_fall


@given(history=st.lists(st.booleans(), max_size=30), future=st.lists(st.booleans(), max_size=30))
def test_a_restored_scaler_goes_on_as_the_one_that_was_saved(history: list[bool], future: list[bool]) -> None:
    scaler, restored = (LossScaler(active=True, growth_interval=3) for _ in range(2))
    for overflowed in history:
        scaler.update(overflowed=overflowed)
    restored.load_state_dict(scaler.state_dict())
    for overflowed in future:
        scaler.update(overflowed=overflowed)
        restored.update(overflowed=overflowed)
        assert restored.state_dict() == scaler.state_dict()


def test_without_fp16_the_scale_is_1_whatever_happens() -> None:
    scaler = LossScaler(active=False)
    scaler.load_state_dict({"scale": 8.0, "growth_tracker": 3})  # of an fp16 run that goes on in another precision
    for _ in range(3000):
        scaler.update(overflowed=False)
    assert scaler.scale == 1.0
    assert not scaler.can_fall
    assert scaler.state_dict() is None
    active = LossScaler(active=True)
    active.load_state_dict(None)
    assert active.scale == FIRST_SCALE


@pytest.fixture(scope="module")
def overflowing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_overflowing_model(tiny_model, tmp_path_factory.mktemp("models") / "overflowing")


def flags_of(model: Path, output: Path, condition: str, *flags: str) -> list[str]:
    """Six steps an epoch, of two rows each; padded, so that a row has its batch for itself."""
    recipe = write_dataset_function(output.with_suffix(".py"), condition)
    given = ["--model_name", str(model), "--output_dir", str(output), "--dataset", recipe, "--use_fp16"]
    given += ["--batching_strategy", "padding", "--batch_size_training", "1", "--global_batch_size", "2"]
    return [*given, "--num_workers_dataloader", "0", "--run_validation", "False", "--lr", "5e-3", *flags]


def train_and_watch(argv: Sequence[str]) -> int:
    """finetuning.main for two epochs; leaves in the run folder what this rank saw of every step."""
    import finetuning
    from configs.flags import parse_flags
    from policies.optimizers.host_optimizer import wait_for_weights
    from preparation.prepare import prepare
    from ranks.environment import read_environment
    from reporting.instruments import DataWait
    from run_folder.lock import RunLock
    from supervision.watchdog import Watchdog
    from utils.local_tensors import local_tensor

    def held() -> list[torch.Tensor]:
        wait_for_weights(trainable.optimizer)
        tensors = [p.detach() for p in trainable.model.parameters() if p.requires_grad]
        tensors += [t for state in trainable.optimizer.state.values() for t in state.values()]
        return [local_tensor(tensor).clone() for tensor in tensors]

    env = read_environment()
    watchdog = Watchdog(env)
    job = prepare(parse_flags(argv), env, watchdog, RunLock())
    trainable = job.trainable
    steps = []
    for epoch in (0, 1):
        for micro_batches in job.loaders.train.epoch(epoch, 0):
            before, scale = held(), trainable.scaler.scale
            queued = finetuning.queue_step(job, micro_batches, DataWait(0.0, 0.0), ends_epoch=False)
            after = held()
            finetuning.finish_step(job, queued)
            unchanged = len(before) == len(after) and all(map(torch.equal, before, after))
            has_token = any(bool((batch.input_ids == SILENT).any()) for batch in micro_batches)
            steps.append({"has_token": has_token, "unchanged": unchanged, "scales": (scale, trainable.scaler.scale)})
    whole = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in trainable.model.parameters()]
    torch.save({"steps": steps, "weights": whole}, job.folder / f"rank{env.rank}.pt")
    job.saver.close()
    watchdog.stop()
    return 0


LAYOUTS = {
    "FULL_SHARD": ["--enable_fsdp"],
    "NO_SHARD": [],
    "NO_SHARD with the optimizer on the CPU": ["--optimizer_cpu_offload"],
    "FULL_SHARD in host memory": ["--enable_fsdp", "--fsdp_cpu_offload"],
    "DDP": LORA,
    "FULL_SHARD of adapters": ["--enable_fsdp", *LORA],
}


@pytest.mark.parametrize("layout", keep_fast(LAYOUTS, ["FULL_SHARD"], full=["NO_SHARD", "FULL_SHARD of adapters"]))
def test_where_one_rank_overflows_every_rank_leaves_out_that_update(
    layout: str, overflowing: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = flags_of(overflowing, tmp_path / "run", "i == 7", *LAYOUTS[layout], "--gradient_clipping")
    outcomes = process_group.run(partial(train_and_watch, given), 2)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes[0].stderr
    seen: list[dict[str, Any]] = [torch.load(tmp_path / f"run/rank{rank}.pt") for rank in (0, 1)]
    events = train_events(tmp_path / "run")
    scale, num_overflows = FIRST_SCALE, 0
    for event, step, other in zip(events, seen[0]["steps"], seen[1]["steps"], strict=True):
        overflows = step["has_token"] or other["has_token"]
        assert not (step["has_token"] and other["has_token"])
        assert step["unchanged"] == other["unchanged"] == overflows
        assert step["scales"] == other["scales"] == (scale, scale / 2 if overflows else scale)
        assert event["loss_scale"] == scale
        assert (event["grad_norm"] is None) == overflows
        assert event["loss"] > 0
        if overflows:
            num_overflows += 1
            said = f"step {event['step']}: fp16 gradients overflowed: no update, loss scale {scale:g} -> {scale / 2:g}"
            assert outcomes[0].stdout.count(said) == 1
            scale /= 2
    assert num_overflows == 2  # once an epoch
    assert "overflowed" not in outcomes[1].stdout
    assert not any("lr_scheduler.step()" in outcome.stderr for outcome in outcomes)
    for one, other in zip(seen[0]["weights"], seen[1]["weights"], strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


def test_gradients_that_overflow_at_scale_1_end_the_run(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    model = make_overflowing_model(tiny_model, tmp_path / "model", last_norm=1e3)
    given = flags_of(model, tmp_path / "run", "True", "--num_epochs", "9", "--save_every_steps", "0")
    (outcome,) = process_group.run(given, 1)
    assert outcome.status == 1
    (line,) = error_lines(outcome.stderr)
    assert line.startswith("error: step 17: the gradient is not finite, and the update was not made; rows of")
    assert "fp16 holds at most 65504" in line
    events = train_events(tmp_path / "run")
    assert [event["loss_scale"] for event in events] == [2.0**exponent for exponent in range(16, 0, -1)]
    assert {event["grad_norm"] for event in events} == {None}
    assert [event["lr"] for event in events] == [5e-3 * 0.85 ** (step // 6) for step in range(16)]  # moved on
    assert read_metrics(tmp_path / "run")[-1]["status"] == "failed"
    assert "lr_scheduler.step()" not in outcome.stderr


def test_a_loss_that_is_not_finite_ends_the_run_as_ever_and_says_what_fp16_holds(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = flags_of(tiny_model, tmp_path / "run", "False", "--optimizer", "SGD")
    given[given.index("--lr") + 1] = "1e9"
    (outcome,) = process_group.run(given, 1)
    assert outcome.status == 1
    (line,) = error_lines(outcome.stderr)
    assert line.startswith("error: step 2: the loss is not finite, and the update was not made; rows of")
    assert "fp16 holds at most 65504" in line
    assert [event["step"] for event in train_events(tmp_path / "run")] == [1]
