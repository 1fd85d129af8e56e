"""`make demo` really learns: it runs as a user runs it, for 260 steps of its 1000, and its model is tested."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.datasets import BUILT_IN_FOLDER
from data.dataset_functions.importing import load_dataset_file
from tests.helpers.processes import ROOT, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.long]
DATA = ROOT / "datasets/samples/dialogue_summary"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder and everything that the demo printed. Of pytest's workers one runs it, and the others wait."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder, printed = shared / "demo", shared / "demo.txt"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # more of them spin, waiting for each other
    command = [sys.executable, "-m", "tools.demo", "--out", str(folder), "--max_train_step", "260"]
    with FileLock(shared / "demo.lock"):
        if not printed.exists():
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
            assert done.returncode == 0, done.stderr
            printed.write_text(done.stdout)
    return folder / "run", printed.read_text()


def test_eval_loss_falls_below_half(demo: tuple[Path, str]) -> None:
    losses = [event["loss"] for event in read_metrics(demo[0]) if event["event"] == "eval"]
    assert min(losses) < losses[0] / 2


def test_it_ends_with_losses_a_held_out_summary_and_the_run_folder(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    sample = json.loads((DATA / "validation.jsonl").read_text().splitlines()[0])
    for part in (sample["dialogue"], sample["summary"], "the model:  ", "eval loss before ", f"run folder: {folder}"):
        assert part in printed
    assert "--enable_fsdp" in printed


def test_wrong_dialogues_raise_the_loss_of_the_summaries(demo: tuple[Path, str]) -> None:
    """A model that only learned the style of summaries would not notice."""
    samples = [json.loads(line) for line in (DATA / "validation.jsonl").read_text().splitlines()]
    dialogues = [sample["dialogue"] for sample in samples]
    summaries = [sample["summary"] for sample in samples]
    right = mean_loss(demo[0] / "model", dialogues, summaries)
    wrong = mean_loss(demo[0] / "model", dialogues[1:] + dialogues[:1], summaries)
    assert right == pytest.approx(min(e["loss"] for e in read_metrics(demo[0]) if e["event"] == "eval"), rel=0.02)
    assert wrong > 1.1 * right


@torch.no_grad()
def mean_loss(folder: Path, dialogues: list[str], summaries: list[str]) -> float:
    """The mean loss over the summaries' tokens and end tokens, computed with plain transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    template = load_dataset_file(BUILT_IN_FOLDER / "samsum.py").PROMPT
    total, count = 0.0, 0
    for dialogue, summary in zip(dialogues, summaries, strict=True):
        # The saved tokenizer begins a text with the start token that training put there.
        prompt = tokenizer.encode(template.format(dialogue=dialogue))
        assert prompt[0] == tokenizer.bos_token_id
        answer = [*tokenizer.encode(summary, add_special_tokens=False), tokenizer.eos_token_id]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total += F.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
    assert math.isfinite(total)
    return total / count
