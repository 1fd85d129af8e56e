"""Dataset functions: `import datasets` is always the Hugging Face library, and all functions are found the same way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from configs.datasets import CustomDataset
from configs.flags import parse_flags
from configs.formats import DATASETS
from configs.training import TrainConfig
from data.dataset_functions.importing import find_dataset_function, load_dataset_file
from data.pipeline import load_data
from data.sequences.causal import build_sequences
from tests.helpers.processes import ROOT, process_variables, run_forked
from utils.errors import ConfigError

SamsumDataset = DATASETS["samsum_dataset"]
SAMPLES = ROOT / "datasets/samples/dialogue_summary"
WHICH = "import importlib.util; print(importlib.util.find_spec('datasets').origin)"
FILE = """
CALLS = []
class Rows:
    def __len__(self): return 6
    def __getitem__(self, index): return {"input_ids": [index, 5], "labels": [index, 5]}
def get_custom_dataset(dataset_config, tokenizer, split):
    CALLS.append(split)
    return Rows()
def other(dataset_config, tokenizer, split):
    return [{"input_ids": [7, 8], "labels": [7, 8]}]
"""


@pytest.fixture
def dataset_file(tmp_path: Path) -> Path:
    file = tmp_path / "my data.py"
    file.write_text(FILE)
    return file


def python(*arguments: str, cwd: Path = ROOT) -> str:
    env = process_variables({})
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_datasets_folder_is_no_package() -> None:
    assert not (ROOT / "datasets/__init__.py").exists()
    assert not (ROOT / "tests/datasets/__init__.py").exists()


@pytest.mark.parametrize("first_on_the_path", [False, True])
def test_python_in_the_repository_imports_the_hugging_face_library(first_on_the_path: bool) -> None:
    insert = f"import sys; sys.path.insert(0, {str(ROOT)!r}); " if first_on_the_path else ""
    assert "site-packages" in python("-c", insert + WHICH)


def test_pytest_in_the_repository_imports_the_hugging_face_library() -> None:
    assert "site-packages" in datasets.__file__
    assert datasets.load_dataset


def test_the_built_in_function_reads_the_samples(tiny_model: Path) -> None:
    config = SamsumDataset(str(SAMPLES))
    function = find_dataset_function("samsum_dataset", config)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for split in ("train", "validation"):
        with open(SAMPLES / f"{split}.jsonl", encoding="utf-8") as lines:
            samples = [json.loads(line) for line in lines]
        rows = function(config, tokenizer, split)
        assert len(rows) == len(samples)
        labels = [label for label in rows[0]["labels"] if label != -100]
        assert tokenizer.decode(labels[:-1]).strip() == samples[0]["summary"].strip()
        assert labels[-1] == tokenizer.eos_token_id
        assert samples[0]["dialogue"].split()[0] in tokenizer.decode(rows[0]["input_ids"])


def test_a_users_function_is_found_in_both_spellings(dataset_file: Path) -> None:
    for flags in (["--dataset", f"{dataset_file}:other"], ["--dataset", "custom_dataset"]):
        if len(flags) == 2 and flags[1] == "custom_dataset":
            flags += ["--custom_dataset.file", f"{dataset_file}:other"]
        ((name, config),) = parse_flags(["--model_name", "m", *flags]).dataset_configs.items()
        function = find_dataset_function(name, config)
        assert function(config, None, "train") == [{"input_ids": [7, 8], "labels": [7, 8]}]


def test_a_file_without_a_function_name_has_get_custom_dataset(dataset_file: Path) -> None:
    function = find_dataset_function("custom_dataset", CustomDataset(file=str(dataset_file)))
    assert function.__name__ == "get_custom_dataset"


def test_the_function_gets_the_names_of_the_splits_that_the_flags_give(tmp_path: Path) -> None:
    file = tmp_path / "data.py"
    row = "{'input_ids': [len(split), 7], 'labels': [-100, 7]}"
    file.write_text(f"def get_custom_dataset(dataset_config, tokenizer, split):\n    return [{row}]\n")
    config = CustomDataset(file=str(file), train_split="a", test_split="four")
    train_config = TrainConfig(model_name="m", dataset="custom_dataset")
    options: Any = {"build_sequences": build_sequences, "vocab_size": 10, "context_length": 8}
    data = load_data(train_config, {"custom_dataset": config}, None, **options)
    assert data.train[0].input_ids.tolist() == [1, 7]
    assert data.evaluation is not None
    assert data.evaluation[0].input_ids.tolist() == [4, 7]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    modules = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.py").write_text(f"NAME = {name!r}")
        modules.append(load_dataset_file(tmp_path / name / "data.py"))
    assert [module.NAME for module in modules] == ["a", "b"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [(None, "there is no file"), ("import no_such_module", "no_such_module"), ("x = 1", "no function")],
)
def test_a_file_that_cannot_be_used_is_refused_by_path(contents: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    if contents is not None:
        file.write_text(contents)
    with pytest.raises(ConfigError, match=message) as refusal:
        find_dataset_function("custom_dataset", CustomDataset(file=f"{file}:rows"))
    assert str(file) in str(refusal.value)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_dataset_files_own_classes_work_in_worker_processes(
    start_method: str, dataset_file: Path, tmp_path: Path
) -> None:
    """As in finetuning.py, the main module imports data.dataset_functions at its top; rows are pickled."""
    script = tmp_path / "main.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import multiprocessing
from pathlib import Path
from data.sequences.causal import build_sequences
from data.dataset_functions.importing import load_dataset_file

def first_tokens(rows):
    return [rows[index]["input_ids"][0] for index in range(len(rows))]

if __name__ == "__main__":
    rows = load_dataset_file(Path({str(dataset_file)!r})).get_custom_dataset(None, None, "train")
    with multiprocessing.get_context({start_method!r}).Pool(1) as pool:
        print(pool.map(first_tokens, [rows]))
"""
    )
    if start_method == "spawn":  # which imports in the worker what the script imports
        assert python(str(script)).strip() == "[[0, 1, 2, 3, 4, 5]]"
        return
    done = run_forked([str(script)])
    assert (done.returncode, done.stdout.strip()) == (0, "[[0, 1, 2, 3, 4, 5]]"), done.stderr


def test_the_example_in_the_repository_works_as_it_says(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = CustomDataset(file=f"{ROOT}/datasets/custom_example.py:get_custom_dataset")
    function = find_dataset_function("custom_dataset", config)
    rows: Any = [*function(config, tokenizer, "train"), *function(config, tokenizer, "validation")]
    assert len(rows) == 6
    assert all(len(row["input_ids"]) == len(row["labels"]) for row in rows)
    assert all(row["labels"][-1] == tokenizer.eos_token_id for row in rows)
