"""An optimizer is one file and one line: a toy one is added to a copy of the project, which then trains with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.optimizers import OPTIMIZERS
from policies.optimizers.kind import kind_of
from tests.helpers.processes import train_events
from tests.helpers.project_copy import add_line, copy_project, run_copy
from tests.helpers.refusals import error_lines

SIGN_SGD = '''"""signSGD (arXiv 1802.04434): each weight moves by lr against the sign of its gradient."""

import torch
from torch.optim import Optimizer

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.kind import Groups, OptimizerKind


class SignSGD(Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class SignSGDKind(OptimizerKind):
    def build(self, groups: Groups, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
        return SignSGD(groups, {"lr": train.lr})

    def state_bytes(self, parameter: torch.Tensor, shape: torch.Size, train: TrainConfig, fsdp: FsdpConfig) -> int:
        return 0


KIND = SignSGDKind()
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = copy_project(tmp_path_factory.mktemp("project"))
    (copy / "policies/optimizers/signsgd.py").write_text(SIGN_SGD)
    add_line(
        copy / "configs/optimizers.py",
        after="OPTIMIZERS: dict[str, ListedOptimizer] = {",
        line='    "SignSGD": ListedOptimizer("moves every weight by lr"),',
    )
    return copy


def test_an_added_optimizer_trains_and_resumes(copy: Path, tiny_model: Path, samples: Path, tmp_path: Path) -> None:
    flags = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(samples), "--context_length", "64"]
    flags += [
        "--optimizer",
        "signsgd",
        "--lr",
        "1e-3",
        "--scheduler",
        "constant",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    run = run_copy(copy, *flags, "--max_train_step", "4", "--save_every_steps", "2")
    assert run.returncode == 0, run.stderr
    losses = [event["loss"] for event in train_events(tmp_path / "run")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    run = run_copy(copy, *flags, "--max_train_step", "5", "--resume", str(tmp_path / "run/checkpoints/step-00000002"))
    assert run.returncode == 0, run.stderr
    again = [event["loss"] for event in train_events(tmp_path / "run")]
    assert again[:4] == losses
    assert len(again) == 5


def test_flags_that_an_added_optimizer_lacks_are_refused_and_its_name_is_guessed(copy: Path) -> None:
    run = run_copy(copy, "--model_name", "m", "--optimizer", "SignSGD", "--adam_beta1", "0.8")
    assert run.returncode == 2
    assert error_lines(run.stderr) == [
        "error: --adam_beta1: SignSGD has none; add --optimizer AdamW, or leave this out"
    ]
    run = run_copy(copy, "--model_name", "m", "--optimizer", "SignSDG")
    assert run.returncode == 2
    assert "did you mean SignSGD?" in run.stderr


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_listed_optimizer_has_its_file(name: str) -> None:
    assert kind_of(name).has_states_of(kind_of(name))
