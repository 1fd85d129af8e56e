"""A stream goes on from a state as if it had not been left, and reads nothing of what lies before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from configs.flags import parse_flags
from data.batches.layout import BatchLayout
from data.files.byte_chunks import ByteChunks
from data.pipeline import load_data
from data.sequences.causal import build_sequences
from data.streaming.block_share import BlockShare
from data.streaming.loader import StreamLoader
from data.streaming.passes import StateMismatch
from data.streaming.sources import Stream
from data.streaming.steps import StreamSteps

TEXTS = [f"Row {number} says {'much ' * (number % 9)}and ends." for number in range(330)]
NUM_STEPS = 50


@pytest.fixture
def chunks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.files.byte_chunks.CHUNK_BYTES", 700)
    monkeypatch.setattr("data.files.json_files._ITEMS_AT_A_TIME", 23)
    monkeypatch.setattr("data.streaming.sources.BLOCK", 16)


def write(folder: Path, kind: str, texts: list[str] = TEXTS) -> Path:
    """A file of one kind, which has the text of each row, or a folder of two such files."""
    folder.mkdir(exist_ok=True)
    file, rows = folder / f"rows.{kind}", [{"text": text, "other": number} for number, text in enumerate(texts)]
    if kind == "jsonl":
        file.write_text("\n".join(json.dumps(row) + ("\n" if row["other"] % 7 == 0 else "") for row in rows))
    elif kind == "json":
        file.write_text(json.dumps(rows))
    elif kind in ("csv", "tsv"):
        delimiter = "," if kind == "csv" else "\t"
        cells = (f'"{row["text"]}{delimiter}\nwith ""quotes"""{delimiter}{row["other"]}' for row in rows)
        file.write_text("\n".join([f"text{delimiter}other", *cells]) + "\n")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=37)
    elif kind in ("arrow", "stream.arrow"):
        table = pa.Table.from_pylist(rows)
        make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with make(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=37)
    elif kind == "txt":
        file.write_text("\n".join(texts))
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(file))
    else:
        half = len(texts) // 2
        for number, part in enumerate((texts[:half], texts[half:])):
            write(folder, "jsonl", part).rename(folder / f"train-{number}.jsonl")
        return folder
    return file


def open_stream(
    model: Path, data: Path, *flags: str, dataset: str = "text_dataset", num_steps: int = NUM_STEPS
) -> Stream:
    argv = ["--model_name", str(model), "--dataset", dataset, "--text_dataset.data_path", str(data)]
    argv += ["--streaming", "--run_validation", "False", "--shuffle_buffer_size", "40", "--context_length", "32"]
    config = parse_flags([*argv, "--max_train_step", str(num_steps), *flags])
    stream = load_data(
        config.train_config,
        config.dataset_configs,
        AutoTokenizer.from_pretrained(model),
        build_sequences=build_sequences,
        vocab_size=600,
        context_length=32,
    ).stream
    assert stream is not None
    return stream


def numbers(steps: Iterator[Any]) -> list[Any]:
    return [([[(ids.tolist(), row) for ids, _, row in one] for one in rows], lines) for rows, lines in steps]


def states_of(stream: Stream) -> tuple[list[Any], list[bytes]]:
    """All steps, and the state behind each."""
    steps, states, found = StreamSteps(stream, 8), [], []
    for step in steps:
        found += numbers(iter([step]))
        states.append(steps.state())
    return found, states


def gone_on(stream: Stream, state: bytes) -> list[Any]:
    steps = StreamSteps(stream, 8)
    assert steps.mismatch(state) == ""
    steps.go_on(state)
    return numbers(iter(steps))


@pytest.mark.usefixtures("chunks_are_small")
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("jsonl", []),
        ("jsonl", ["--batching_strategy", "padding"]),
        ("jsonl", ["--split_slice", "300"]),
        ("json", []),
        ("csv", []),
        ("tsv", []),
        ("parquet", []),
        ("arrow", []),
        ("stream.arrow", []),
        ("txt", []),
        ("saved", []),
        ("two files", []),
    ],
)
def test_a_stream_goes_on_from_any_step_as_if_it_had_not_been_left(
    kind: str, flags: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    """Over several passes; texts that are split give several sequences."""
    data = write(tmp_path / "data", kind)
    whole, states = states_of(open_stream(tiny_model, data, *flags))
    assert len(whole) == NUM_STEPS
    assert sum("ended at step" in " ".join(lines) for _, lines in whole) >= 1
    steps = (0, 3, 10, 17, 24, 31, 38, 44)
    for step in steps if kind == "parquet" else steps[1::2]:
        assert gone_on(open_stream(tiny_model, data, *flags), states[step]) == whole[step + 1 :]


@pytest.mark.usefixtures("chunks_are_small")
@pytest.mark.parametrize("weights", [[], ["--dataset_weights", "0.7,0.3"]])
def test_several_datasets_go_on_too(weights: list[str], tiny_model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data", "jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"input": text, "target": "Good."}) + "\n" for text in TEXTS[:90]))
    flags = ["--grammar_dataset.data_path", str(other), "--truncation", "left", *weights]

    def opened() -> Stream:
        return open_stream(tiny_model, data, *flags, dataset="text_dataset,grammar_dataset")

    whole, states = states_of(opened())
    for step in (0, 9, 20, 33, 45):
        assert gone_on(opened(), states[step]) == whole[step + 1 :]


