"""Runs that learn preferences: the documented command, what a tiny model learns, and going on from a checkpoint."""

from __future__ import annotations

import json
import random
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.checkpoints import forget_marks
from tests.helpers.documented import commands
from tests.helpers.processes import ROOT, ProcessGroup, read_metrics, run_command
from tests.helpers.refusals import write_lines
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal

POLITE = ("Yes, gladly.", "Of course I can.", "Sure, here it is.", "With pleasure.")
RUDE = ("No.", "Never, leave me alone.", "I will not.", "Why should I?")
THINGS = ("door", "book", "box", "letter", "window", "garden")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Polite answers are preferred to rude ones."""
    folder, draw = tmp_path_factory.mktemp("pairs"), random.Random(1)
    for split, number in (("train", 96), ("validation", 24)):
        rows = [
            {
                "prompt": f"Could you {draw.choice(('open', 'find', 'bring'))} the {draw.choice(THINGS)} {row}?",
                "chosen": draw.choice(POLITE),
                "rejected": draw.choice(RUDE),
            }
            for row in range(number)
        ]
        write_lines(folder / f"{split}.jsonl", rows)
    return folder


def flags_of(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    flags = ["--model_name", str(model), "--dataset", "preference_dataset", "--output_dir", str(output)]
    flags += ["--preference_dataset.data_path", str(data), "--context_length", "256", "--lr", "1e-3"]
    flags += ["--preference_dataset.chat_template", str(ROOT / "datasets/samples/formats/chat.jinja")]
    return [*flags, "--batch_size_training", "2", "--num_workers_dataloader", "0", *more]


@pytest.mark.parametrize("loss_type", ["dpo", pytest.param("simpo", marks=pytest.mark.slow), "orpo"])
def test_a_tiny_model_learns_what_is_preferred(
    loss_type: str, tiny_model: Path, pairs: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    flags = flags_of(tiny_model, pairs, tmp_path / "run", "--loss_type", loss_type, "--num_epochs", "3")
    process_group.train([*flags, "--eval_before_training", "--best_metric", "reward_accuracy"], 1)
    found = [event for event in read_metrics(tmp_path / "run") if event["event"] == "eval"]
    margins = [event["reward_margin"] for event in found]
    assert margins == sorted(margins)
    assert margins[-1] > margins[0]
    assert found[-1]["reward_accuracy"] > 0.9
    assert {event["num_pairs"] for event in found} == {24}
    assert f"| loss | {loss_type}" in (tmp_path / "run/model/README.md").read_text()


@pytest.mark.parametrize("more", [(), pytest.param(("--use_peft",), marks=pytest.mark.slow)], ids=["full", "lora"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_reference_that_it_began_with(
    ranks: int, more: tuple[str, ...], tiny_model: Path, pairs: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = ["--loss_type", "dpo", "--max_train_step", "4", "--save_every_steps", "2", *more]
    process_group.train(flags_of(tiny_model, pairs, whole, *flags), ranks)
    as_if_killed_after(2, whole, resumed)
    done = process_group.train([*flags_of(tiny_model, pairs, resumed, *flags), "--resume", "auto"], ranks)
    assert "before training" not in done[0].stdout  # nothing is computed again: the weights have moved
    assert_bit_equal(whole, resumed)
    before = [load_file(folder / "checkpoints/step-00000004/reference.safetensors") for folder in (whole, resumed)]
    assert [sorted(scores) for scores in before[:1]] == [sorted(before[1])]
    assert all(np.array_equal(before[0][name], before[1][name]) for name in before[0])


def test_a_run_of_a_version_before_shared_prompts_goes_on_as_it_began(
    tiny_model: Path, pairs: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = ["--loss_type", "dpo", "--max_train_step", "4", "--save_every_steps", "2"]
    process_group.train([*flags_of(tiny_model, pairs, whole, *flags), "--share_prompts", "False"], 1)
    as_if_killed_after(2, whole, resumed)
    state = resumed / "checkpoints/step-00000002/state.json"
    values = json.loads(state.read_text())
    del values["shares_prompts"], values["settings"]["preference_config"]["share_prompts"]
    state.write_text(json.dumps(values))
    forget_marks(state.parent)
    process_group.train([*flags_of(tiny_model, pairs, resumed, *flags), "--resume", "auto"], 1)
    assert_bit_equal(whole, resumed)


def test_a_reference_of_other_pairs_is_refused(
    tiny_model: Path, pairs: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    flags = ["--loss_type", "dpo", "--max_train_step", "2"]
    process_group.train(flags_of(tiny_model, pairs, tmp_path / "run", *flags), 1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.jsonl").write_text((pairs / "train.jsonl").read_text())
    (other / "validation.jsonl").write_text((pairs / "validation.jsonl").read_text().replace("gladly", "no"))
    more = ["--max_train_step", "3", "--resume", "auto"]
    flags = [flag for flag in flags if flag not in ("--max_train_step", "2")]
    (found,) = process_group.run(flags_of(tiny_model, other, tmp_path / "run", *flags, *more), 1)
    assert found.status == 2
    assert "error: --resume: the checkpoint holds no reference log-probabilities" in found.stderr


def test_the_next_run_on_the_same_pairs_reads_the_reference(
    tiny_model: Path, pairs: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    new = tmp_path / "new.jsonl"
    new.write_text((pairs / "train.jsonl").read_text().replace("Could", f"{tmp_path.name} {time.time_ns()}: could"))
    flags = ["--loss_type", "dpo", "--max_train_step", "1", "--save_every_steps", "0", "--save_model", "False"]
    (first,) = process_group.train(flags_of(tiny_model, new, tmp_path / "first", *flags), 1)
    (second,) = process_group.train(flags_of(tiny_model, new, tmp_path / "second", *flags, "--beta", "0.2"), 1)
    said = "computing log-probabilities of 96 pairs before training"
    assert (said in first.stdout, said in second.stdout) == (True, False)
    assert "reference: log-probabilities of 96 pairs from " in second.stdout


@pytest.mark.parametrize("command", commands([ROOT / "docs/preferences.md"]))
def test_the_documented_command_runs_as_written(command: str, tiny_model: Path, tmp_path: Path) -> None:
    flags = shlex.split(command)[2:]
    flags[flags.index("--model_name") + 1] = str(tiny_model)
    done = run_command(*flags, "--output_dir", str(tmp_path / "run"), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[1])["num_pairs"] == 4
