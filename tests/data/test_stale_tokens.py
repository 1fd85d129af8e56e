"""Tokens that are kept are those of the data and the code that are there now, however alike earlier ones look."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from configs.datasets import CustomDataset
from configs.formats import DATASETS
from data import tokenizing
from data.dataset_functions.function_key import function_key
from data.dataset_functions.importing import find_dataset_function
from data.dataset_functions.user_sources import is_of_users, project_sources
from data.files import contents
from data.files.contents import contents_of
from data.splits.reading import load_split
from data.tokenizing import tokenize_split
from data.tokens.encoding import ONE_TEXT
from data.tokens.spans import TextSpan

WORDS = ["Anna ", "Petr "]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # As if a file had not changed for long: what is kept is all that tells it from another.
    monkeypatch.setattr(contents, "_SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(contents, "_SMALL_BYTES", 0)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def write(file: Path, word: str) -> None:
    rows = [f"{word}{number:03}" for number in range(50)]
    match file.suffix:
        case ".jsonl":
            file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        case ".csv":
            file.write_text("text\n" + "".join(f"{row}\n" for row in rows))
        case ".txt":
            file.write_text("".join(f"{row}\n" for row in rows))
        case ".parquet":
            pq.write_table(pa.table({"text": rows}), file, compression="none", write_statistics=False)
        case ".arrow":
            table = pa.table({"text": rows})
            with pa.OSFile(str(file), "wb") as target, pa.ipc.new_stream(target, table.schema) as writer:
                writer.write_table(table)


def learned(tokenizer: Any, path: Path) -> str:
    config = DATASETS["text_dataset"](str(path), sample_by="line")  # type: ignore[call-arg]
    rows = find_dataset_function("text_dataset", config)(config, tokenizer, "train")
    return tokenizer.decode(rows[0]["input_ids"], skip_special_tokens=True).split()[0]


def replaced(file: Path) -> None:
    os.replace(file.with_name("new"), file)


def copied(file: Path) -> None:
    file.write_bytes(file.with_name("new").read_bytes())


@pytest.mark.parametrize("change", [replaced, copied])
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".txt", ".parquet", ".arrow"])
def test_another_file_of_the_same_size_and_time_is_read(
    kind: str, change: Callable[[Path], None], tokenizer: Any, tmp_path: Path
) -> None:
    file = tmp_path / f"data{kind}"
    write(file, WORDS[0])
    status = file.stat()
    assert learned(tokenizer, file) == learned(tokenizer, file) == "Anna"
    other = tmp_path / f"other{kind}"
    write(other, WORDS[1])
    assert other.stat().st_size == status.st_size
    other.rename(tmp_path / "new")
    change(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert learned(tokenizer, file) == "Petr"


def test_a_link_that_was_moved_leads_to_its_new_file(tokenizer: Any, tmp_path: Path) -> None:
    link = tmp_path / "data.jsonl"
    for name, word in zip(("a", "b"), WORDS, strict=True):
        write(tmp_path / f"{name}.jsonl", word)
        os.utime(tmp_path / f"{name}.jsonl", (1e9, 1e9))
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / f"{name}.jsonl")
        assert learned(tokenizer, link) == word.strip()


def test_an_arrow_file_that_was_written_over_below_its_state_is_read(tokenizer: Any, tmp_path: Path) -> None:
    for name, word in zip(("a", "b"), WORDS, strict=True):
        datasets.Dataset.from_dict({"text": [f"{word}{number:03}" for number in range(50)]}).save_to_disk(
            str(tmp_path / name)
        )
    assert learned(tokenizer, tmp_path / "a") == "Anna"
    (arrow,) = (tmp_path / "a").glob("*.arrow")
    arrow.write_bytes((tmp_path / "b" / arrow.name).read_bytes())
    assert learned(tokenizer, tmp_path / "a") == "Petr"


def test_a_file_is_read_as_a_whole_once_and_again_if_in_doubt(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    whole = contents._read
    monkeypatch.setattr(contents, "_read", lambda file: (read.append(file), whole(file))[1])
    file = tmp_path / "data.jsonl"
    write(file, WORDS[0])
    first = contents_of([file])
    assert (contents_of([file]), len(read)) == (first, 1)
    os.utime(file, (1e9, 1e9))
    assert (contents_of([file]), len(read)) == (first, 2), "its times changed, its contents did not"
    (note,) = cache.rglob("*.json")
    note.write_text('{"damaged')
    assert (contents_of([file]), len(read)) == (first, 3)
    # A file that changed just now may change again without another time: it is not kept.
    monkeypatch.setattr(contents, "_SETTLED_SECONDS", 60.0)
    file.write_text(file.read_text().replace("Anna", "Petr"))
    assert contents_of([file]) != first
    assert contents_of([file]) != first
    assert len(read) == 5


def test_the_projects_own_code_is_in_the_key(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {str(file.relative_to(Path(tokenizing.__file__).parents[1])) for file in project_sources()}
    assert {"data/tokenizing.py", "data/tokens/long_texts.py", "data/prompts.py", "datasets/chat.py"} <= names
    code, file, keys = tmp_path / "code.py", tmp_path / "data.jsonl", []
    write(file, WORDS[0])
    monkeypatch.setattr(tokenizing, "project_sources", lambda: [code])
    examples = load_split("text_dataset", DATASETS["text_dataset"](str(file)), "train", text_columns=("text",))
    for text in ("1", "2", "1"):
        code.write_text(text)
        keys.append(tokenizing._cache_key(examples, tokenizer, as_text, ONE_TEXT, by_template=False))
    assert keys[0] == keys[2] != keys[1]


def as_text(example: dict[str, str], prompt: str = "") -> list[TextSpan]:
    return [TextSpan(prompt + example["text"], True)]


def closure(prompt: str) -> Callable[..., list[TextSpan]]:
    return lambda example: [TextSpan(prompt + example["text"], True)]


class Prompted:
    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    def __call__(self, example: dict[str, str]) -> list[TextSpan]:
        return as_text(example, self.prompt)


def over(function: Callable[..., list[TextSpan]]) -> Callable[..., list[TextSpan]]:
    return lambda example: function(example)


FUNCTIONS = {
    "partial": lambda prompt: partial(as_text, prompt=prompt),
    "partial in a partial": lambda prompt: partial(partial(as_text, prompt=prompt)),
    "closure": closure,
    "object": Prompted,
    "bound method": lambda prompt: Prompted(prompt).__call__,
    "closure over an object": lambda prompt: over(Prompted(prompt)),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_values_of_a_function_are_in_the_key(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    file, texts = tmp_path / "data.jsonl", []
    write(file, WORDS[0])
    for prompt in ("Eva ", "Max ", "Eva "):
        examples = load_split("text_dataset", DATASETS["text_dataset"](str(file)), "train", text_columns=("text",))
        rows = tokenize_split(examples, tokenizer, FUNCTIONS[kind](prompt))
        texts.append(tokenizer.decode(rows[0]["input_ids"], skip_special_tokens=True).split()[0])
    assert texts == ["Eva", "Max", "Eva"]
    assert function_key(FUNCTIONS[kind]("Eva ")) == function_key(FUNCTIONS[kind]("Eva ")), "or nothing is found again"


USER_FILE = """
import functools
from pathlib import Path
from data.splits.reading import load_split
from data.tokenizing import tokenize_split
from data.tokens.encoding import ONE_TEXT
from data.tokens.spans import TextSpan
{head}