@pytest.mark.usefixtures("chunks_are_small")
def test_processes_that_share_go_on_where_one_alone_was(tiny_model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data", "jsonl")
    whole, states = states_of(open_stream(tiny_model, data))
    for place in range(2):
        (tmp_path / f"share/{place}").mkdir(parents=True)
    streams = [open_stream(tiny_model, data).shared(BlockShare(tmp_path / "share", place, 2)) for place in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda stream: gone_on(stream, states[20]), streams)) == [whole[21:]] * 2


@pytest.mark.usefixtures("chunks_are_small")
def test_what_lies_before_is_not_read(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither bytes nor tokens: the state knows where the file goes on, and which earlier rows still wait."""
    data = write(tmp_path / "data", "jsonl", [f"Row {number} ends with {number % 97}." for number in range(4000)])
    whole, states = states_of(open_stream(tiny_model, data, num_steps=300))
    stream = open_stream(tiny_model, data, num_steps=300)
    positions: list[int] = []
    read_at, build, num_made = ByteChunks.at, stream.sources[0].build, 0

    def at(chunks: ByteChunks, position: int) -> bytes:
        positions.append(position)
        return read_at(chunks, position)

    def counted(rows: Any, **options: Any) -> Any:
        nonlocal num_made
        sequences = build(rows, **options)
        num_made += len(sequences)
        return sequences

    monkeypatch.setattr(ByteChunks, "at", at)
    stream.sources[0].build = counted
    steps = StreamSteps(stream, 8)
    steps.go_on(states[250])
    assert numbers(iter([next(iter(steps))])) == whole[251:252]
    named = json.loads(states[250])
    num_waiting = len(named["held"]) + sum(map(len, named["rows"]["open_rows"]))
    assert num_made <= num_waiting + 6 * 16, "what waited, and the blocks of one step"
    assert num_made < 400
    assert 700 * len(set(positions)) < data.stat().st_size / 4


def test_a_state_belongs_to_the_step_that_was_given_though_a_process_reads_ahead(
    tiny_model: Path, tmp_path: Path
) -> None:
    data, layout = write(tmp_path / "data", "jsonl"), BatchLayout(4, 1, 1)

    def loader() -> StreamLoader:
        stream = replace(open_stream(tiny_model, data), num_steps=30)
        return StreamLoader(stream, layout, rank=0, collate=rows_of, num_workers=1, say=lambda line: None)

    whole = list(loader().epoch(0))
    left = loader()
    steps = left.epoch(0)
    assert [next(steps) for _ in range(17)] == whole[:17]
    state = left.state
    steps.close()
    assert state is not None
    assert 10 < json.loads(state)["step"] <= 17
    gone_on = loader()
    gone_on.state = state
    assert list(gone_on.epoch(0, 17)) == whole[17:]


def rows_of(rows: list[Any]) -> list[Any]:
    return [[(ids.tolist(), row) for ids, _, row in one] for one in rows]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("longer", "its files have changed since"),
        ("compressed", "cannot be read from a place in their middle"),
        ("none", "the checkpoint does not say where it was"),
        ("damaged", "the checkpoint's place in it cannot be read"),
        ("seed", "seed differ from the checkpoint's"),
        ("not there", "the checkpoint's place in it is damaged"),
    ],
)
def test_else_the_stream_is_read_again_and_a_line_says_why(
    change: str, reason: str, tiny_model: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "data", "jsonl")
    state: bytes | None = states_of(open_stream(tiny_model, data))[1][20]
    flags: list[str] = []
    if change == "longer":
        with data.open("a") as file:
            file.write('\n{"text": "one more"}\n')
    elif change == "compressed":
        with pa.CompressedOutputStream(str(tmp_path / "rows.jsonl.gz"), "gzip") as packed:
            packed.write(data.read_bytes())
        data = tmp_path / "rows.jsonl.gz"
    elif change == "seed":
        flags = ["--seed", "7"]
    elif change == "not there":
        assert state is not None
        state = state.replace(b'"held":[[0,', b'"held":[[0,9')
    else:
        state = None if change == "none" else b"{"
    said: list[str] = []
    loader = StreamLoader(
        open_stream(tiny_model, data, *flags), BatchLayout(8, 1, 1), rank=0, collate=rows_of, say=said.append
    )
    loader.state = state
    rest = list(loader.epoch(0, 21))
    again = [line for line in said if line.startswith("resume:")]
    assert len(again) == 1
    assert again[0].startswith("resume: the stream is read again from its beginning, since ")
    assert reason in again[0]
    whole = list(
        StreamLoader(open_stream(tiny_model, data, *flags), BatchLayout(8, 1, 1), rank=0, collate=rows_of).epoch(0)
    )
    assert rest == whole[21:]


def test_a_sample_that_is_not_there_is_no_place_to_go_on(tiny_model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data", "jsonl")
    state = json.loads(states_of(open_stream(tiny_model, data))[1][20])
    state["held"][0][3] = 9
    with pytest.raises(StateMismatch, match="1 of its samples are not there"):
        StreamSteps(open_stream(tiny_model, data), 8).go_on(json.dumps(state).encode())
