"""Flags, output folders and layouts that cannot run are refused: exit status 2, one `error:` line, nothing written."""

from __future__ import annotations

import pytest

from tests.helpers.processes import read_metrics
from tests.helpers.refusals import DIFFERS_BY_RANK, Bench, error_lines


def test_the_flags_that_the_other_tests_spoil_do_run(bench: Bench) -> None:
    bench.group.train(bench.flags("--max_train_step", "1", "--save_model", "False"), world_size=1)
    assert read_metrics(bench.output)[-1]["status"] == "finished"


# Flags


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--frobnicate 1", ["--frobnicate", "unknown flag"]),
        ("--fsdp_config.frobnicate 1", ["--fsdp_config.frobnicate", "unknown flag"]),
        ("--nosuchthing", ["--nosuchthing", "unknown flag"]),
        ("--num_epoch 2", ["--num_epoch", "--num_epochs"]),
        ("--batch_size_trainin 2", ["--batch_size_trainin", "--batch_size_training"]),
        ("--enable_fdsp", ["--enable_fdsp", "--enable_fsdp"]),
        ("--micro_batch_size 4", ["--micro_batch_size", "--batch_size_training"]),
        ("--batch_size 4", ["--batch_size", "--batch_size_training"]),
        ("--precision bf16", ["--precision", "--pure_bf16"]),
        ("--bnb_4bit_use_double_quant True", ["--bnb_4bit_use_double_quant", "--use_double_quant"]),
        ("--learning_rate 1e-4", ["--learning_rate", "--lr"]),
        ("stray", ["stray"]),
        ("--lr 1e-4 --lr 2e-4", ["--lr", "twice"]),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_known_one(bench: Bench, given: str, named: list[str]) -> None:
    message = bench.refused(*given.split())
    for name in named:
        assert name in message


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--lr", "fast"),
        ("--lr", "nan"),
        ("--lr", "inf"),
        ("--num_epochs", "2.5"),
        ("--batch_size_training", "1e-1"),
        ("--enable_fsdp", "maybe"),
        ("--seed", "0x10"),
        ("--max_train_step", "1,000"),
        ("--global_batch_size", "many"),
        ("--batching_strategy", "stack"),
        ("--fsdp_config.sharding_strategy", "ZERO3"),
        ("--fsdp_config.optimizer", "adam_8bit"),
        ("--peft_method", "dora"),
        ("--fsdp_config.checkpoint_type", "PICKLE"),
        ("--scheduler", "triangle"),
        ("--quantization", "3bit"),
        ("--split_slice", "half"),
        ("--dataset", "wikipedia"),
    ],
)
def test_a_value_of_the_wrong_type_or_choice_is_refused_by_flag_and_value(bench: Bench, flag: str, value: str) -> None:
    message = bench.refused(flag, value)
    assert f"{flag}:" in message
    assert value in message


@pytest.mark.parametrize("flag", ["--lr", "--model_name", "--dataset", "--lora_config.r"])
def test_a_flag_without_its_value_is_refused(bench: Bench, flag: str) -> None:
    assert f"{flag}:" in bench.refused(flag)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--batch_size_training", "-1"),
        ("--batch_size_training", "0"),
        ("--val_batch_size", "0"),
        ("--gradient_accumulation_steps", "-4"),
        ("--global_batch_size", "-8"),
        ("--context_length", "-5"),
        ("--num_epochs", "0"),
        ("--max_train_step", "-3"),
        ("--max_eval_step", "-1"),
        ("--num_workers_dataloader", "-1"),
        ("--lr", "-0.5"),
        ("--lr", "0"),
        ("--weight_decay", "-0.1"),
        ("--warmup_steps", "-1"),
        ("--seed", "-1"),
        ("--split_slice", "-5"),
        ("--split_slice", "0%"),
        ("--lora_config.r", "0"),
        ("--lora_config.lora_dropout", "1.5"),
        ("--fsdp_config.sharding_group_size", "-2"),
    ],
)
def test_a_size_or_rate_out_of_range_is_refused(bench: Bench, flag: str, value: str) -> None:
    message = bench.refused(flag, value)
    assert f"{flag}:" in message
    assert value in message


