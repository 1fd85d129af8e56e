"""Conversations with images train as a plain loop does, however they are split, and where a rank has no image, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cuts import draws, random_cut
from tests.helpers.image_chat_reference import chat_reference, write_conversations
from tests.helpers.image_chats import save_chat_model
from tests.helpers.image_reference import LR, MOMENTUM
from tests.helpers.made import Made
from tests.helpers.processes import ProcessGroup
from tests.helpers.reference import SEED, assert_agrees

NUM_STEPS, NUM_ROWS = 2, 16
CASES = [("qwen2_vl", "fsdp"), ("qwen2_5_vl", "ddp"), ("qwen2_vl", "single")]
SLOW_CASES = [("gemma3", "fsdp"), ("llava", "ddp")]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("chats"), NUM_ROWS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("models")
    return Made(lambda name: save_chat_model(name, folder / name))


@pytest.fixture(scope="module")
def references(models: Made, chats: Path) -> Made:
    return Made(
        lambda name, global_batch: chat_reference(models[name], chats, num_steps=NUM_STEPS, global_batch=global_batch)
    )


def flags_for(model: Path, data: Path, output: Path, num_steps: int = NUM_STEPS) -> list[str]:
    flags = ["--model_name", str(model), "--output_dir", str(output), "--seed", str(SEED), "--lr", str(LR)]
    flags += ["--dataset", "chat_dataset", "--chat_dataset.data_path", str(data), "--run_validation", "False"]
    flags += ["--max_train_step", str(num_steps), "--num_epochs", "4", "--num_workers_dataloader", "0"]
    flags += ["--optimizer", "SGD", "--momentum", str(MOMENTUM), "--mixed_precision", "False"]
    flags += ["--batching_strategy", "padding", "--save_model", "False"]
    return [*flags, "--gradient_clipping", "--gradient_clipping_threshold", "0.5"]


@pytest.mark.parametrize("draw", draws(3))
@pytest.mark.parametrize(
    ("name", "layout"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_loss_and_gradients_do_not_depend_on_the_split(
    name: str,
    layout: str,
    draw: int,
    models: Made,
    references: Made,
    chats: Path,
    process_group: ProcessGroup,
    tmp_path: Path,
) -> None:
    cut = random_cut(name, layout, False, draw, ranks=(1,) if layout == "single" else (2, 3))
    flags = [*flags_for(models[name], chats, tmp_path / "run"), *cut.flags]
    process_group.train(flags + (["--enable_fsdp"] if layout == "fsdp" else []), cut.ranks)
    assert_agrees(tmp_path / "run", references[name, cut.global_batch], tolerance=1e-5)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_batches_without_any_image_train_beside_batches_with_some(
    layout: str, models: Made, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """One rank after the other has no image at all, and all of the vision encoder is sharded or reduced."""
    texts = write_conversations(tmp_path / "data", 8, with_images=False).read_text().splitlines()
    pictures = write_conversations(tmp_path / "data", 8, seed=1)
    shown = [line for line in pictures.read_text().splitlines() if '"images": []' not in line]
    pictures.write_text("".join(f"{line}\n" for line in [*texts, *shown[:2]]))
    flags = [*flags_for(models["qwen2_vl"], pictures, tmp_path / "run", 5), "--batch_size_training", "1"]
    process_group.train(flags + (["--enable_fsdp"] if layout == "fsdp" else []), 2)
    expected = chat_reference(models["qwen2_vl"], pictures, num_steps=5, global_batch=2)
    assert_agrees(tmp_path / "run", expected, tolerance=1e-5)
