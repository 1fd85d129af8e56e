"""Ranks of a machine that share the tokenizing of a stream: the same rows as alone, the same refusals, nothing left."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.flags import parse_flags
from data.pipeline import load_data
from data.sequences.causal import build_sequences
from data.streaming.block_share import BlockShare
from data.streaming.sources import BLOCK, Stream
from data.streaming.steps import StreamSteps
from tests.helpers.processes import ProcessGroup, train_events
from utils.errors import ConfigError

NUM_STEPS = 90


def flags_of(model: Path, file: Path, *flags: str) -> list[str]:
    argv = ["--model_name", str(model), "--dataset", "text_dataset", "--text_dataset.data_path", str(file)]
    argv += ["--streaming", "--run_validation", "False", "--shuffle_buffer_size", "50"]
    return [*argv, "--context_length", "32", *flags]


def write(folder: Path, num_rows: int, wrong: int | None = None) -> Path:
    file = folder / "rows.jsonl"
    texts = [f"Row {number} says {'much ' * (number % 9)}and ends." for number in range(num_rows)]
    rows = [{"text": None if number == wrong else text} for number, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def open_stream(model: Path, file: Path) -> Stream:
    config = parse_flags(flags_of(model, file, "--max_train_step", str(NUM_STEPS)))
    data = load_data(
        config.train_config,
        config.dataset_configs,
        AutoTokenizer.from_pretrained(model),
        build_sequences=build_sequences,
        vocab_size=600,
        context_length=32,
    )
    assert data.stream is not None
    return data.stream


def steps_of(stream: Stream) -> list[Any]:
    """What is trained on, or the refusal, at which all ends."""
    found: list[Any] = []
    try:
        for rows, lines in StreamSteps(stream, 8):
            found.append(([[(ids.tolist(), n) for ids, _, n in row] for row in rows], lines))
    except ConfigError as error:
        found.append(str(error))
    return found


def shared(stream_of: Any, folder: Path, size: int) -> tuple[list[list[Any]], list[BlockShare]]:
    """What each of several processes, here threads, makes of its own stream."""
    for place in range(size):
        (folder / str(place)).mkdir(parents=True)
    shares = [BlockShare(folder, place, size) for place in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda share: steps_of(stream_of().shared(share)), shares)), shares


@pytest.mark.parametrize(("num_rows", "size"), [(2 * BLOCK + 9, 2), (3 * BLOCK, 3), (40, 2)])
def test_processes_that_share_train_on_what_one_alone_does(
    num_rows: int, size: int, tiny_model: Path, tmp_path: Path
) -> None:
    """40 rows are one block a pass, and several passes: the processes tokenize it in turn."""
    file = write(tmp_path, num_rows)
    alone = steps_of(open_stream(tiny_model, file))
    assert len(alone) == NUM_STEPS
    found, shares = shared(lambda: open_stream(tiny_model, file), tmp_path / "share", size)
    assert found == [alone] * size
    assert len({share.num_rounds for share in shares}) == 1
    for share in shares:
        assert share.folder.exists()
        share.end()
    assert not (tmp_path / "share").exists()


@pytest.mark.parametrize("wrong", [BLOCK + 3, 2 * BLOCK + 3])
def test_a_row_that_is_wrong_is_refused_by_every_process_alike(wrong: int, tiny_model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, 3 * BLOCK, wrong)
    alone = steps_of(open_stream(tiny_model, file))
    assert f"row {wrong + 1}: " in str(alone[-1])
    found, _ = shared(lambda: open_stream(tiny_model, file), tmp_path / "share", 2)
    assert found == [alone] * 2


def test_each_block_is_tokenized_once(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, 4 * BLOCK)
    made: list[int] = []
    streams = [open_stream(tiny_model, file) for _ in range(2)]
    build = streams[0].sources[0].build

    def counted(rows: Any, **options: Any) -> Any:
        made.append(options["first_row"])
        return build(rows, **options)

    for stream in streams:
        stream.sources[0].build = counted
    shared(streams.pop, tmp_path / "share", 2)
    assert sorted(set(made)) == sorted(made)
    assert len(made) > 2


def test_runs_of_one_and_two_ranks_have_the_same_losses(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, places = write(tmp_path, 700), tmp_path / "places"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))
    losses = []
    for ranks in (1, 2):
        given = flags_of(
            tiny_model,
            file,
            "--max_train_step",
            "12",
            "--output_dir",
            str(tmp_path / f"run{ranks}"),
            "--save_model",
            "False",
        )
        process_group.train([*given, "--batch_size_training", str(4 // ranks)], ranks)
        losses.append([event["loss"] for event in train_events(tmp_path / f"run{ranks}")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not list(places.glob("finetuning-blocks-*"))


def test_who_waits_for_a_block_when_the_run_ends_waits_no_longer(tmp_path: Path) -> None:
    (tmp_path / "share/1").mkdir(parents=True)
    share = BlockShare(tmp_path / "share", 1, 2)
    blocks = share.in_turn(iter([0]), lambda batch: pytest.fail("the block is the other's"))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(next, blocks)
        share.end()
        with pytest.raises(ConfigError, match="the run has ended"):
            waiting.result(timeout=30)