def to_spans(example{parameters}):
    {body}
    return [TextSpan(prompt + example["text"], True)]

def get_custom_dataset(dataset_config, tokenizer, split):
    examples = load_split("custom_dataset", dataset_config, split, text_columns=("text",))
    {before}
    return tokenize_split(examples, tokenizer, {given})
"""
READ = '(Path(__file__).parent / "prompt.txt").read_text()'
PLAIN: dict[str, str] = {"head": "", "parameters": "", "body": "", "before": "", "given": "to_spans"}
USERS: dict[str, dict[str, str]] = {
    "given to a partial": {
        "parameters": ", prompt",
        "before": f"prompt = {READ}",
        "given": "functools.partial(to_spans, prompt=prompt)",
    },
    "read into a global": {"head": f"PROMPT = {READ}", "body": "prompt = PROMPT"},
    "read by the function": {"body": f"prompt = {READ}"},
    "read once": {"head": f"@functools.cache\ndef read():\n    return {READ}", "body": "prompt = read()"},
    "its name given": {
        "parameters": ", file",
        "body": "prompt = file.read_text()",
        "given": 'functools.partial(to_spans, file=Path(__file__).parent / ("prompt" + ".txt"))',
    },
    "imported": {"head": "import helper_{name}", "body": "prompt = helper_{name}.prompt()"},
    "imported from": {"head": "from helper_{name} import prompt as f", "body": "prompt = f()"},
    "imported in the function": {"body": "from helper_{name} import prompt as f; prompt = f()"},
    "imported by what is imported": {"body": "from second_{name} import f; prompt = f()"},
    "from a package": {"body": "from package_{name} import f; prompt = f()"},
}


def prepare_users(folder: Path, name: str, kind: str, word: str) -> Path:
    """A user's files, whose prompt is this word."""
    parts = PLAIN | {part: text.replace("{name}", name) for part, text in USERS[kind].items()}
    code = "\n".join(line for line in USER_FILE.format(**parts).splitlines() if line.strip())
    (folder / f"{name}.py").write_text(code)
    (folder / "prompt.txt").write_text(word)
    (folder / f"helper_{name}.py").write_text(f"def prompt():\n    return {word!r}\n")
    (folder / f"second_{name}.py").write_text(f"from helper_{name} import prompt as f\n")
    package = folder / f"package_{name}"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("from .inner import f\n")
    (package / "inner.py").write_text(f"def f():\n    return {word!r}\n")
    return folder / f"{name}.py"


