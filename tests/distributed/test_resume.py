"""A resumed run is the run that was never interrupted: bit for bit on the same ranks, to rounding on others."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from run_folder.checkpoint_folder import checkpoints, damage
from tests.helpers.checkpoints import forget_marks
from tests.helpers.made import Made
from tests.helpers.overflowing import make_overflowing_model, write_dataset_function
from tests.helpers.pairwise import select_values, slow_but
from tests.helpers.processes import Outcome, ProcessGroup, log_lines, read_metrics, train_events
from tests.helpers.resuming import NUM_STEPS, SHARDED, as_if_killed_after, assert_bit_equal, flags_of, results
from utils.wording import plural

FEATURES = {
    "full": ["--gradient_clipping", "--gradient_clipping_threshold", "0.5"],
    "lora": ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0.3"],
}
BATCHING = {
    "packing": ["--batching_strategy", "packing"],
    "padding": ["--batching_strategy", "padding"],
    "streaming": ["--streaming", "--batching_strategy", "packing"],
}


# Of the pairs of features and batching those that draw: dropout's masks, and the order of rows.
SLOW_CASES = [("lora", "padding", 2), ("lora", "streaming", 2), ("full", "packing", 2)]
MORE_CASES = [("lora", "padding", 1), ("lora", "packing", 1), ("lora", "streaming", 1), ("full", "padding", 1)]
MORE_CASES += [("lora", "packing", 2), ("full", "padding", 2), ("full", "streaming", 2)]
VALIDATION = {"validated": [], "plain": ["--run_validation", "False"]}


@pytest.fixture(scope="module")
def alone(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A whole run on one rank, `validated` or `plain`. A test that writes into its folder takes a copy."""

    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("alone") / name
        process_group.train(flags_of(tiny_model, folder, *VALIDATION[name]), 1)
        return folder

    return Made(run)


