"""Data files and dataset functions that cannot be trained on are refused: one line that names what to change."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.helpers.refusals import POINTER, Bench

# Data files


def test_data_that_is_not_there_is_refused(bench: Bench) -> None:
    message = bench.refused("--samsum_dataset.data_path", str(bench.folder / "absent"))
    assert "--samsum_dataset.data_path" in message
    assert str(bench.folder / "absent") in message


def test_an_empty_data_folder_is_refused(bench: Bench) -> None:
    (bench.folder / "data").mkdir()
    message = bench.refused("--samsum_dataset.data_path", str(bench.folder / "data"))
    assert "--samsum_dataset.data_path" in message
    assert str(bench.folder / "data") in message


def test_a_folder_with_two_training_files_is_refused(bench: Bench) -> None:
    data = shutil.copytree(bench.samples, bench.folder / "data")
    shutil.copy(data / "train.jsonl", data / "train.json")
    message = bench.refused("--samsum_dataset.data_path", str(data))
    assert "train.json, train.jsonl" in message


def test_a_folder_without_training_data_is_refused(bench: Bench) -> None:
    data = shutil.copytree(bench.samples, bench.folder / "data")
    (data / "train.jsonl").unlink()
    message = bench.refused("--samsum_dataset.data_path", str(data))
    assert str(data) in message
    assert "train" in message


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("empty", "", []),
        ("blank", "\n\n", []),
        ("no rows", "[]", []),
        ("broken", '{"dialogue": "A: Hi", "summ', []),
        ("broken later", '{"dialogue": "A: Hi", "summary": "Hi."}\n{"dialogue": "A: Hi", "summ\n', []),
        ("no json", "dialogue,summary\nA: Hi,Hi.\n", []),
        ("one column missing", '{"dialogue": "A: Hi", "text": "Hi."}\n', ["summary", "text"]),
        ("columns missing", '{"id": "1", "conversation": "A: Hi"}\n', ["dialogue", "summary", "conversation"]),
        ("pointer", POINTER, ["git lfs pull"]),
        ("not text", '{"dialogue": "A: Hi", "summary": [7]}\n', ["summary"]),
        ("null", '{"dialogue": "A: Hi", "summary": "Hi."}\n{"dialogue": null, "summary": "Hi."}\n', ["dialogue"]),
    ],
)
def test_a_split_that_cannot_be_read_is_refused_by_its_path(
    bench: Bench, split: str, kind: str, text: str, named: list[str]
) -> None:
    data = shutil.copytree(bench.samples, bench.folder / "data")
    (data / f"{split}.jsonl").write_text(text)
    message = bench.refused("--samsum_dataset.data_path", str(data))
    assert "--samsum_dataset" in message
    assert str(data) in message
    assert split in message
    for name in named:
        assert name in message


def test_a_table_with_a_header_alone_is_refused(bench: Bench) -> None:
    file = bench.folder / "train.csv"
    file.write_text("dialogue,summary\n")
    message = bench.refused("--samsum_dataset.data_path", str(file))
    assert str(file) in message


def test_a_data_file_of_another_kind_is_refused(bench: Bench) -> None:
    file = bench.folder / "train.txt"
    file.write_text("A: Hi\n")
    message = bench.refused("--samsum_dataset.data_path", str(file))
    assert str(file) in message
    assert ".jsonl" in message


def test_rows_with_nothing_left_to_learn_are_refused(bench: Bench) -> None:
    message = bench.refused("--context_length", "8")
    assert "--context_length" in message
    assert "12 rows" in message


# Dataset functions


def test_a_dataset_function_that_does_not_exist_is_refused(bench: Bench) -> None:
    message = bench.refused("--dataset", str(bench.folder / "absent.py"))
    assert "--dataset" in message
    assert str(bench.folder / "absent.py") in message


@pytest.mark.parametrize("spelling", ["short", "long"])
def test_a_dataset_function_without_the_function_is_refused(bench: Bench, spelling: str) -> None:
    file = f"{bench.dataset_function('return []')[1]}:get_data"
    short, long = ["--dataset", file], ["--dataset", "custom_dataset", "--custom_dataset.file", file]
    message = bench.refused(*(short if spelling == "short" else long))
    assert "get_data" in message
    assert "my_dataset.py" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def get_custom_dataset(:\n", "SyntaxError"),
        ("import no_such_package\n", "no_such_package"),
        ("1 / 0\n", "Zero"),
    ],
)
def test_a_dataset_function_that_cannot_be_imported_is_refused_with_the_reason(
    bench: Bench, text: str, named: str
) -> None:
    (bench.folder / "my_dataset.py").write_text(text)
    message = bench.refused("--dataset", str(bench.folder / "my_dataset.py"))
    assert "my_dataset.py" in message
    assert named in message


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("raise KeyError('speaker')", ["KeyError", "speaker"]),
        ("raise SystemExit('no data')", ["no data"]),
        ("raise KeyboardInterrupt", ["KeyboardInterrupt", "my_dataset.py:4"]),
        ("yield {'input_ids': [5, 6], 'labels': [5, 6]}\nraise ValueError('row 2 is bad')", ["row 2 is bad"]),
        ("return dataset_config.no_such_setting", ["no_such_setting"]),
        ("return None", ["nothing"]),
        ("return []", ["empty"]),
        ("return 5", ["int"]),
        ("return [] if split == 'validation' else [{'input_ids': [5, 6], 'labels': [5, 6]}]", ["validation", "empty"]),
        ("return [{'input_ids': [5, 6]}]", ["labels"]),
        ("return [{'text': 'Hi'}]", ["input_ids", "labels", "text"]),
        ("return ['Hi']", ["input_ids", "labels", "str"]),
        ("return [{'input_ids': [5, 6], 'labels': [6]}]", ["one length"]),
        ("return [{'input_ids': [5, 6], 'labels': [5, 6], 'attention_mask': [1]}]", ["one length"]),
        ("return [{'input_ids': [5.5, 6.0], 'labels': [5, 6]}]", ["whole numbers"]),
        ("return [{'input_ids': 'Hi', 'labels': 'Hi'}]", ["whole numbers"]),
        ("return [{'input_ids': [[5], [5, 6]], 'labels': [5, 6]}]", ["row 1"]),
        ("return [{'input_ids': [5, None], 'labels': [5, 6]}]", ["whole numbers"]),
        ("return [{'input_ids': [5, 6], 'labels': [-100, -100]}]", ["label"]),
        ("return [{'input_ids': [], 'labels': []}]", ["1 rows"]),
        (
            "return [{'input_ids': [5, 6], 'labels': [5, 6]}, {'input_ids': [5, 600], 'labels': [5, 6]}]",
            ["row 2", "600"],
        ),
        ("return [{'input_ids': [5, 6], 'labels': [5, 1234]}]", ["1234", "vocabulary"]),
        ("return [{'input_ids': [5, -1], 'labels': [5, 6]}]", ["-1", "vocabulary"]),
        ("return [{'input_ids': [5, 6], 'labels': [5, -7]}]", ["-7", "vocabulary"]),
        ("return [{'input_ids': [5, 2**32 + 6], 'labels': [5, 6]}]", [str(2**32 + 6)]),
        ("return [{'input_ids': [5, 6], 'labels': [5, 2**32 + 6]}]", [str(2**32 + 6)]),
    ],
)
def test_a_dataset_function_whose_rows_cannot_be_trained_on_is_refused(
    bench: Bench, body: str, named: list[str]
) -> None:
    message = bench.refused(*bench.dataset_function(body))
    assert "dataset" in message
    for name in named:
        assert name in message


FAILS_IN_A_HELPER = """
import json

