"""A split is tokenized once per machine: one process does it; the others wait, say so, and find the result."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import datasets
import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from configs.formats import DATASETS
from data.splits.reading import load_split
from data.tokenizing import tokenize_split
from data.tokens.spans import TextSpan
from tests.helpers.forked import ONE_THREAD, Fork
from tests.helpers.processes import ROOT

SCRIPT = """
import json, os, sys, time
sys.path.insert(0, {root!r})
import datasets
from pathlib import Path
from transformers import AutoTokenizer
from configs.formats import DATASETS
from data import tokenizing
from data.splits.reading import load_split
from data.tokens.spans import TextSpan

tokenizing._QUIET_WAIT_SECONDS = 0.2
datasets.config.HF_DATASETS_CACHE = Path({cache!r})

def to_spans(example):
    with open(os.environ["CALLS"], "a") as calls:  # if its name stood here, its contents would be part of the key
        calls.write("x")
        is_halfway = calls.tell() >= 50
    while is_halfway and not os.path.exists(os.environ["GOES_ON"]):
        time.sleep(0.01)
    return [TextSpan(example["text"], True)]

examples = load_split("text_dataset", DATASETS["text_dataset"]({data!r}), "train", text_columns=("text",))
rows = tokenizing.tokenize_split(examples, AutoTokenizer.from_pretrained({model!r}), to_spans)
print(json.dumps([len(rows), rows[0], rows[99]]))
"""


@pytest.fixture
def script(tiny_model: Path, tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "Anna says {number}."}}\n' for number in range(100)))
    file = tmp_path / "main.py"
    names = {"root": str(ROOT), "data": str(data), "model": str(tiny_model), "cache": str(tmp_path / "cache")}
    file.write_text(SCRIPT.format(**names))
    return file


class Started(NamedTuple):
    fork: Fork
    output: Path

    def lines(self) -> list[str]:
        """Its output, once it has ended."""
        assert self.fork.wait(200) == 0, self.output.read_text()
        return self.output.read_text().splitlines()


def start(script: Path, number: int = 0) -> Started:
    output = script.parent / f"output-{number}"
    with open(output, "wb") as file:
        pipes = {"stdout": file.fileno(), "stderr": file.fileno()}
        files = {"CALLS": str(script.parent / "calls"), "GOES_ON": str(script.parent / "goes_on")}
        return Started(Fork([str(script)], cwd=ROOT, environment=os.environ | ONE_THREAD | files, **pipes), output)


def test_of_several_processes_one_tokenizes_and_the_others_say_what_they_wait_for(script: Path) -> None:
    processes = [start(script, number) for number in range(3)]
    while not any("waiting for another process" in started.output.read_text() for started in processes):
        assert all(started.fork.poll() is None for started in processes)
        time.sleep(0.02)
    (script.parent / "goes_on").touch()
    outputs = [started.lines() for started in processes]
    assert len({lines[-1] for lines in outputs}) == 1, "all have the same rows"
    assert (script.parent / "calls").stat().st_size == 100, "each row was tokenized once"
    waited = [line for lines in outputs for line in lines if line.startswith("waiting for another process")]
    assert waited
    assert all("data.jsonl" in line for line in waited)
    announced = [line for lines in outputs for line in lines if line.startswith("tokenizing 100 examples of ")]
    begins, ends = (line.split("data.jsonl")[1] for line in announced)
    assert (begins, bool(re.fullmatch(r": \d+\.\d s", ends))) == (" ...", True), "by the one that tokenized"


def test_a_killed_process_leaves_no_cache_that_looks_complete(script: Path) -> None:
    first = start(script)
    calls = script.parent / "calls"
    while not calls.exists() or calls.stat().st_size < 50:
        assert first.fork.poll() is None, first.output.read_text()
        time.sleep(0.02)
    os.kill(first.fork.pid, signal.SIGKILL)
    first.fork.wait(300)
    (script.parent / "goes_on").touch()
    assert start(script, 1).lines()[-1].startswith("[100, ")


@pytest.mark.parametrize("damage", ["cut", "cut between batches", "overwritten", "empty"])
def test_a_damaged_cache_is_named_and_made_again(
    damage: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "Anna says {number}."}}\n' for number in range(2500)))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    examples = load_split("text_dataset", DATASETS["text_dataset"](str(data)), "train", text_columns=("text",))

    def tokenized() -> list[list[int]]:
        return list(tokenize_split(examples, tokenizer, as_text)["input_ids"])

    rows = tokenized()
    assert len(rows) == 2500
    capsys.readouterr()
    assert tokenized() == rows
    assert "tokenizing" not in capsys.readouterr().out
    (file,) = tmp_path.glob("cache/*/*.arrow")
    content = file.read_bytes()
    with pa.OSFile(str(file)) as source:
        table = pa.ipc.open_stream(source).read_all()
    if damage == "cut between batches":
        with pa.OSFile(str(file), "wb") as target, pa.ipc.new_stream(target, table.schema) as writer:
            writer.write_table(table.slice(0, 1000))
    else:
        damaged = {"cut": content[: len(content) // 2], "overwritten": b"x" * len(content), "empty": b""}
        file.write_bytes(damaged[damage])
    assert tokenized() == rows
    printed = capsys.readouterr().out
    assert f"the tokens kept in {file} are damaged (" in printed
    assert "tokenizing 2,500 examples" in printed
    assert tokenized() == rows
    assert "damaged" not in capsys.readouterr().out


def as_text(example: dict[str, str]) -> list[TextSpan]:
    return [TextSpan(example["text"], True)]
