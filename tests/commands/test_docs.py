"""What the documents say to type can be typed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.datasets import CustomDataset
from configs.flags import parse_flags
from data.sequences.causal import build_sequences
from tests.helpers.documented import DATASETS, DOCUMENTS, PRECISION, QUANTIZATION, TRACKING, commands
from tests.helpers.mxfp4_folder import save_in_mxfp4
from tests.helpers.processes import ROOT, run_command


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    parse_flags(words[words.index("finetuning.py") + 1 :])


def test_the_readme_holds_ten_situations_at_least() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        name, _, anchor = target.partition("#")
        if not name.startswith("http"):
            page = document.parent / name if name else document
            assert page.exists(), target
            assert not anchor or anchor in _anchors(page), target


def _anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub spells them in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_folder_of_datasets_never_hides_the_library() -> None:
    assert not (ROOT / "datasets/__init__.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", dict.fromkeys(commands([TRACKING])))
def test_a_command_that_tracks_runs_as_written(
    command: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command)
    nproc = int(words[words.index("--nproc_per_node") + 1]) if words[0] == "torchrun" else None
    flags = words[words.index("finetuning.py") + 1 :]
    # MXFP4 is for experts.
    model = save_in_mxfp4(tmp_path / "model", tiny_model) if "mxfp4" in flags else tiny_model
    flags[flags.index("--model_name") + 1] = str(model)
    flags += ["--samsum_dataset.data_path", str(ROOT / "datasets/samples/dialogue_summary"), "--split_slice", "100"]
    flags += ["--context_length", "256"]
    if "--max_train_step" not in flags and "--use_profiler" not in flags:
        flags += ["--max_train_step", "8"]
    done = run_command(*flags, nproc=nproc, cwd=tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").iterdir()
    asked = {"--use_profiler": "profiler", "--use_tensorboard": "tensorboard", "--use_wandb": "wandb"}
    for flag in set(asked) & set(flags):
        assert any((folder / asked[flag]).iterdir())
    if "--flop_counter" in flags:
        assert "flop counter | step 3 | counted " in done.stdout
    (folder).rename(tmp_path / "outputs/run")
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", TRACKING.read_text(), flags=re.DOTALL)
    exec(snippet, {})


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in commands([DATASETS]) if "datasets/" in command])
def test_a_command_on_the_sample_files_runs_as_written(command: str, tiny_model: Path, tmp_path: Path) -> None:
    words = shlex.split(command)
    flags = words[words.index("finetuning.py") + 1 :]
    flags[flags.index("--model_name") + 1] = str(tiny_model)
    flags += ["--max_train_step", "1", "--context_length", "512", "--output_dir", str(tmp_path / "run")]
    done = run_command(*flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", commands([PRECISION, QUANTIZATION]))
def test_a_command_that_chooses_a_precision_runs_as_written(command: str, tiny_model: Path, tmp_path: Path) -> None:
    words = shlex.split(command)
    # Two of four ranks, for two steps.
    nproc = min(2, int(words[words.index("--nproc_per_node") + 1])) if words[0] == "torchrun" else None
    flags = words[words.index("finetuning.py") + 1 :]
    # MXFP4 is for experts.
    model = save_in_mxfp4(tmp_path / "model", tiny_model) if "mxfp4" in flags else tiny_model
    flags[flags.index("--model_name") + 1] = str(model)
    flags += ["--samsum_dataset.data_path", str(ROOT / "datasets/samples/dialogue_summary"), "--split_slice", "20"]
    flags += ["--context_length", "256", "--max_train_step", "2"]
    done = run_command(*flags, "--output_dir", str(tmp_path / "run"), nproc=nproc)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("has_start_token", [True, False])
def test_the_dataset_function_of_ten_lines_works_as_written(
    has_start_token: bool, tiny_model: Path, tmp_path: Path
) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", DATASETS.read_text(), flags=re.DOTALL)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 10
    rows = [{"q": f"{number} and 1?", "a": str(number + 1)} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    defined: dict[str, Any] = {}
    exec(snippet, defined)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    start = tokenizer.bos_token_id
    tokenizer.bos_token = tokenizer.bos_token if has_start_token else None  # as Qwen's
    config = CustomDataset(data_path=str(tmp_path / "rows.jsonl"))
    for split, number in (("train", 38), ("validation", 2)):
        data = defined["get_custom_dataset"](config, tokenizer, split)
        examples = build_sequences(data, name="ten lines", context_length=64)
        assert len(examples) == number
        ids, labels, _ = examples[0]
        assert (ids[0] == start) == has_start_token
        assert labels[-1] == tokenizer.eos_token_id