def read(line):
    return json.loads(line)

def get_custom_dataset(dataset_config, tokenizer, split):
    for line in ["{}", "{'a'}"]:
        read(line)
        yield {"input_ids": [5, 6], "labels": [5, 6]}
"""


@pytest.mark.parametrize("streaming", [False, True])
def test_an_exception_in_a_dataset_function_is_shown_with_its_line(bench: Bench, streaming: bool) -> None:
    file = bench.folder / "my_dataset.py"
    file.write_text(FAILS_IN_A_HELPER)
    given = ["--streaming", "--max_train_step", "1"] if streaming else []
    (outcome,) = bench.group.run(bench.flags("--dataset", str(file), *given), 1)
    assert outcome.status == 2
    error, *below = outcome.stderr[outcome.stderr.index("error: ") :].splitlines()
    assert error.startswith("error: dataset (get_custom_dataset, split 'train')")
    assert error.endswith(f"({file}:5)")
    assert "JSONDecodeError: Expecting property name" in error
    assert [line.strip() for line in below[:4]] == [
        f'File "{file}", line 9, in get_custom_dataset',
        "read(line)",
        f'File "{file}", line 5, in read',
        "return json.loads(line)",
    ]
    assert below[-1].startswith("JSONDecodeError: ")
    assert not [line for line in below if "Traceback" in line or "pipeline.py" in line]
    assert not bench.output.exists()


def test_an_exception_while_a_stream_is_read_ends_the_run_with_its_line(bench: Bench) -> None:
    file = bench.folder / "my_dataset.py"
    file.write_text(
        "def get_custom_dataset(dataset_config, tokenizer, split):\n"
        "    for number in range(1000):\n"
        "        yield {'input_ids': [5, 6, 7 + 1 // (300 - number)], 'labels': [5, 6, 7]}\n"
    )
    streamed = ["--streaming", "--max_train_step", "99", "--run_validation", "False", "--num_workers_dataloader", "1"]
    small = ["--shuffle_buffer_size", "4", "--batching_strategy", "padding"]
    (outcome,) = bench.group.run(bench.flags("--dataset", str(file), *streamed, *small), 1)
    assert outcome.status == 1
    assert re.search(rf"^error: dataset .*: ZeroDivisionError: .* \({file}:3\)$", outcome.stderr, re.MULTILINE)
    assert "number in range" not in outcome.stderr
    assert "    yield {'input_ids'" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_an_exception_while_a_dataset_file_is_imported_is_shown_with_its_line(bench: Bench) -> None:
    (bench.folder / "my_dataset.py").write_text("def half():\n    return 1 / 0\n\nhalf()\n")
    message = bench.refused("--dataset", str(bench.folder / "my_dataset.py"))
    assert message.endswith(f"({bench.folder}/my_dataset.py:2)")


@pytest.mark.parametrize("flag", [["--eval_every_steps", "2"], ["--eval_before_training"], ["--keep_best"]])
def test_an_evaluation_without_data_for_it_is_refused(flag: list[str], bench: Bench) -> None:
    message = bench.refused(*flag, "--samsum_dataset.data_path", str(bench.samples / "train.jsonl"))
    assert message.startswith(f"error: {flag[0]}: validation: none, since ")
    assert message.endswith("--samsum_dataset.validation_fraction 0.05 keeps some of them for it, or leave this out")