def test_a_run_without_a_model_is_refused(bench: Bench) -> None:
    outcome = bench.group.run(["--output_dir", str(bench.output)], 1)[0]
    assert outcome.status == 2
    assert error_lines(outcome.stderr)[0].startswith("error: --model_name")
    assert not bench.output.exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "recipe.yaml"),
        ("lr: [1e-4", "recipe.yaml"),
        ("- lr\n", "recipe.yaml"),
        ("learning_rat: 1e-4\n", "learning_rat"),
        ("num_epochs: many\n", "many"),
    ],
)
def test_a_dataset_function_file_that_cannot_be_used_is_refused(bench: Bench, text: str | None, named: str) -> None:
    file = bench.folder / "recipe.yaml"
    if text is not None:
        file.write_text(text)
    message = bench.refused("--config", str(file))
    assert "recipe.yaml" in message
    assert named in message


# Output folders


def test_an_output_folder_below_a_file_is_refused(bench: Bench) -> None:
    (bench.folder / "file").write_text("kept")
    message = bench.refused("--output_dir", str(bench.folder / "file" / "run"))
    assert "--output_dir" in message
    assert str(bench.folder / "file") in message


def test_a_file_as_output_folder_is_refused(bench: Bench) -> None:
    (bench.folder / "file").write_text("kept")
    assert str(bench.folder / "file") in bench.refused("--output_dir", str(bench.folder / "file"), "--overwrite")


def test_an_output_folder_that_the_system_refuses_to_make_is_refused(bench: Bench) -> None:
    # /proc looks writable to root, and nothing can be made there.
    message = bench.refused("--output_dir", "/proc/finetuning/run")
    assert "--output_dir" in message
    assert "/proc" in message


def test_a_folder_for_the_sharded_copy_below_a_file_is_refused_before_training(bench: Bench) -> None:
    (bench.folder / "file").write_text("kept")
    message = bench.refused("--dist_checkpoint_root_folder", str(bench.folder / "file" / "copies"))
    assert "--dist_checkpoint_root_folder" in message
    assert str(bench.folder / "file") in message


def test_a_folder_that_holds_a_run_is_refused_until_overwrite_is_given(bench: Bench) -> None:
    one_step = ["--max_train_step", "1", "--lr", "3e-4"]
    bench.group.train(bench.flags(*one_step), world_size=1)
    (bench.output / "notes.txt").write_text("mine")
    message = bench.refused("--max_train_step", "2")
    assert "--output_dir" in message
    assert str(bench.output) in message
    assert "--overwrite" in message

    bench.group.train(bench.flags("--max_train_step", "2", "--overwrite", "--use_peft"), world_size=1)
    events = read_metrics(bench.output)
    assert [event["event"] for event in events].count("start") == 1
    assert [event["step"] for event in events if event["event"] == "train"] == [1, 2]
    assert (bench.output / "adapter").is_dir()
    assert not (bench.output / "model").exists(), "left over from the run that was replaced"
    assert (bench.output / "notes.txt").read_text() == "mine"


# Ranks and layouts


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--global_batch_size 6 --batch_size_training 4", ["--global_batch_size", "6", "4"]),
        ("--global_batch_size 2 --batch_size_training 4", ["--global_batch_size", "2", "4"]),
        ("--enable_fsdp --hsdp --fsdp_config.sharding_group_size 2", ["sharding_group_size"]),
        ("--enable_fsdp --hsdp --fsdp_config.replica_group_size 2", ["replica_group_size"]),
        ("--fsdp_config.sharding_strategy HYBRID_SHARD", ["--sharding_strategy", "--enable_fsdp"]),
        ("--freeze_layers --num_freeze_layers 3", ["--num_freeze_layers", "3 layers", "has 2", "at most 2"]),
        ("--use_peft --freeze_layers --num_freeze_layers 2", ["--num_freeze_layers", "nothing is trainable"]),
        ("--fsdp_cpu_offload", ["--fsdp_cpu_offload", "--enable_fsdp"]),
    ],
)
def test_a_layout_that_does_not_fit_one_rank_is_refused(bench: Bench, given: str, named: list[str]) -> None:
    message = bench.refused(*given.split())
    for name in named:
        assert name in message


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--one_gpu", ["--one_gpu", "2 processes"]),
        ("--global_batch_size 12 --batch_size_training 4", ["--global_batch_size", "12", "2 ranks"]),
        ("--enable_fsdp --hsdp --fsdp_config.sharding_group_size 3", ["sharding_group_size", "world size 2"]),
    ],
)
def test_a_layout_that_does_not_fit_two_ranks_is_refused_on_both(bench: Bench, given: str, named: list[str]) -> None:
    message = bench.refused(*given.split(), world_size=2)
    for name in named:
        assert name in message


def test_ranks_that_read_different_data_are_refused(bench: Bench) -> None:
    message = bench.refused(*bench.dataset_function(DIFFERS_BY_RANK), world_size=2)
    assert "--dataset" in message
    assert "same" in message
