"""benchmarks/steady_steps.py: recompilations, waits of the host and growth of memory are counted step by step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.runs.step_counters import StepCounters, StepFigures
from benchmarks.steady_steps import main, problems
from policies.optimizers.offload import CPUOffloadOptimizer
from tests.helpers.aot_eager import under_aot_eager
from tests.helpers.processes import ProcessGroup

MIB = 2**20


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (StepFigures(0, 1, 100 * MIB), []),
        (StepFigures(2, 1, 100 * MIB), ["2 recompilations"]),
        (StepFigures(0, 3, 100 * MIB), ["1 steps with up to 3 waits of the host"]),
        (StepFigures(0, 1, 150 * MIB), ["memory grew by 40 MiB, to 0.15 GiB"]),
    ],
)
def test_what_is_not_steady_is_named(last: StepFigures, said: list[str]) -> None:
    assert problems([*[StepFigures(0, 1, 110 * MIB)] * 9, last]) == said


def test_an_update_of_an_optimizer_inside_another_is_one_step_and_compilations_count_for_their_step() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = CPUOffloadOptimizer([{"params": [weight]}], lambda groups: torch.optim.SGD(groups, lr=0.1))
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    with StepCounters() as counters:
        for size in (3, 3, 5):  # another size: compiled again
            double(torch.ones(size))
            weight.grad = torch.ones(3)
            optimizer.step()
    optimizer.step()  # after the context: no longer counted
    assert [step.num_compiled for step in counters.steps] == [1, 0, 1]
    assert all(step.held_bytes > MIB for step in counters.steps)


def test_ranks_of_a_run_say_that_they_are_steady(
    tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    argv = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(samples), "--enable_fsdp"]
    argv += ["--output_dir", str(tmp_path / "run"), "--context_length", "128", "--batch_size_training", "1"]
    argv += ["--num_epochs", "9", "--run_validation", "False", "--save_every_steps", "0", "--save_model", "False"]
    argv += ["--num_workers_dataloader", "0"]
    outcomes = process_group.train(partial(main, ["--steps", "8", "--warmup", "2", "--", *argv]), 2)
    for rank, outcome in enumerate(outcomes):
        assert f"rank {rank}: steady | 8 steps, 0 waits of the host in a step" in outcome.stdout


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["packing", "padding"])
def test_layers_compile_in_the_first_step_alone_for_batches_of_any_width_and_number_of_rows(
    strategy: str, tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    """Twelve dialogues in batches of five rows: the last batch of an epoch is smaller."""
    argv = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(samples), "--compile", "--lr", "1e-3"]
    argv += ["--output_dir", str(tmp_path / "run"), "--context_length", "256", "--batch_size_training", "5"]
    argv += ["--num_epochs", "9", "--run_validation", "False", "--save_every_steps", "0", "--save_model", "False"]
    argv += ["--num_workers_dataloader", "0", "--batching_strategy", strategy]
    steady = partial(main, ["--steps", "6", "--warmup", "1", "--", *argv])
    (outcome,) = process_group.train(under_aot_eager(steady), 1)  # what is compiled again is for dynamo to say
    assert "rank 0: steady | 6 steps" in outcome.stdout


def test_flags_that_it_sets_itself_are_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--", "--model_name", "M", "--max_train_step", "3"])