@pytest.mark.parametrize(
    ("features", "batching", "ranks"),
    [
        ("full", "packing", 1),
        ("full", "streaming", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES),
        *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_CASES),
    ],
)
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(
    features: str, batching: str, ranks: int, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = [*FEATURES[features], *BATCHING[batching], *(SHARDED if ranks > 1 else []), "--run_validation", "False"]
    process_group.train(flags_of(tiny_model, tmp_path / "whole", *given), ranks)
    killed = as_if_killed_after(3, tmp_path / "whole", tmp_path / "killed")
    outcome = process_group.train(flags_of(tiny_model, killed, *given, "--resume", "auto"), ranks)[0]
    assert f"resume: from {killed / 'checkpoints/step-00000003'}, after step 3" in outcome.stdout
    assert_bit_equal(killed, tmp_path / "whole")


def test_on_other_ranks_a_run_keeps_its_learning_rate_and_the_length_of_its_epochs(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Both depend on the number of ranks that it began with."""
    given = ["--lr_scale_with_world_size", "linear", "--limit_train_batches", "6", "--run_validation", "False"]
    process_group.train(flags_of(tiny_model, tmp_path / "whole", *given), 2)
    killed = as_if_killed_after(3, tmp_path / "whole", tmp_path / "killed")
    (outcome,) = process_group.train(flags_of(tiny_model, killed, *given, "--resume", "auto"), 1)
    assert "scaled with 2 ranks" in outcome.stdout
    wanted, found = train_events(tmp_path / "whole"), train_events(killed)
    assert [event["epoch"] for event in found] == [event["epoch"] for event in wanted] == [1, 1, 1, 2, 2, 2, 3, 3]
    assert [event["lr"] for event in found] == [event["lr"] for event in wanted]
    assert [event["num_tokens"] for event in found] == [event["num_tokens"] for event in wanted]
    assert [event["loss"] for event in found] == pytest.approx([event["loss"] for event in wanted], rel=1e-5)


@pytest.mark.parametrize("ranks", slow_but(1, [1, 2]))
def test_evaluations_and_the_best_weights_are_those_of_the_uninterrupted_run(
    ranks: int, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """The learning rate makes the run worse at its end, and the best evaluation is before the kill or after it."""
    given = ["--eval_every_steps", "2", "--eval_before_training", "--warmup_steps", "8", "--lr", "0.3"]
    process_group.train(flags_of(tiny_model, tmp_path / "whole", *given), ranks)
    for step in (3, 6):
        killed = as_if_killed_after(step, tmp_path / "whole", tmp_path / f"killed{step}")
        process_group.train(flags_of(tiny_model, killed, *given, "--resume", "auto"), ranks)
        assert_bit_equal(killed, tmp_path / "whole")
        evals, wanted = (
            [(e["step"], e["epoch"], e["loss"]) for e in read_metrics(run) if e["event"] == "eval"]
            for run in (killed, tmp_path / "whole")
        )
        assert evals == wanted
        kinds = [event["event"] for event in read_metrics(killed)]
        assert (kinds.count("end"), kinds.count("epoch")) == (1, 1)


def test_a_run_that_was_raised_is_bit_equal_to_one_that_was_longer_from_the_start(
    alone: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    process_group.train(flags_of(tiny_model, short, "--run_validation", "False", "--max_train_step", "5"), 1)
    process_group.train(flags_of(tiny_model, short, "--run_validation", "False", "--resume", "auto"), 1)
    assert_bit_equal(short, alone["plain"])


@pytest.mark.slow
def test_several_epochs_go_on_in_the_epoch_where_they_were(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = ["--global_batch_size", "32", "--num_epochs", "3", "--max_train_step", "0"]
    process_group.train(flags_of(tiny_model, tmp_path / "whole", *given), 1)
    assert results(tmp_path / "whole")[-1][:2] == (9, 3)
    for step in (3, 6, 9):  # the ends of epochs: before or after what is due there
        killed = as_if_killed_after(step, tmp_path / "whole", tmp_path / f"killed{step}")
        process_group.train(flags_of(tiny_model, killed, *given, "--resume", "auto"), 1)
        assert_bit_equal(killed, tmp_path / "whole")
        epochs, wanted = (
            [(e["epoch"], e["train_loss"], e["eval_loss"]) for e in read_metrics(run) if e["event"] == "epoch"]
            for run in (killed, tmp_path / "whole")
        )
        assert epochs == wanted


ELSEWHERE = {
    "2 ranks to 1": (2, SHARDED, 1, []),
    "1 rank to 4": (1, [], 4, SHARDED),
    "FULL_SHARD to NO_SHARD": (2, SHARDED, 2, []),
    "NO_SHARD to FULL_SHARD": (2, [], 2, SHARDED),
    "FULL_SHARD to HYBRID_SHARD": (2, SHARDED, 4, [*SHARDED, "--hsdp", "--sharding_group_size", "2"]),
    "onto CPU offload": (2, SHARDED, 2, [*SHARDED, "--fsdp_cpu_offload"]),
    "off CPU offload": (2, [*SHARDED, "--fsdp_cpu_offload"], 1, []),
    "onto an offloaded optimizer": (1, [], 2, [*SHARDED, "--optimizer_cpu_offload"]),
    "off an offloaded optimizer": (2, [*SHARDED, "--optimizer_cpu_offload"], 2, SHARDED),
}

MOVING = ["--run_validation", "False", "--batching_strategy", "padding", "--checkpoint_type"]


@pytest.fixture(scope="module")
def moving(tied_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A whole run that others go on from, by its ranks, the kind of its checkpoints, and the flags of its layout."""

    def run(ranks: int, kind: str, *layout: str) -> Path:
        folder = tmp_path_factory.mktemp("moving") / "run"
        process_group.train(flags_of(tied_model, folder, *MOVING, kind, *layout), ranks)
        return folder

    return Made(run)


@pytest.mark.parametrize(
    ("case", "kind"),
    select_values(
        [*itertools.product(ELSEWHERE, ("SHARDED_STATE_DICT", "FULL_STATE_DICT"))],
        lambda case: (str(ELSEWHERE[case[0]][1]), str(ELSEWHERE[case[0]][3]), case[1]),
        fast=lambda case: case[0].startswith("onto"),
    ),
)
def test_a_run_goes_on_elsewhere_with_the_same_losses(
    case: str, kind: str, moving: Made, tied_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    ranks, layout, ranks_after, layout_after = ELSEWHERE[case]
    whole = moving[ranks, kind, *layout]
    moved = as_if_killed_after(3, whole, tmp_path / "moved")
    process_group.train(flags_of(tied_model, moved, *MOVING, kind, *layout_after, "--resume", "auto"), ranks_after)
    for found, wanted in zip(results(moved), results(whole), strict=True):
        assert found[:2] == wanted[:2]
        assert found[2:4] == pytest.approx(wanted[2:4], rel=1e-5)


FP16 = {  # rows that overflow, ranks and features, then ranks and features after the kill, and the scale at the kill
    "FULL_SHARD": ("i == 7", 2, SHARDED, 2, SHARDED, 2.0**15),
    "no update yet": ("True", 2, SHARDED, 2, SHARDED, 2.0**13),
    "LoRA under DDP": ("i == 7", 2, FEATURES["lora"], 2, FEATURES["lora"], 2.0**15),
    "2 ranks to 1": ("i == 7", 2, SHARDED, 1, [], 2.0**15),
    "1 rank to NO_SHARD": ("i == 7", 1, [], 2, [], 2.0**15),
}


@pytest.mark.parametrize("case", slow_but(1, FP16, num_slow=1))
def test_the_loss_scale_of_fp16_goes_on_where_it_was(
    case: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Once an epoch, of three steps, a row overflows; or every row of every step."""
    condition, ranks, features, ranks_after, features_after, scale = FP16[case]
    model = make_overflowing_model(tiny_model, tmp_path / "model")
    given = [
        "--use_fp16",
        "--dataset",
        write_dataset_function(tmp_path / "recipe.py", condition),
        "--run_validation",
        "False",
    ]
    given += ["--batching_strategy", "padding"]
    process_group.train(flags_of(model, tmp_path / "whole", *given, *features), ranks)
    killed = as_if_killed_after(3, tmp_path / "whole", tmp_path / "killed")
    saved = json.loads((killed / "checkpoints/step-00000003/state.json").read_text())["loss_scaler"]
    last_overflow = max(step for step, _, _, grad_norm, *_ in results(tmp_path / "whole")[:3] if grad_norm is None)
    assert saved == {"scale": scale, "growth_tracker": 3 - last_overflow}
    process_group.train(flags_of(model, killed, *given, *features_after, "--resume", "auto"), ranks_after)
    found, wanted = results(killed), results(tmp_path / "whole")
    assert len({r[-1] for r in wanted}) >= 3  # it changes before the kill and after it
    if (ranks, features) == (ranks_after, features_after):
        assert_bit_equal(killed, tmp_path / "whole")
    assert [(r[0], r[1], *r[4:]) for r in found] == [(r[0], r[1], *r[4:]) for r in wanted]
    for place in (2, 3):
        values, expected = ([r[place] or 0.0 for r in rows] for rows in (found, wanted))
        assert values == pytest.approx(expected, rel=1e-3)


def test_a_checkpoint_of_a_version_without_a_loss_scale_is_resumed(
    alone: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    killed = as_if_killed_after(3, alone["plain"], tmp_path / "killed")
    file = killed / "checkpoints/step-00000003/state.json"
    state = json.loads(file.read_text())
    assert state.pop("loss_scaler") is None
    del state["settings"]["train_config"]["peft_dtype"]
    file.write_text(json.dumps(state))
    forget_marks(file.parent)
    process_group.train(flags_of(tiny_model, killed, "--run_validation", "False", "--resume", "auto"), 1)
    assert_bit_equal(killed, alone["plain"])


@pytest.mark.slow
def test_the_global_batch_is_the_checkpoints_and_accumulation_follows(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = [*flags_of(tiny_model, tmp_path / "whole", "--run_validation", "False")]
    cut = given.index("--global_batch_size")
    given = [*given[:cut], *given[cut + 2 :], "--gradient_accumulation_steps", "2"]
    process_group.train(given, 2)
    moved = as_if_killed_after(3, tmp_path / "whole", tmp_path / "moved")
    given[given.index("--output_dir") + 1] = str(moved)
    outcome = process_group.train([*given, "--resume", "auto"], 1)[0]
    assert (
        "gradient_accumulation_steps: 4 instead of 2: a resumed run keeps its global batch of 4 rows" in outcome.stdout
    )
    assert [r[2] for r in results(moved)] == pytest.approx([r[2] for r in results(tmp_path / "whole")], rel=1e-5)
    shutil.rmtree(moved)
    as_if_killed_after(3, tmp_path / "whole", moved)
    refused = process_group.run([*given, "--resume", "auto"], 3)[0]
    assert refused.status == 2
    assert "--resume: the checkpoint's global batch of 4 rows is no multiple of 1 (batch_size" in refused.stderr


def test_a_finished_run_has_nothing_left_to_do(
    alone: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    shutil.copytree(alone["validated"], tmp_path / "run")
    before = [event for event in read_metrics(tmp_path / "run") if event["event"] not in ("start", "end")]
    process_group.train(flags_of(tiny_model, tmp_path / "run", "--resume", "auto"), 1)
    after = [event for event in read_metrics(tmp_path / "run") if event["event"] not in ("start", "end")]
    assert after == before


def strip_figures(file: Path) -> None:
    kept = ("event", "step", "epoch", "rank", "phase")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    stripped = [{name: value for name, value in event.items() if name in kept} for event in events]
    file.write_text("".join(json.dumps(event) + "\n" for event in stripped))


def passed_over(outcome: Outcome) -> list[str]:
    """The incomplete checkpoints that a run named."""
    lines = [line for line in outcome.stdout.splitlines() if "passed over" in line]
    assert len(lines) <= 1
    return lines[0].split("): ")[1].split(", ") if lines else []


SPOILED: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "garbled": lambda file: file.write_bytes(b"\x00\xfe{'event' \n" * 9),
    "edited": lambda file: file.write_bytes(b'[]\n3\n{"step": 1}\n{"event": "train", "step": "7"}\n{"eve'),
    "stripped": strip_figures,
}
LEFT_OUT = {"missing": 0, "garbled": 9, "edited": 4, "stripped": 0}


@pytest.mark.parametrize("how", SPOILED)
def test_the_end_tells_the_last_step_even_if_earlier_metrics_were_lost(
    how: str, alone: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(alone["plain"], tmp_path / "run"))
    SPOILED[how](run / "metrics.jsonl")
    given = [*VALIDATION["plain"], "--resume", "auto", "--save_metrics"]
    (outcome,) = process_group.train(flags_of(tiny_model, run, *given), 1)
    said = [line for line in log_lines(outcome.stdout) if "metrics.jsonl" in line]
    line = f"resume: left out {plural(LEFT_OUT[how], 'line')} of {run}/metrics.jsonl without an event of a run"
    assert said == [line] * (LEFT_OUT[how] > 0)
    end = read_metrics(run)[-1]
    assert (end["event"], end["step"], end["status"]) == ("end", NUM_STEPS, "finished")


def test_auto_with_nothing_to_resume_starts_afresh(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = flags_of(tiny_model, tmp_path / "run", "--run_validation", "False", "--resume", "auto")
    process_group.train(given, 1)
    assert len(results(tmp_path / "run")) == NUM_STEPS
    killed_early = tmp_path / "early"
    killed_early.mkdir()
    shutil.copy(tmp_path / "run/run.yaml", killed_early)
    (killed_early / "metrics.jsonl").write_text('{"event": "train", "step": 1}\n')
    (killed_early / "checkpoints/step-00000006.incomplete").mkdir(parents=True)
    (killed_early / "checkpoints/step-00000003").mkdir()
    (killed_early / "checkpoints/step-00000003/state.json").write_text('{"state": {}, "settings": {}}')
    given[given.index("--output_dir") + 1] = str(killed_early)
    (outcome,) = process_group.train(given, 1)
    names = ("step-00000006.incomplete", "step-00000003")
    assert passed_over(outcome) == [f"{killed_early}/checkpoints/{name}" for name in names]
    assert results(killed_early) == results(tmp_path / "run")


def test_a_path_may_be_a_checkpoint_or_a_run_and_goes_on_in_another_folder(
    alone: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    whole = alone["validated"]
    killed = as_if_killed_after(3, whole, tmp_path / "k")
    newer = [f"{killed}/checkpoints/step-00000006.incomplete"]
    for path, named in ((whole / "checkpoints/step-00000003", []), (killed, newer)):
        other = tmp_path / f"other{len(named)}"
        (outcome,) = process_group.train(flags_of(tiny_model, other, "--resume", str(path)), 1)
        assert passed_over(outcome) == named
        assert_bit_equal(other, whole)
    assert len(train_events(whole)) == NUM_STEPS


def test_going_back_gives_up_the_later_checkpoints_when_there_is_a_new_one(
    alone: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(alone["validated"], tmp_path / "run"))
    names = [folder.name for folder in checkpoints(run / "checkpoints")]
    assert names == ["step-00000008", "step-00000006", "step-00000003"]
    back = ["--resume", str(run / "checkpoints/step-00000003"), "--max_train_step", "5"]
    process_group.train(flags_of(tiny_model, run, *back), 1)
    assert [folder.name for folder in checkpoints(run / "checkpoints")] == ["step-00000005", "step-00000003"]
    assert (run / "checkpoints/latest").read_text() == "step-00000005\n"


@pytest.mark.parametrize(
    ("beside", "kind"),
    [
        ("True", "FULL_STATE_DICT"),
        pytest.param("True", "SHARDED_STATE_DICT", marks=pytest.mark.full),
        pytest.param("False", "SHARDED_STATE_DICT", marks=pytest.mark.slow),
        pytest.param("False", "FULL_STATE_DICT", marks=pytest.mark.full),
    ],
)
def test_saving_beside_training_keeps_the_state_of_its_step(
    beside: str, kind: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = ["--run_validation", "False", "--async_save", beside, "--checkpoint_type", kind, *SHARDED]
    process_group.train(flags_of(tiny_model, tmp_path / "whole", *given, "--save_every_steps", "1"), 2)
    names = [folder.name for folder in checkpoints(tmp_path / "whole/checkpoints")]
    assert names == [f"step-{step:08d}" for step in range(NUM_STEPS, 0, -1)]
    saved = [event["step"] for event in read_metrics(tmp_path / "whole") if event["event"] == "checkpoint"]
    assert saved == list(range(1, NUM_STEPS + 1))
    killed = as_if_killed_after(7, tmp_path / "whole", tmp_path / "killed")
    process_group.train(flags_of(tiny_model, killed, *given, "--resume", "auto"), 2)
    assert_bit_equal(killed, tmp_path / "whole")


def test_the_best_evaluations_checkpoint_is_kept(tiny_model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    given = ["--eval_every_steps", "1", "--warmup_steps", "8", "--lr", "0.3", "--keep_best", "--keep_last", "1"]
    process_group.train(flags_of(tiny_model, tmp_path / "run", *given), 1)
    evals = {e["step"]: e["loss"] for e in read_metrics(tmp_path / "run") if e["event"] == "eval"}
    best = min(evals, key=lambda step: evals[step])
    assert best < NUM_STEPS - 1
    root = tmp_path / "run/checkpoints"
    assert [folder.name for folder in checkpoints(root)] == [f"step-{NUM_STEPS:08d}", f"step-{best:08d}"]
    assert (root / "best").read_text() == f"step-{best:08d}\n"
    assert json.loads((root / f"step-{best:08d}/state.json").read_text())["state"]["best_eval_loss"] == evals[best]


@pytest.mark.slow
def test_every_complete_checkpoint_lists_what_is_in_it(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    process_group.train(flags_of(tiny_model, tmp_path / "run", *SHARDED), 2)
    for folder in checkpoints(tmp_path / "run/checkpoints"):
        assert damage(folder) == ""
        listed = json.loads((folder / "COMPLETE").read_text())["files"]
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert found == {"COMPLETE", *listed}
        assert {"rank-00000.safetensors", "rank-00001.safetensors", "rng-00000.json", "rng-00001.json"} <= found


@pytest.mark.slow
def test_a_checkpoint_is_written_when_the_last_one_is_old_enough(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """By rank 0's clock, at the same step on all ranks."""
    given = ["--save_every_steps", "0", "--save_every_minutes", "0.000001", "--run_validation", "False", *SHARDED]
    process_group.train(flags_of(tiny_model, tmp_path / "run", *given), 2)
    steps = [event["step"] for event in read_metrics(tmp_path / "run") if event["event"] == "checkpoint"]
    assert steps == list(range(1, NUM_STEPS + 1))
    given[given.index("0.000001")] = "1000"
    process_group.train(flags_of(tiny_model, tmp_path / "seldom", *given), 2)
    assert not (tmp_path / "seldom/checkpoints").exists()
