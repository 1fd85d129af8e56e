"""Rows of a teacher hold its most likely tokens, and a student that learns from them comes nearer to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.processes import run_command, train_events
from tools.make_tiny_model import make_tiny_model
from tools.teacher_logprobs import main

NUM_TRAIN, NUM_ROWS, LENGTH = 128, 160, 24


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that holds about fifty tokens likely at each place."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    make_tiny_model(folder, vocab_size=600, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that the teacher has sampled, in splits."""
    folder = tmp_path_factory.mktemp("texts")
    model = AutoModelForCausalLM.from_pretrained(teacher)
    torch.manual_seed(0)
    start = torch.randint(5, 600, (NUM_ROWS, 2))
    ids = model.generate(start, do_sample=True, max_new_tokens=LENGTH, min_new_tokens=LENGTH, top_k=0).tolist()
    for split, rows in (("train", ids[:NUM_TRAIN]), ("validation", ids[NUM_TRAIN:])):
        lines = [json.dumps({"input_ids": row, "labels": [-100, -100, *row[2:]]}) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def rows(teacher: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taught") / "rows"
    assert main([str(teacher), "--to", str(folder), "--top_k", "8", "--batch_size", "5", *data_flags(texts)]) == 0
    return folder


def data_flags(folder: Path) -> list[str]:
    return ["--dataset", "custom_dataset", "--custom_dataset.data_path", str(folder), "--context_length", "32"]


def test_they_are_those_of_the_model_alone(teacher: Path, texts: Path, rows: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher)
    for split, number in (("train", NUM_TRAIN), ("validation", NUM_ROWS - NUM_TRAIN)):
        written = datasets.Dataset.from_parquet(str(rows / f"{split}.parquet"))
        assert len(written) == number
        lines = (texts / f"{split}.jsonl").read_text().splitlines()
        for row, line in list(zip(written, lines, strict=True))[:9]:
            assert row["input_ids"] == json.loads(line)["input_ids"]
            with torch.no_grad():
                logprobs = model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
            wanted, ids = logprobs[1:-1].topk(8)
            torch.testing.assert_close(torch.tensor(row["teacher_logprobs"])[2:], wanted, rtol=1e-5, atol=1e-5)
            assert (torch.tensor(row["teacher_ids"])[2:] == ids).float().mean() > 0.99


def divergence(teacher: Path, student: Path, texts: Path) -> float:
    """Over the whole vocabulary, on rows that were not learned; the mean over label tokens."""
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (teacher, student)]
    ids = torch.tensor(
        [json.loads(line)["input_ids"] for line in (texts / "validation.jsonl").read_text().splitlines()]
    )
    with torch.no_grad():
        wanted, own = (model(ids).logits[:, 1:-1].log_softmax(-1) for model in models)
    return float((wanted.exp() * (wanted - own)).sum(-1).mean())


def test_a_student_comes_nearer_to_its_teacher_than_by_cross_entropy_alone(
    teacher: Path, texts: Path, rows: Path, tmp_path: Path
) -> None:
    student, model = tmp_path / "student", AutoModelForCausalLM.from_pretrained(teacher)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.5 * torch.randn_like(parameter) * parameter.std() if parameter.dim() > 1 else 0
    shutil.copytree(teacher, student)
    model.save_pretrained(student)
    found: dict[str, float] = {}
    for weight in ("0", "0.9"):
        run = tmp_path / f"run-{weight}"
        flags: list[Any] = ["--model_name", student, "--output_dir", run, *data_flags(rows), "--lr", "5e-3"]
        flags += ["--teacher_weight", weight, "--num_epochs", "8", "--batching_strategy", "padding"]
        flags += [
            "--batch_size_training",
            "16",
            "--scheduler",
            "constant",
            "--run_validation",
            "False",
            "--num_workers_dataloader",
            "0",
        ]
        done = run_command(*map(str, flags))
        assert done.returncode == 0, done.stderr
        assert train_events(run)[-1]["loss"] < train_events(run)[0]["loss"]
        found[weight] = divergence(teacher, run / "model", texts)
    assert found["0.9"] < 0.8 * found["0"], found


def test_what_cannot_be_written_is_refused(
    teacher: Path, texts: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, told in (
        (["--to", str(rows)], "--to: "),
        (["--to", str(tmp_path / "x"), "--top_k", "600"], "--top_k: 600 is not less than the vocabulary of 600"),
        (["--to", str(tmp_path / "x"), "--batch_size", "0"], "--batch_size: 0 is less than 1"),
        (["--to", str(tmp_path / "x"), "--zzz", "0"], "--zzz: unknown flag"),
    ):
        assert main([str(teacher), *flags, *data_flags(texts)]) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / "x").exists()
