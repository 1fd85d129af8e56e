"""Checks that the same data gives the same tokens, however it is written and read.

    python -m benchmarks.same_tokens TOKENIZER,... [--count 200] [--first 0]

Makes random data sets of chats, calls, instructions, texts and preferences, writes each as JSON lines, a JSON list, an
object with a list, compressed, as Parquet, Arrow and CSV, in one file and in several; each is read whole and streamed.
All ways must give the same token ids and labels, or refuse the same row for the same reason; the same conversations in
other words (ShareGPT's, instructions, preferences) must do so, too. A TOKENIZER is a folder or a name on the hub. One
that has no chat template gets ChatML's. The number of data sets that differ must be 0.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import fire
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from benchmarks.random_rows import RandomData, Row, make_data
from configs.datasets import DataSource
from configs.formats import DATASETS
from data import tokenizing
from data.dataset_functions.importing import find_dataset_function
from data.tokens.special_text import SpecialTokens
from utils.errors import ConfigError

CHATML = Path(__file__).resolve().parents[1] / "datasets/samples/formats/chat.jinja"
_special_tokens_of = lru_cache(maxsize=1)(SpecialTokens.of)

Tokens = list[tuple[list[int], list[int]]] | str
"""Ids and labels of each row; or the reason of a refusal."""


def check(data: RandomData, tokenizer: Any, folder: Path, ways: Iterable[str] | None = None) -> list[str]:
    """What differs between ways to write and to read the data; empty if nothing does.

    Args:
        ways: of WAYS; all by default.
    """
    wrong, first = [], None
    draw = random.Random(len(data.rows))
    for number, (name, settings, rows) in enumerate([(data.dataset, data.settings, data.rows), *data.twins]):
        for way in ways or (draw.sample([*WAYS], 3) if number else WAYS):
            place = folder / f"{number}-{way}"
            place.mkdir(parents=True)
            path = WAYS[way](rows, place)
            if path is None:
                continue
            # Random cells of several lines look like several rows, which is refused unless the flag says what they are.
            how = settings | ({"quoting": "double"} if way.startswith(("csv", "tsv")) else {})
            for streams in (False, True):
                found = read(name, how, path, tokenizer, streams=streams)
                label = f"{name} {settings} as {way}{', streamed' if streams else ''}"
                first = first or (label, found)
                if found != first[1]:
                    wrong.append(f"{label}: {_difference(first[1], found, tokenizer)} (first: {first[0]})")
    return wrong


def read(name: str, settings: dict[str, Any], path: Path, tokenizer: Any, *, streams: bool) -> Tokens:
    """The tokens of each row, as training gets them."""
    config = DATASETS[name](data_path=str(path), streaming=streams, **settings)
    # Each data set has a cache of its own, and going through a vocabulary each time would take most of the time.
    with (
        patch.object(tokenizing, "tokenizer_key", lambda tokenizer: ""),
        patch.object(SpecialTokens, "of", _special_tokens_of),
        redirect_stdout(io.StringIO()),
    ):
        return _read(name, config, tokenizer)


def _read(name: str, config: DataSource, tokenizer: Any) -> Tokens:
    try:
        rows = find_dataset_function(name, config)(config, tokenizer, "train")
        return [([*map(int, row["input_ids"])], [*map(int, row["labels"])]) for row in rows]
    except ConfigError as error:
        said = re.sub(r"^.*?(row \d+)", r"\1", str(error))
        said = re.sub(r"--\w+_dataset\.", "--X.", said)  # the same data may be of two formats
        return re.sub(r" \(row \d+ of [^)]*\)", "", said)[:240]  # of several files the row's own; long ones are cut


def _difference(one: Tokens, other: Tokens, tokenizer: Any) -> str:
    if isinstance(one, str) or isinstance(other, str):
        return f"{str(other)[:300]!r} instead of {str(one)[:300]!r}"
    if len(one) != len(other):
        return f"{len(other)} rows instead of {len(one)}"
    index = next(index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    (ids, labels), (other_ids, other_labels) = one[index], other[index]
    if ids == other_ids:
        return f"row {index + 1}: labels {other_labels} instead of {labels}"
    place = next((n for n, pair in enumerate(zip(ids, other_ids, strict=False)) if pair[0] != pair[1]), len(ids))
    texts = [tokenizer.decode(part[max(0, place - 8) : place + 8]) for part in (other_ids, ids)]
    return f"row {index + 1}, token {place + 1}: {texts[0]!r} instead of {texts[1]!r}"


def _as_json(rows: list[Row]) -> list[Row]:
    """The rows with lists as JSON text, as tables of text have them."""
    return [{key: json.dumps(v) if isinstance(v, list | dict) else v for key, v in row.items()} for row in rows]


def _lines(rows: Iterable[Row], **options: Any) -> str:
    return "".join(json.dumps(row, **options) + "\n" for row in rows)


def _write(file: Path, text: str) -> Path:
    file.write_bytes(text.encode("utf-8"))
    return file


def _table(rows: list[Row]) -> pa.Table:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return pa.table({key: [row.get(key) for row in rows] for key in keys})


def _parquet(rows: list[Row], file: Path) -> Path:
    pq.write_table(_table(rows), file, row_group_size=3)
    return file


def _arrow(rows: list[Row], file: Path, new: Callable[..., Any]) -> Path:
    table = _table(rows)
    with pa.OSFile(str(file), "wb") as target, new(target, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return file


def _csv(rows: list[Row], file: Path, **options: Any) -> Path | None:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, keys, **options)
        writer.writeheader()
        writer.writerows(_as_json(rows))
    return file


def _saved(rows: list[Row], folder: Path) -> Path:
    datasets.Dataset(_table(rows)).save_to_disk(str(folder / "saved"), num_shards=min(2, len(rows)))
    return folder / "saved"


def _shards(rows: list[Row], folder: Path, write: Callable[[list[Row], Path], Any], ending: str) -> Path:
    middle = (len(rows) + 1) // 2
    for number, part in enumerate((rows[:middle], rows[middle:])):
        if part:
            write(part, folder / f"train-{number}{ending}")
    return folder


def _lines_of_text(rows: list[Row], file: Path, end: str = "\n", mark: str = "") -> Path | None:
    texts = [row.get("text") for row in rows]
    if any(text is None or text.splitlines() != [text] or text.startswith("\ufeff") for text in texts):
        return None
    return _write(file, mark + "".join(f"{text}{end}" for text in texts))


WAYS: dict[str, Callable[[list[Row], Path], Path | None]] = {
    "jsonl": lambda rows, folder: _write(folder / "a.jsonl", _lines(rows)),
    "jsonl in UTF-8": lambda rows, folder: _write(folder / "a.jsonl", "\ufeff" + _lines(rows, ensure_ascii=False)),
    "jsonl with lists as text": lambda rows, folder: _write(folder / "a.jsonl", _lines(_as_json(rows))),
    "jsonl with Windows' lines": lambda rows, folder: _write(folder / "a.jsonl", _lines(rows).replace("\n", "\r\n")),
    "json list": lambda rows, folder: _write(folder / "a.json", json.dumps(rows, indent=1, ensure_ascii=False)),
    "json object": lambda rows, folder: _write(folder / "a.json", json.dumps({"data": rows})),
    "jsonl.gz": lambda rows, folder: _gzip(folder / "a.jsonl.gz", _lines(rows)),
    "jsonl shards": lambda rows, folder: _shards(rows, folder, lambda part, f: _write(f, _lines(part)), ".jsonl"),
    "parquet": lambda rows, folder: _parquet(rows, folder / "a.parquet"),
    "parquet of text": lambda rows, folder: _parquet(_as_json(rows), folder / "a.parquet"),
    "parquet shards": lambda rows, folder: _shards(rows, folder, _parquet, ".parquet"),
    "arrow stream": lambda rows, folder: _arrow(rows, folder / "a.arrow", pa.ipc.new_stream),
    "arrow file": lambda rows, folder: _arrow(_as_json(rows), folder / "a.arrow", pa.ipc.new_file),
    "saved": _saved,
    "csv": lambda rows, folder: _csv(rows, folder / "a.csv"),
    "csv, all quoted": lambda rows, folder: _csv(rows, folder / "a.csv", quoting=csv.QUOTE_ALL, lineterminator="\n"),
    "csv shards": lambda rows, folder: _shards(rows, folder, _csv, ".csv"),
    "tsv": lambda rows, folder: _csv(rows, folder / "a.tsv", delimiter="\t"),
    "txt": lambda rows, folder: _lines_of_text(rows, folder / "a.txt"),
    "txt of Windows": lambda rows, folder: _lines_of_text(rows, folder / "a.txt", "\r\n", "\ufeff"),
}
"""Each writes rows into a folder, and returns what --NAME.data_path names; None if it cannot hold such rows."""


def _gzip(file: Path, text: str) -> Path:
    file.write_bytes(gzip.compress(text.encode()))
    return file


def with_template(tokenizer: Any) -> Any:
    """The tokenizer, with ChatML's template if it has none."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHATML.read_text()
    return tokenizer


def main(tokenizers: str, count: int = 200, first: int = 0) -> None:
    datasets.disable_progress_bars()
    names = tokenizers.split(",") if isinstance(tokenizers, str) else tokenizers
    for name in names:
        tokenizer, num_wrong = with_template(AutoTokenizer.from_pretrained(name)), 0
        for seed in range(first, first + count):
            with tempfile.TemporaryDirectory() as folder:
                datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
                wrong = check(make_data(seed), tokenizer, Path(folder))
            num_wrong += bool(wrong)
            for line in wrong[:3]:
                print(f"{name}, data set {seed}: {line}", flush=True)
        print(f"{name}: {num_wrong} of {count} data sets differ", flush=True)


if __name__ == "__main__":
    fire.Fire(main)
