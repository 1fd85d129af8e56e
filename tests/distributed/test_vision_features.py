"""--cache_vision_features: runs are those that compute the vision encoder in each step.

Up to a rounding: products over the images of a batch may be summed in another order than over one image.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.helpers.image_chat_reference import write_conversations
from tests.helpers.image_chats import save_chat_model
from tests.helpers.own_cache import with_cache
from tests.helpers.processes import ProcessGroup, log_lines, train_events
from tests.helpers.refusals import Bench


def flags_for(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    flags = ["--model_name", str(model), "--output_dir", str(output), "--lr", "0.01", "--context_length", "256"]
    flags += ["--dataset", "chat_dataset", "--chat_dataset.data_path", str(data), "--run_validation", "False"]
    flags += ["--num_workers_dataloader", "0", "--mixed_precision", "False"]
    return [*flags, "--num_epochs", "3", "--batch_size_training", "1", *more]


def numbers(run: Path) -> list[float]:
    """The loss, gradient norm and tokens of each step."""
    names = ("loss", "grad_norm", "num_tokens")
    return [event[name] for event in train_events(run) for name in names]


def computed(outcome: Any) -> int:
    (line,) = [line for line in log_lines(outcome.stdout) if line.startswith("vision features of")]
    found = re.search(r"a blank one: (\d+) computed in", line)
    assert found
    return int(found[1])


def test_packed_rows_of_sharded_ranks_are_those_of_the_encoder(tmp_path: Path, process_group: ProcessGroup) -> None:
    """One rank has no row in the last step of an epoch."""
    model, data = save_chat_model("qwen2_vl", tmp_path / "model"), write_conversations(tmp_path / "data", 9)
    more = ["--freeze_vision", "--enable_fsdp", "--batching_strategy", "packing"]
    process_group.train(flags_for(model, data, tmp_path / "plain", *more), 2)
    more.append("--cache_vision_features")
    first, _ = process_group.train(with_cache(flags_for(model, data, tmp_path / "first", *more), tmp_path / "cache"), 2)
    again, _ = process_group.train(with_cache(flags_for(model, data, tmp_path / "again", *more), tmp_path / "cache"), 2)
    assert computed(first) == len(list((tmp_path / "data").glob("*.png"))) + 1  # and a blank one
    assert computed(again) == 0
    assert numbers(tmp_path / "first") == numbers(tmp_path / "again")
    assert numbers(tmp_path / "first") == pytest.approx(numbers(tmp_path / "plain"), rel=1e-6)


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_padded_rows_are_those_of_the_encoder_and_what_follows_it_is_trained(
    name: str, tmp_path: Path, process_group: ProcessGroup
) -> None:
    model, data = save_chat_model(name, tmp_path / "model"), write_conversations(tmp_path / "data", 4)
    more = ["--freeze_vision", "--batching_strategy", "padding", "--max_train_step", "6"]
    process_group.train(flags_for(model, data, tmp_path / "plain", *more), 1)
    outcome, *_ = process_group.train(
        with_cache(flags_for(model, data, tmp_path / "kept", *more, "--cache_vision_features"), tmp_path / "cache"), 1
    )
    assert computed(outcome) > 1
    assert numbers(tmp_path / "kept") == pytest.approx(numbers(tmp_path / "plain"), rel=1e-6)


@pytest.mark.slow
def test_changed_pictures_and_settings_are_computed_anew_and_a_resumed_run_goes_on(
    tmp_path: Path, process_group: ProcessGroup
) -> None:
    model, data = save_chat_model("qwen2_vl", tmp_path / "model"), write_conversations(tmp_path / "data", 4)
    more = ["--freeze_vision", "--cache_vision_features"]
    whole, *_ = process_group.train(
        with_cache(flags_for(model, data, tmp_path / "whole", *more, "--max_train_step", "4"), tmp_path / "cache"), 1
    )
    halves = flags_for(model, data, tmp_path / "halves", *more, "--save_every_steps", "2")
    process_group.train(with_cache([*halves, "--max_train_step", "2"], tmp_path / "cache"), 1)
    outcome, *_ = process_group.train(
        with_cache([*halves, "--max_train_step", "4", "--resume", "auto"], tmp_path / "cache"), 1
    )
    assert computed(outcome) == 0
    assert numbers(tmp_path / "halves") == numbers(tmp_path / "whole")
    file = sorted((tmp_path / "data").glob("*.png"))[0]
    Image.open(file).transpose(Image.Transpose.FLIP_TOP_BOTTOM).rotate(7).save(file)
    outcome, *_ = process_group.train(
        with_cache(flags_for(model, data, tmp_path / "turned", *more, "--max_train_step", "1"), tmp_path / "cache"), 1
    )
    assert computed(outcome) == 1
    smaller = flags_for(model, data, tmp_path / "smaller", *more, "--max_train_step", "1", "--max_pixels", "784")
    outcome, *_ = process_group.train(with_cache(smaller, tmp_path / "cache"), 1)
    assert computed(outcome) == computed(whole)


@pytest.mark.slow
def test_features_of_a_frozen_adapter_are_not_those_of_its_base(tmp_path: Path, process_group: ProcessGroup) -> None:
    """The adapter of an earlier run is in the encoder, too, and is not trained on there."""
    model, data = save_chat_model("qwen2_vl", tmp_path / "model"), write_conversations(tmp_path / "data", 4)
    adapted = ["--use_peft", "--max_train_step", "2", "--lora_config.lora_dropout", "0"]
    earlier = [*adapted, "--lora_config.target_modules", "qkv,q_proj"]
    process_group.train(flags_for(model, data, tmp_path / "earlier", *earlier), 1)
    base = flags_for(model, data, tmp_path / "base", *adapted, "--freeze_vision", "--cache_vision_features")
    process_group.train(with_cache(base, tmp_path / "cache"), 1)
    more = ["--use_peft", "--max_train_step", "2", "--freeze_vision"]
    more += ["--from_peft_checkpoint", str(tmp_path / "earlier" / "adapter")]
    process_group.train(flags_for(model, data, tmp_path / "plain", *more), 1)
    kept = flags_for(model, data, tmp_path / "kept", *more, "--cache_vision_features")
    process_group.train(with_cache(kept, tmp_path / "cache"), 1)
    assert numbers(tmp_path / "kept") == pytest.approx(numbers(tmp_path / "plain"), rel=1e-6)
    assert numbers(tmp_path / "kept") != pytest.approx(numbers(tmp_path / "base"), rel=1e-6)


def test_a_folder_that_takes_no_features_is_named_before_more_are_computed(
    tmp_path: Path, process_group: ProcessGroup
) -> None:
    model, data = save_chat_model("qwen2_vl", tmp_path / "model"), write_conversations(tmp_path / "data", 4)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "finetuning-vision-features").touch()
    flags = flags_for(model, data, tmp_path / "run", "--freeze_vision", "--cache_vision_features")
    outcomes = process_group.run(with_cache(flags, tmp_path / "cache"), 2)
    assert [outcome.status for outcome in outcomes] == [2, 2]
    printed = "".join(outcome.stderr for outcome in outcomes)
    assert "error: vision features cannot be kept in" in printed
    assert "HF_DATASETS_CACHE" in printed


@pytest.mark.parametrize(
    ("name", "flags", "reason"),
    [
        ("qwen2_vl", "", "the vision encoder is trained, so its features change; give --freeze_vision"),
        ("qwen2_vl", "--use_peft --lora_config.target_modules qkv", "or an adapter in it, is trained"),
        ("qwen2_vl", "--freeze_vision --chat_dataset.streaming --max_train_step 2", "leave --streaming out"),
        ("idefics3", "--freeze_vision", "another pixel_values of images that are in one sample than of each alone"),
    ],
)
def test_features_that_would_change_are_refused(
    name: str, flags: str, reason: str, tmp_path: Path, process_group: ProcessGroup
) -> None:
    model, data = save_chat_model(name, tmp_path / "model"), write_conversations(tmp_path / "data", 4)
    bench = Bench(model, data, tmp_path / "own", process_group)
    bench.folder.mkdir()
    more = ["--dataset", "chat_dataset", "--chat_dataset.data_path", str(data), "--cache_vision_features"]
    refused = bench.refused(*more, *flags.split())
    assert "--cache_vision_features: " in refused
    assert reason in refused
