"""Tokenised once per machine: of several processes one does it, the others wait, say so, and find what it made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT

SCRIPT = """
import json, sys
sys.path.insert(0, {root!r})
import datasets
from transformers import AutoTokenizer
from configs.datasets import TextDataset
from data import tokenizing
from data.splits import load_split
from data.loss_mask import TextSpan

tokenizing._QUIET_WAIT_SECONDS = 0.2

def to_spans(example):
    with open({calls!r}, "a") as calls:
        calls.write("x")
    import time
    time.sleep(0.02)
    return [TextSpan(example["text"], True)]

examples = load_split("text_dataset", TextDataset({data!r}), "train", text_columns=("text",))
rows = tokenizing.tokenize_split(examples, AutoTokenizer.from_pretrained({model!r}), to_spans)
print(json.dumps([len(rows), rows[0], rows[99]]))
"""


@pytest.fixture
def script(tiny_model: Path, tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "Anna says {number}."}}\n' for number in range(100)))
    file = tmp_path / "main.py"
    names = {"root": str(ROOT), "calls": str(tmp_path / "calls"), "data": str(data), "model": str(tiny_model)}
    file.write_text(SCRIPT.format(**names))
    return file


def start(script: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HOME": str(script.parent / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(script)], env=environment, **pipes)


@pytest.mark.slow
def test_of_several_processes_one_tokenizes_and_the_others_say_what_they_wait_for(script: Path) -> None:
    outputs = [process.communicate(timeout=200) for process in [start(script) for _ in range(3)]]
    lines = [output.splitlines() for output, _ in outputs]
    assert all(line for line in lines), outputs
    assert len({line[-1] for line in lines}) == 1, "all have the same rows"
    assert (script.parent / "calls").stat().st_size == 100, "each row was tokenised once"
    waited = [line for output in lines for line in output if line.startswith("waiting for another process")]
    assert waited
    assert all("data.jsonl" in line for line in waited)


@pytest.mark.slow
def test_a_process_that_was_killed_leaves_nothing_that_is_taken_for_the_whole(script: Path) -> None:
    first = start(script)
    calls = script.parent / "calls"
    while not calls.exists() or calls.stat().st_size < 20:
        assert first.poll() is None, first.communicate()
    first.kill()
    first.communicate()
    output, errors = start(script).communicate(timeout=200)
    assert output.splitlines()[-1].startswith("[100, "), errors
