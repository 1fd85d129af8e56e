"""A dataset format, a task and a metric are one file and one line each: toy ones are added to a copy of the project.

CONTRIBUTING.md has the steps. One run of the copy trains with all three.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.processes import read_metrics
from tests.helpers.project_copy import add_line, copy_project, run_copy
from tests.helpers.refusals import error_lines, write_lines

FORMAT = '''"""Questions and answers (`q` and `a`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.datasets import DataSource
from configs.setting import setting
from data.tokens.encoding import ONE_TEXT, Encode
from data.tokens.spans import BadExample, TextSpan
from utils.errors import ConfigError


@dataclass(frozen=True)
class QaDataset(DataSource):
    """Questions and answers (--dataset qa_dataset)."""

    mark: str = setting("?", "what ends a question")

    def check(self, flag: str) -> None:
        if len(self.mark) > 1:
            raise ConfigError(f"{flag}.mark: {self.mark} is no mark; give one character")


def get_qa_dataset(
    dataset_config: QaDataset, tokenizer: Any, split: str, split_slice: str | None = None, encode: Encode = ONE_TEXT
) -> Any:
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    examples = load_split("qa_dataset", dataset_config, split, split_slice, text_columns=("q", "a"))
    return tokenize_split(examples, tokenizer, partial(to_spans, mark=dataset_config.mark), encode=encode)


def to_spans(example: Mapping[str, Any], *, mark: str) -> list[TextSpan]:
    if example["q"] == example["a"]:
        raise BadExample("the question is its answer")
    return [TextSpan(example["q"] + mark, False), TextSpan(example["a"], True)]
'''

TASK = '''"""A causal model whose loss is half of the usual one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tasks.causal_batches import CausalMicroBatch
from tasks.causal_lm import CausalLM


class HalfLoss(CausalLM):
    NAME = "half_loss"
    EVAL_FIGURES = {"rows_off": False}

    def summed_loss(self, model: nn.Module, batch: CausalMicroBatch, loss_grad: float | None = None) -> torch.Tensor:
        return super().summed_loss(model, batch, None if loss_grad is None else loss_grad / 2) / 2

    def eval_sums(self, model: nn.Module, batch: CausalMicroBatch) -> torch.Tensor:
        loss = self.summed_loss(model, batch)
        return torch.stack([loss, loss.new_tensor(len(batch.source_rows))])

    def eval_figures(self, sums: Sequence[float], num_loss_terms: int) -> dict[str, float]:
        return {"rows_off": sums[0] / num_loss_terms}
'''

METRIC = '''"""How many letters an answer has more or less than its reference."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.measure import Answer, Measure, Scorer


class Letters(Measure):
    NAMES = ("letters_off", "longest")
    HIGHER_IS_BETTER = False

    def make_scorer(self) -> Scorer:
        return lambda reference, text: {"letters_off": float(abs(len(text) - len(reference)))}

    def total(self, answers: Sequence[Answer]) -> dict[str, float]:
        mean = sum(answer.figures["letters_off"] for answer in answers) / len(answers)
        return {"letters_off": mean, "longest": float(max(len(answer.text) for answer in answers))}
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = copy_project(tmp_path_factory.mktemp("project"))
    (copy / "datasets/qa.py").write_text(FORMAT)
    add_line(copy / "configs/datasets.py", after="FORMATS = (", line='    "qa",')
    (copy / "tasks/half_loss.py").write_text(TASK)
    add_line(copy / "tasks/finding.py", after="    CausalLM(),", line="    HalfLoss(),")
    add_line(
        copy / "tasks/finding.py",
        after="from tasks.causal_lm import CausalLM",
        line="from tasks.half_loss import HalfLoss",
    )
    (copy / "evaluation/letters.py").write_text(METRIC)
    add_line(copy / "evaluation/measures.py", after="MEASURES: Sequence[Measure] = [", line="    Letters(),")
    add_line(
        copy / "evaluation/measures.py",
        after="from evaluation.measure import Answer, Measure",
        line="from evaluation.letters import Letters",
    )
    return copy


def test_an_added_format_task_and_metric_train(copy: Path, tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"q": f"How many are {n} and {n}", "a": f"{2 * n} of them."} for n in range(16)]
    write_lines(tmp_path / "data/train.jsonl", [*rows, {"q": "Why", "a": "Why"}])
    write_lines(tmp_path / "data/validation.jsonl", rows[:4])
    flags = [
        "--model_name",
        str(tiny_model),
        "--dataset",
        "qa_dataset",
        "--qa_dataset.data_path",
        str(tmp_path / "data"),
    ]
    flags += ["--qa_dataset.skip_bad_rows", "--max_train_step", "2", "--context_length", "64", "--lr", "1e-3"]
    flags += ["--eval_generate", "--max_new_tokens", "4", "--eval_before_training", "--num_workers_dataloader", "0"]
    run = run_copy(
        copy, *flags, "--task", "half_loss", "--best_metric", "letters_off", "--output_dir", str(tmp_path / "run")
    )
    assert run.returncode == 0, run.stderr
    assert "row 17: the question is its answer" in run.stdout
    evals = [event for event in read_metrics(tmp_path / "run") if event["event"] == "eval"]
    assert 2 < evals[0]["loss"] < 4, "half of log(600)"
    assert all(event["rows_off"] == 4 / event["num_label_tokens"] for event in evals)
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    before = [sample for sample in samples if sample["step"] == 0]
    assert len(before) == 4
    assert evals[0]["letters_off"] == sum(abs(len(s["generated"]) - len(s["reference"])) for s in before) / 4
    assert evals[0]["longest"] == max(len(sample["generated"]) for sample in before)
    assert "rougeL" in evals[0]
    state = json.loads(next((tmp_path / "run/checkpoints").glob("step-*/state.json")).read_text())["state"]
    assert state["best_rouge"] == -evals[1]["letters_off"], "fewer are better"


def test_settings_of_an_added_format_are_checked_before_anything_else(copy: Path) -> None:
    run = run_copy(copy, "--model_name", "m", "--dataset", "qa_dataset", "--qa_dataset.mark", "what")
    assert run.returncode == 2
    assert error_lines(run.stderr) == ["error: --qa_dataset.mark: what is no mark; give one character"]