@pytest.mark.parametrize("kind", USERS)
def test_what_a_users_function_reads_and_imports_is_in_the_key(
    kind: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name, texts = f"mine_{list(USERS).index(kind)}", []
    write(tmp_path / "data.jsonl", WORDS[0])
    for word in ("Eva ", "Maximilian ", "Eva "):
        for module in [module for module in sys.modules if module.endswith(name) or f"package_{name}" in module]:
            del sys.modules[module]  # as in another run
        file = prepare_users(tmp_path, name, kind, word)
        config = CustomDataset(str(tmp_path / "data.jsonl"), file=str(file))
        rows = find_dataset_function("custom_dataset", config)(config, tokenizer, "train")
        texts.append(tokenizer.decode(rows[0]["input_ids"], skip_special_tokens=True).split()[0])
    assert texts == ["Eva", "Maximilian", "Eva"]


MAP_FILE = """
import datasets
from pathlib import Path
from maphelper_{number} import suffix
{head}

def tokenize(row, tokenizer=None):
    ids = tokenizer.encode({prompt} + row["text"] + suffix(), add_special_tokens=False)
    return {{"input_ids": ids, "labels": ids}}

def get_custom_dataset(dataset_config, tokenizer, split):
    rows = datasets.load_dataset("json", data_files=dataset_config.data_path, split="train")
    return rows.map(tokenize, remove_columns=rows.column_names, fn_kwargs={{"tokenizer": tokenizer}})
"""


@pytest.mark.parametrize("changed", ["code", "file", "module"])
def test_the_librarys_own_map_in_a_users_function_sees_what_changed(
    changed: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    number, texts = ["code", "file", "module"].index(changed), []
    write(tmp_path / "data.jsonl", WORDS[0])
    # Python takes its compiled code for current if a file's size and second of change are the same.
    for word, size in (("Eva", 1), ("Max", 2)):
        sys.modules.pop(f"maphelper_{number}", None)
        now = {name: word if name == changed else "Eva" for name in ("code", "file", "module")}
        (tmp_path / "prompt.txt").write_text(now["file"])
        head = f"PROMPT = {READ}"
        code = MAP_FILE.format(number=number, head=head, prompt=f"'{now['code']} ' + PROMPT + ' '")
        (tmp_path / "mine.py").write_text(code + "#" * size)
        (tmp_path / f"maphelper_{number}.py").write_text(f"def suffix():\n    return ' {now['module']}'\n{'#' * size}")
        config = CustomDataset(str(tmp_path / "data.jsonl"), file=str(tmp_path / "mine.py"))
        rows = find_dataset_function("custom_dataset", config)(config, tokenizer, "train")
        texts.append(tokenizer.decode(rows[0]["input_ids"]).replace("Anna 000", "").split())
    assert sorted(texts[1]) == sorted([*texts[0][1:], "Max"])


def test_packages_in_a_folder_of_their_own_are_no_code_of_the_users(tmp_path: Path) -> None:
    """pip install --target puts them anywhere; their sources would take seconds to look through."""
    (tmp_path / "libraries/lib-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "libraries/lib-1.0.dist-info/RECORD").touch()
    for file in ("libraries/lib/__init__.py", "own/mine.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert not is_of_users(tmp_path / "libraries/lib/__init__.py")
    assert is_of_users(tmp_path / "own/mine.py")
