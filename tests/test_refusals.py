"""What cannot run is refused: exit status 2, one `error:` line that names what to change, and nothing written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.families import save_family
from tests.processes import ROOT, ProcessGroup, command, read_metrics, run_command
from utils.order import epoch_order


def write_lines(file: Path, rows: Sequence[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def dialogues(count: int) -> list[dict]:
    return [{"dialogue": f"Ann: Is it {i}?\nBob: Yes, {i}.", "summary": f"Bob says {i}."} for i in range(count)]


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with size and time of change; Python's own bytecode caches left out."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def error_lines(stderr: str) -> list[str]:
    return [line for line in stderr.split("\n") if line.startswith("error: ")]


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dialogues")
    write_lines(folder / "train.jsonl", dialogues(12))
    write_lines(folder / "validation.jsonl", dialogues(3))
    return folder


@dataclass
class Bench:
    """A model, data and an empty folder: flags that would run, to be spoilt one at a time."""

    model: Path
    samples: Path
    folder: Path
    group: ProcessGroup

    @property
    def output(self) -> Path:
        return self.folder / "run"

    def flags(self, *given: str) -> list[str]:
        """Working flags, less those that `given` replaces."""
        working = {"--model_name": self.model, "--output_dir": self.output, "--num_workers_dataloader": 0}
        if "--dataset" not in given:
            working["--samsum_dataset.data_path"] = self.samples
        return [str(part) for item in working.items() if item[0] not in given for part in item] + list(given)

    def recipe(self, body: str, name: str = "recipe.py") -> list[str]:
        """Flags for a recipe of one function with this body."""
        file = self.folder / name
        file.write_text(
            "import os\n\ndef get_custom_dataset(dataset_config, tokenizer, split):\n" + textwrap.indent(body, "    ")
        )
        return ["--dataset", str(file)]

    def copy_of_model(self) -> Path:
        return shutil.copytree(self.model, self.folder / "model")

    def refused(self, *given: str, world_size: int = 1) -> str:
        """The one line with which every rank is refused, having written nothing."""
        before = contents(self.folder)
        outcomes = self.group.run(self.flags(*given), world_size)
        printed = "\n".join(outcome.stderr for outcome in outcomes)
        assert [outcome.status for outcome in outcomes] == [2] * world_size, printed
        lines = error_lines(outcomes[0].stderr)
        assert len(lines) == 1, printed
        # No launcher ends these processes, so in the end the other ranks repeat it; under torchrun they are silent.
        for rank, outcome in enumerate(outcomes[1:], 1):
            assert error_lines(outcome.stderr) in ([], [lines[0].replace("error: ", f"error: rank {rank}: ", 1)])
        assert "Traceback" not in printed
        assert contents(self.folder) == before
        return lines[0]


@pytest.fixture
def bench(tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup) -> Bench:
    return Bench(tiny_model, samples, tmp_path, process_group)


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
def test_a_recipe_file_that_cannot_be_used_is_refused(bench: Bench, text: str | None, named: str) -> None:
    file = bench.folder / "recipe.yaml"
    if text is not None:
        file.write_text(text)
    message = bench.refused("--config", str(file))
    assert "recipe.yaml" in message
    assert named in message


# Model folders


def test_a_missing_model_folder_is_refused_before_anything_is_written(bench: Bench) -> None:
    message = bench.refused("--model_name", str(bench.folder / "absent"))
    assert "--model_name" in message
    assert str(bench.folder / "absent") in message


def test_an_empty_model_folder_is_refused(bench: Bench) -> None:
    (bench.folder / "model").mkdir()
    message = bench.refused("--model_name", str(bench.folder / "model"))
    assert "--model_name" in message
    assert "config.json" in message


def test_a_model_folder_without_config_is_refused(bench: Bench) -> None:
    model = bench.copy_of_model()
    (model / "config.json").unlink()
    message = bench.refused("--model_name", str(model))
    assert str(model) in message
    assert "config.json" in message


@pytest.mark.parametrize("text", ["", "{", '{"hidden_size": 32}', '{"model_type": "no_such_architecture"}'])
def test_a_model_config_that_says_nothing_is_refused(bench: Bench, text: str) -> None:
    model = bench.copy_of_model()
    (model / "config.json").write_text(text)
    message = bench.refused("--model_name", str(model))
    assert "--model_name" in message
    assert str(model) in message


def test_code_that_came_with_a_model_is_refused_and_does_not_run(bench: Bench) -> None:
    model, marker = bench.copy_of_model(), bench.folder / "it_ran"
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "made_up",
        "auto_map": {"AutoConfig": "made_up.Config", "AutoModelForCausalLM": "made_up.M"},
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "made_up.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    message = bench.refused("--model_name", str(model))
    assert str(model) in message
    assert "trust_remote_code" in message
    assert not marker.exists()


def test_a_model_folder_without_tokenizer_is_refused(bench: Bench) -> None:
    model = bench.copy_of_model()
    for file in model.glob("tokenizer*"):
        file.unlink()
    message = bench.refused("--model_name", str(model))
    assert str(model) in message
    assert "tokenizer" in message


def test_a_missing_tokenizer_folder_is_refused(bench: Bench) -> None:
    message = bench.refused("--tokenizer_name", str(bench.folder / "absent"))
    assert "--tokenizer_name" in message
    assert str(bench.folder / "absent") in message


def test_a_tokenizer_without_end_token_is_refused(bench: Bench) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(bench.folder / "tokenizer")
    message = bench.refused("--tokenizer_name", str(bench.folder / "tokenizer"))
    assert "--tokenizer_name" in message
    assert "eos_token" in message


def test_an_adapter_cannot_hold_a_tokenizers_new_tokens(bench: Bench) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(bench.folder / "tokenizer")
    message = bench.refused("--use_peft", "--tokenizer_name", str(bench.folder / "tokenizer"))
    assert "--tokenizer_name" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_the_command_that_converts_them(bench: Bench, name: str) -> None:
    model = bench.copy_of_model()
    (model / "model.safetensors").unlink()
    torch.save({}, model / name)
    message = bench.refused("--model_name", str(model))
    assert str(model) in message
    assert "python -c" in message


def test_a_model_folder_without_weights_is_refused(bench: Bench) -> None:
    model = bench.copy_of_model()
    (model / "model.safetensors").unlink()
    message = bench.refused("--model_name", str(model))
    assert str(model) in message
    assert "safetensors" in message


def test_weights_cut_short_are_refused(bench: Bench) -> None:
    weights = bench.copy_of_model() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert str(weights.parent) in bench.refused("--model_name", str(weights.parent))


def test_a_shard_that_is_not_there_is_refused(bench: Bench) -> None:
    model = bench.folder / "model"
    AutoModelForCausalLM.from_pretrained(bench.model).save_pretrained(model, max_shard_size="40KB")
    AutoTokenizer.from_pretrained(bench.model).save_pretrained(model)
    shards = sorted(model.glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    assert str(model) in bench.refused("--model_name", str(model))


def test_weights_that_lack_a_tensor_are_refused_by_its_name(bench: Bench) -> None:
    weights = bench.copy_of_model() / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    message = bench.refused("--model_name", str(weights.parent))
    assert "model.layers.1.mlp.up_proj.weight" in message


def test_weights_of_other_shapes_are_refused(bench: Bench) -> None:
    model = bench.copy_of_model()
    config = json.loads((model / "config.json").read_text()) | {"intermediate_size": 96}
    (model / "config.json").write_text(json.dumps(config))
    assert str(model) in bench.refused("--model_name", str(model))


def test_a_context_beyond_the_models_positions_is_refused(bench: Bench) -> None:
    positions = AutoConfig.from_pretrained(bench.model).max_position_embeddings
    message = bench.refused("--context_length", str(positions + 1))
    assert "--context_length" in message
    assert str(positions) in message


# Adapters


def test_target_modules_that_match_nothing_are_refused_with_those_that_would(bench: Bench) -> None:
    message = bench.refused("--use_peft", "--lora_config.target_modules", "query,value")
    assert "--lora_config.target_modules" in message
    assert "query, value" in message
    assert "q_proj" in message


def test_a_target_module_that_matches_nothing_beside_one_that_does_is_refused(bench: Bench) -> None:
    message = bench.refused("--use_peft", "--lora_config.target_modules", "q_proj,v_prj")
    assert "--lora_config.target_modules" in message
    assert "v_prj" in message


@pytest.mark.parametrize("kind", ["missing", "empty", "pickled", "torn", "of another model"])
def test_a_checkpoint_without_a_usable_adapter_is_refused(bench: Bench, kind: str) -> None:
    adapter = bench.folder / "adapter"
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
    if kind != "missing":
        adapter.mkdir()
    if kind not in ("missing", "empty"):
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
    if kind == "pickled":
        torch.save({}, adapter / "adapter_model.bin")
    if kind == "torn":
        (adapter / "adapter_model.safetensors").write_bytes(b"\x00" * 20)
    if kind == "of another model":
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
        tensors = {f"{name}_A.weight": torch.zeros(4, 48), f"{name}_B.weight": torch.zeros(48, 4)}
        save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    message = bench.refused("--use_peft", "--from_peft_checkpoint", str(adapter))
    assert "--from_peft_checkpoint" in message
    assert str(adapter) in message


# Quantization


@pytest.mark.parametrize(
    "given",
    [
        "--quantization True --use_fp16 False",
        "--quantization True --use_fp16 True",
        "--quantization 8bit --enable_fsdp",
    ],
)
def test_training_all_of_a_quantized_model_is_refused_before_the_model_is_looked_for(bench: Bench, given: str) -> None:
    message = bench.refused("--split_slice", "1%", *given.split(), "--model_name", str(bench.folder / "absent"))
    assert message.startswith("error: --quantization: quantized weights cannot be trained")
    assert "add --use_peft" in message


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ("--use_peft --quant_type fp4", "--quant_type: nothing is quantized without --quantization"),
        ("--use_peft --quantization 8bit --use_double_quant", "--use_double_quant: 8bit has one kind only"),
        ("--use_peft --quantization 4bit --compute_dtype fp16", "--compute_dtype: gradients would vanish in fp16"),
        ("--use_peft --quantization 4bit --compute_dtype int8", "--compute_dtype: 'int8'"),
    ],
)
def test_settings_that_quantization_cannot_keep_are_refused(bench: Bench, given: str, start: str) -> None:
    assert bench.refused(*given.split()).startswith(f"error: {start}")


def test_a_model_without_linear_layers_cannot_be_quantized(bench: Bench) -> None:
    model = save_family("gpt2", bench.folder / "gpt2", bench.model)  # its layers are transformers' Conv1D
    given = ["--use_peft", "--lora_config.target_modules", "c_attn", "--quantization", "4bit", "--enable_fsdp"]
    message = bench.refused("--model_name", str(model), "--context_length", "96", *given, world_size=2)
    assert message.startswith("error: --quantization: GPT2LMHeadModel has no torch.nn.Linear layers to quantize")


@pytest.mark.parametrize("given", ["", "--use_peft --quantization 4bit"])
def test_a_model_that_is_stored_quantized_is_refused(bench: Bench, given: str) -> None:
    model = bench.copy_of_model()
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": settings}
    (model / "config.json").write_text(json.dumps(config))
    message = bench.refused("--model_name", str(model), *given.split())
    assert message.startswith(f"error: --model_name: the weights of {model} are stored quantized")
    assert "full-precision model" in message


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


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("absent", None, []),
        ("empty", "", []),
        ("blank", "\n\n", []),
        ("no rows", "[]", []),
        ("broken", '{"dialogue": "A: Hi", "summ', []),
        ("broken later", '{"dialogue": "A: Hi", "summary": "Hi."}\n{"dialogue": "A: Hi", "summ\n', []),
        ("no json", "dialogue,summary\nA: Hi,Hi.\n", []),
        ("one column missing", '{"dialogue": "A: Hi", "text": "Hi."}\n', ["summary", "text"]),
        ("columns missing", '{"id": "1", "conversation": "A: Hi"}\n', ["dialogue", "summary", "conversation"]),
        ("not text", '{"dialogue": "A: Hi", "summary": 7}\n', ["summary"]),
        ("null", '{"dialogue": "A: Hi", "summary": "Hi."}\n{"dialogue": null, "summary": "Hi."}\n', ["dialogue"]),
    ],
)
def test_a_split_that_cannot_be_read_is_refused_by_its_path(
    bench: Bench, split: str, kind: str, text: str | None, named: list[str]
) -> None:
    data = shutil.copytree(bench.samples, bench.folder / "data")
    file = data / f"{split}.jsonl"
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
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


# Recipes


def test_a_recipe_that_does_not_exist_is_refused(bench: Bench) -> None:
    message = bench.refused("--dataset", str(bench.folder / "absent.py"))
    assert "--dataset" in message
    assert str(bench.folder / "absent.py") in message


@pytest.mark.parametrize("spelling", ["short", "long"])
def test_a_recipe_without_the_function_is_refused(bench: Bench, spelling: str) -> None:
    file = f"{bench.recipe('return []')[1]}:get_data"
    short, long = ["--dataset", file], ["--dataset", "custom_dataset", "--custom_dataset.file", file]
    message = bench.refused(*(short if spelling == "short" else long))
    assert "get_data" in message
    assert "recipe.py" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def get_custom_dataset(:\n", "SyntaxError"),
        ("import no_such_package\n", "no_such_package"),
        ("1 / 0\n", "Zero"),
    ],
)
def test_a_recipe_that_cannot_be_imported_is_refused_with_the_reason(bench: Bench, text: str, named: str) -> None:
    (bench.folder / "recipe.py").write_text(text)
    message = bench.refused("--dataset", str(bench.folder / "recipe.py"))
    assert "recipe.py" in message
    assert named in message


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("raise KeyError('speaker')", ["KeyError", "speaker"]),
        ("raise SystemExit('no data')", ["no data"]),
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
def test_a_recipe_whose_rows_cannot_be_trained_on_is_refused(bench: Bench, body: str, named: list[str]) -> None:
    message = bench.refused(*bench.recipe(body))
    assert "dataset" in message
    for name in named:
        assert name in message


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


DIFFERS_BY_RANK = "return [{'input_ids': [5, 6, 7 + int(os.environ['RANK'])], 'labels': [5, 6, 7]}] * 4"


def test_ranks_that_read_different_data_are_refused(bench: Bench) -> None:
    message = bench.refused(*bench.recipe(DIFFERS_BY_RANK), world_size=2)
    assert "--dataset" in message
    assert "same" in message


# Failures after the start


def test_a_loss_that_is_not_finite_ends_the_run_and_names_step_and_rows(bench: Bench) -> None:
    given = ["--fsdp_config.optimizer", "SGD", "--lr", "1e18", "--batching_strategy", "padding"]
    given += ["--batch_size_training", "3", "--seed", "5", "--save_metrics"]
    (outcome,) = bench.group.run(bench.flags(*given), 1)
    assert outcome.status == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    (line,) = error_lines(outcome.stderr)
    assert "step 2" in line
    rows = epoch_order(12, seed=5, epoch=0, global_batch_size=3, lengths=np.ones(12))[3:6] + 1  # counted from 1
    assert f": {', '.join(map(str, sorted(rows)))}." in line
    events = read_metrics(bench.output)
    assert [event["step"] for event in events if event["event"] == "train"] == [1]
    assert events[-1]["event"] == "end"
    assert events[-1]["status"] == "failed"
    assert events[-1]["step"] == 1
    assert not (bench.output / "model").exists()


def model_with_a_poisoned_token(bench: Bench, token: int) -> Path:
    """A model that gives NaN for every text with this token, and for no other."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(bench.model)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    model.get_input_embeddings().weight.data[token] = float("nan")
    model.save_pretrained(bench.folder / "poisoned")
    AutoTokenizer.from_pretrained(bench.model).save_pretrained(bench.folder / "poisoned")
    return bench.folder / "poisoned"


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_the_row_at_fault_is_named(bench: Bench, world_size: int) -> None:
    rows = "[{'input_ids': [5, 599 if i == 7 else 6, 8], 'labels': [5, 6, 8]} for i in range(12)]"
    given = ["--model_name", str(model_with_a_poisoned_token(bench, 599)), *bench.recipe(f"return {rows}")]
    given += ["--batch_size_training", "1", "--gradient_accumulation_steps", str(4 // world_size)]
    given += ["--batching_strategy", "padding", "--run_validation", "False", "--seed", "1"]
    outcomes = bench.group.run(bench.flags(*given), world_size)
    assert [outcome.status for outcome in outcomes] == [1] * world_size, outcomes[0].stderr
    order = epoch_order(12, seed=1, epoch=0, global_batch_size=4, lengths=np.full(12, 3))
    step = order.tolist().index(7) // 4 + 1
    (line,) = error_lines(outcomes[0].stderr)
    assert f"step {step}:" in line
    assert ": 8." in line  # counted from 1
    events = read_metrics(bench.output)
    assert [event["step"] for event in events if event["event"] == "train"] == list(range(1, step))
    assert events[-1]["status"] == "failed"
    assert not (bench.output / "model").exists()


# The command line itself


def run_refused(bench: Bench, *given: str, nproc: int | None = None, within: Sequence[str] = ()) -> str:
    """As Bench.refused, of the whole command with its launcher: it ends, and leaves no process behind.

    Args:
        within: a command that runs the one given after it.
    """
    before = contents(bench.folder)
    flags = bench.flags(*given)
    if within:
        argv = [*within, *command(*flags, nproc=nproc)]
        done = subprocess.run(argv, cwd=bench.folder, capture_output=True, text=True, timeout=300, check=False)
    else:
        done = run_command(*flags, nproc=nproc, cwd=bench.folder, HF_HUB_OFFLINE="1")
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in commands if any(str(bench.folder) in word for word in words)], "left behind"
    lines = error_lines(done.stderr)
    assert len(lines) == 1, done.stderr
    assert "Failed to load" not in done.stderr, "a library's own words beside ours"
    assert 'finetuning.py", line' not in done.stderr, "a traceback of this project"
    if nproc is None:
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
    else:  # torchrun's own report follows; a rank that had not come so far yet was ended by it (-15)
        assert done.returncode != 0
        assert set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr)) - {"-15"} == {"2"}, done.stderr
    assert contents(bench.folder) == before
    return lines[0]


