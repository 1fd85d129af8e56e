"""Conversations with images, streamed from each form and mixed with text, give the steps that stored ones give."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import datasets
import pytest

from tests.helpers.image_chat_reference import write_conversations
from tests.helpers.image_chats import save_chat_model
from tests.helpers.processes import ProcessGroup, train_events

NUM_ROWS, NUM_STEPS = 24, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model("qwen2_vl", tmp_path_factory.mktemp("models") / "qwen2_vl")


def write_forms(folder: Path) -> dict[str, Path]:
    """The same conversations as lines with files, as a table with images in it, and as a tar archive."""
    table = write_conversations(folder, NUM_ROWS)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    stored = [
        row | {"images": [{"bytes": (folder / name).read_bytes(), "path": name} for name in row["images"]]}
        for row in rows
    ]
    data = datasets.Dataset.from_list(stored).cast_column("images", datasets.List(datasets.Image()))
    data.to_parquet(folder / "train.parquet", batch_size=5)
    with tarfile.open(folder / "train.tar", "w") as archive:
        for number, row in enumerate(rows):
            members = {f"{place}.png": (folder / name).read_bytes() for place, name in enumerate(row["images"])}
            members["json"] = json.dumps({"messages": row["messages"]}).encode()
            for kind, contents in members.items():
                info = tarfile.TarInfo(f"{number:04}.{kind}")
                info.size = len(contents)
                archive.addfile(info, io.BytesIO(contents))
    return {kind: folder / f"train.{kind}" for kind in ("jsonl", "parquet", "tar")}


def flags_for(model: Path, data: str, output: Path, *more: str) -> list[str]:
    flags = ["--model_name", str(model), "--output_dir", str(output), "--dataset", "chat_dataset", "--seed", "3"]
    flags += ["--chat_dataset.data_path", data, "--run_validation", "False", "--lr", "1e-2", "--save_model", "False"]
    flags += ["--max_train_step", str(NUM_STEPS), "--num_workers_dataloader", "0", "--batching_strategy", "padding"]
    return [*flags, "--mixed_precision", "False", *more]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in train_events(run)]


def test_each_form_streamed_by_one_rank_or_two(model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    found = []
    more = ("--chat_dataset.streaming", "--shuffle_buffer_size", "6", "--save_every_steps", "0")
    for number, (kind, file) in enumerate(write_forms(tmp_path / "data").items()):
        ranks = 1 + number % 2
        flags = flags_for(model, str(file), tmp_path / kind, *more, "--batch_size_training", str(4 // ranks))
        process_group.train(flags + (["--enable_fsdp"] if ranks > 1 else []), ranks)
        found.append(losses(tmp_path / kind))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
def test_a_stream_goes_on_where_it_was(model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    """What waits in the shuffle buffer is read again with its images."""
    data = str(write_forms(tmp_path / "data")["tar"])
    more = ("--chat_dataset.streaming", "--shuffle_buffer_size", "6", "--batch_size_training", "2")
    process_group.train(flags_for(model, data, tmp_path / "whole", *more), 1)
    flags = flags_for(model, data, tmp_path / "parts", *more, "--save_every_steps", "3")
    place = flags.index("--max_train_step") + 1
    process_group.train([*flags[:place], "4", *flags[place + 1 :]], 1)
    process_group.train([*flags, "--resume", "auto"], 1)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stored", "streamed"])
def test_images_are_mixed_with_text_alone(
    streamed: bool, model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    images = write_conversations(tmp_path / "images", NUM_ROWS)
    texts = write_conversations(tmp_path / "texts", NUM_ROWS, seed=9, with_images=False)
    found = []
    more = ["--dataset_weights", "1,3", "--save_every_steps", "0"]
    more += ["--chat_dataset.streaming", "--shuffle_buffer_size", "6"] if streamed else []
    for ranks in (1, 2):
        flags = flags_for(model, f"{images},{texts}", tmp_path / str(ranks), *more)
        flags += ["--batch_size_training", str(4 // ranks)] + (["--enable_fsdp"] if ranks > 1 else [])
        process_group.train(flags, ranks)
        found.append(losses(tmp_path / str(ranks)))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert len(found[0]) == NUM_STEPS