def unwritable(folder: Path) -> tuple[list[str], Path]:
    """A command, and a place that the commands it runs cannot write, not even as root where mounts can be made."""
    folder.mkdir()
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 1; shift; exec "$@"'
    for namespace in ("-m", "-rm"):  # root's own, or an unprivileged user's
        within = ["unshare", namespace, "sh", "-c", script, "sh", str(folder)]
        if subprocess.run([*within, "true"], capture_output=True, check=False).returncode == 0:
            return within, folder
    folder.chmod(0o555)
    return [], folder if os.getuid() else Path("/proc")


def test_python_refuses_a_misspelt_flag(bench: Bench) -> None:
    message = run_refused(bench, "--num_epoch", "3")
    assert "--num_epochs" in message


def test_flags_are_refused_before_torch_is_imported(bench: Bench) -> None:
    """Importing torch and transformers takes seconds, on a busy machine a minute; a misspelt flag takes neither."""
    script = bench.folder / "refuse.py"
    script.write_text(
        "import runpy, sys\n"
        "sys.argv = ['finetuning.py', '--num_epoch', '3']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'finetuning.py')!r}, run_name='__main__')\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == "False\n"
    assert "--num_epochs" in done.stderr


def test_python_refuses_enable_fsdp_and_names_torchrun(bench: Bench) -> None:
    message = run_refused(bench, "--enable_fsdp")
    assert "--enable_fsdp" in message
    assert "torchrun" in message


def test_python_refuses_a_model_name_that_is_neither_here_nor_to_be_reached(bench: Bench) -> None:
    message = run_refused(bench, "--model_name", "no-such-model")
    assert "--model_name" in message
    assert "no-such-model" in message


def test_python_refuses_a_dataset_that_is_neither_here_nor_to_be_reached(bench: Bench) -> None:
    message = run_refused(bench, "--dataset", "alpaca_dataset", "--alpaca_dataset.data_path", "nobody/nothing")
    assert "--alpaca_dataset.data_path" in message
    assert "nobody/nothing" in message


def test_python_refuses_an_output_folder_on_a_read_only_file_system(bench: Bench) -> None:
    within, place = unwritable(bench.folder / "mounted")
    message = run_refused(bench, "--output_dir", str(place / "below" / "run"), within=within)
    assert "--output_dir" in message
    assert str(place) in message


def test_an_existing_output_folder_on_a_read_only_file_system_is_refused_too(bench: Bench) -> None:
    within, place = unwritable(bench.folder / "mounted")
    message = run_refused(bench, "--output_dir", str(place), "--overwrite", within=within)
    assert str(place) in message


def test_python_refuses_a_data_file_that_is_broken(bench: Bench) -> None:
    (bench.folder / "train.jsonl").write_text('{"dialogue": "A: Hi", "summ')
    message = run_refused(bench, "--samsum_dataset.data_path", str(bench.folder / "train.jsonl"))
    assert str(bench.folder / "train.jsonl") in message


@pytest.mark.slow
def test_torchrun_shows_a_misspelt_flag_once(bench: Bench) -> None:
    message = run_refused(bench, "--enable_fsdp", "--batch_size_trainin", "2", nproc=2)
    assert "--batch_size_training" in message


@pytest.mark.slow
def test_torchrun_shows_a_missing_model_once(bench: Bench) -> None:
    message = run_refused(bench, "--enable_fsdp", "--model_name", str(bench.folder / "absent"), nproc=2)
    assert str(bench.folder / "absent") in message


@pytest.mark.slow
def test_torchrun_shows_an_output_folder_that_is_refused_once(bench: Bench) -> None:
    bench.output.mkdir()
    (bench.output / "metrics.jsonl").write_text("{}\n")
    message = run_refused(bench, "--enable_fsdp", nproc=2)
    assert str(bench.output) in message


@pytest.mark.slow
def test_torchrun_shows_target_modules_that_match_nothing_once(bench: Bench) -> None:
    message = run_refused(bench, "--use_peft", "--lora_config.target_modules", "query", nproc=2)
    assert "query" in message


@pytest.mark.slow
def test_torchrun_shows_ranks_that_read_different_data_once(bench: Bench) -> None:
    message = run_refused(bench, "--enable_fsdp", *bench.recipe(DIFFERS_BY_RANK), nproc=2)
    assert "same" in message


@pytest.mark.slow
def test_torchrun_shows_the_refusal_of_one_rank_alone(bench: Bench) -> None:
    # Rank 0 waits for it in its first collective, cannot speak for it, and is ended by torchrun.
    body = "if os.environ['RANK'] == '1':\n    raise OSError('disk is gone')\n"
    given = bench.recipe(body + "return [{'input_ids': [5, 6], 'labels': [5, 6]}] * 4")
    message = run_refused(bench, *given, nproc=2)
    assert "rank 1" in message
    assert "disk is gone" in message


@pytest.mark.slow
def test_torchrun_shows_a_loss_that_is_not_finite_once(bench: Bench) -> None:
    given = ["--enable_fsdp", "--fsdp_config.optimizer", "SGD", "--lr", "1e18", "--batching_strategy", "padding"]
    done = run_command(*bench.flags(*given, "--batch_size_training", "1"), nproc=2, cwd=bench.folder)
    assert done.returncode != 0
    (line,) = error_lines(done.stderr)
    assert "step 2" in line
    assert 'finetuning.py", line' not in done.stderr, "a traceback of this project"
    assert set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr)) == {"1"}, done.stderr
    events = read_metrics(bench.output)
    assert events[-1]["event"] == "end"
    assert events[-1]["status"] == "failed"
    assert not (bench.output / "model").exists()
