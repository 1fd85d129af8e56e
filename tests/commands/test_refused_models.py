"""Models, adapters and quantizations that cannot run are refused: one line that names what to change."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPConfig,
    FuyuConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Mamba2Config,
    ViTConfig,
)

from tests.helpers.families import LLAMA_LIKE, save_family
from tests.helpers.refusals import POINTER, Bench

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


def test_a_model_that_is_no_language_model_is_refused(bench: Bench) -> None:
    model = bench.copy_of_model()
    for config in (ViTConfig(), CLIPConfig()):
        config.save_pretrained(model)
        message = bench.refused("--model_name", str(model), "--random_weights")
        assert message.startswith(f"error: --model_name: {model} is a {config.model_type} model, and transformers ")
        assert message.endswith("give a language model")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("attention_dropout", 2, "the probability of dropping must be at least 0 and less than 1"),
        ("attention_dropout", -0.1, "the probability of dropping must be at least 0 and less than 1"),
        ("attention_dropout", float("nan"), "the probability of dropping must be at least 0 and less than 1"),
        ("attention_dropout", 1, "the probability of dropping must be at least 0 and less than 1"),
        ("attention_dropout", None, "a probability is a number"),
        ("rms_norm_eps", 1e300, "it must be at least 0 and less than 1"),
        ("dtype", False, "it must name the dtype of weights, such as bfloat16"),
        ("dtype", "int64", "it must name the dtype of weights, such as bfloat16"),
        ("num_hidden_layers", 0, "it must be a whole number from 1 to 10,000"),
        ("num_hidden_layers", -1, "it must be a whole number from 1 to 10,000"),
        ("num_hidden_layers", 10**6, "it must be a whole number from 1 to 10,000"),
        ("num_hidden_layers", 1, "this model has no place for 9 tensors in the files"),
    ],
)
def test_numbers_of_config_json_that_mean_nothing_are_refused(
    bench: Bench, name: str, value: float | str | None, wanted: str
) -> None:
    """torch would notice in the first forward pass, or compute nonsense."""
    model = bench.copy_of_model()
    config = json.loads((model / "config.json").read_text()) | {name: value}
    (model / "config.json").write_text(json.dumps(config))
    message = bench.refused("--model_name", str(model))
    assert "--model_name: " in message
    assert wanted in message
    assert "correct" in message


def test_outputs_are_asked_for_by_name_whatever_config_json_says(bench: Bench) -> None:
    model = bench.copy_of_model()
    config = json.loads((model / "config.json").read_text()) | {"return_dict": False}
    (model / "config.json").write_text(json.dumps(config))
    bench.group.train(bench.flags("--model_name", str(model), "--max_train_step", "1"), 1)


def test_weights_that_are_a_quantized_models_are_refused_before_any_is_read(bench: Bench) -> None:
    model = bench.copy_of_model()
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, model / "model.safetensors", metadata={"format": "pt"})
    message = bench.refused("--model_name", str(model), "--enable_fsdp", world_size=2)
    assert f"--model_name: {model}: {name} is stored as int8" in message


def test_a_language_model_inside_a_larger_one_is_refused(bench: Bench) -> None:
    """Gemma 3 of 4B and more is a model of images and text, and samples of text alone are none for it."""
    model = bench.copy_of_model()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = Gemma3TextConfig(**LLAMA_LIKE, head_dim=8).to_dict()
    vision |= {"image_size": 28, "patch_size": 14}
    Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4).save_pretrained(model)
    message = bench.refused("--model_name", str(model), "--random_weights")
    assert "--dataset: a model of image and text is trained on captions or conversations" in message
    message = bench.refused("--model_name", str(model), "--random_weights", "--task", "causal_lm")
    assert "--model_name" in message
    assert "Gemma3ForConditionalGeneration" in message


def test_a_model_of_images_without_a_vision_encoder_is_refused(bench: Bench) -> None:
    model = bench.copy_of_model()
    FuyuConfig().save_pretrained(model)
    for task in ([], ["--task", "image_text"]):
        message = bench.refused("--model_name", str(model), "--random_weights", *task)
        assert f"--model_name: {model} is a fuyu model, whose config.json has no vision_config" in message


def test_layers_that_peft_does_not_adapt_in_this_family_are_refused(bench: Bench) -> None:
    model = bench.copy_of_model()
    sizes = {"vocab_size": 600, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
    Mamba2Config(**sizes, state_size=8, n_groups=2).save_pretrained(model)
    flags = ["--use_peft", "--lora_config.target_modules", "out_proj", "--batching_strategy", "padding"]
    message = bench.refused("--model_name", str(model), "--random_weights", *flags)
    assert "--use_peft" in message
    assert "out_proj" in message


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
    assert "it has no tokenizer.json" in message


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


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_in_place_of_a_file_is_told_to_be_fetched(bench: Bench, name: str) -> None:
    (bench.copy_of_model() / name).write_text(POINTER)
    message = bench.refused("--model_name", str(bench.folder / "model"))
    assert f"{name} cannot be read" in message
    assert "git lfs pull" in message


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


def test_sdpa_for_attention_that_it_cannot_compute_is_refused(bench: Bench) -> None:
    model = save_family("gemma2", bench.folder / "gemma2", bench.model)
    message = bench.refused("--model_name", str(model), "--use_fast_kernels")
    assert message.startswith("error: --use_fast_kernels: SDPA cannot soft-cap attention scores")
    assert "leave the flag out" in message


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


@pytest.mark.parametrize("kind", ["missing", "empty", "pickled", "torn", "of another model", "of integers"])
def test_a_checkpoint_without_a_usable_adapter_is_refused(bench: Bench, kind: str) -> None:
    adapter = bench.folder / "adapter"
    settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
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
    if kind == "of integers":
        model = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(bench.model),
            peft.LoraConfig(**settings),  # type: ignore[arg-type]
        )
        tensors = {name: tensor.to(torch.int8) for name, tensor in peft.get_peft_model_state_dict(model).items()}
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
        ("--use_peft --quantization 8bit --use_double_quant", "--use_double_quant: 8bit has no such choice"),
        ("--use_peft --quantization mxfp4 --quant_type nf4", "--quant_type: mxfp4 has no such choice"),
        ("--use_peft --quantization mxfp4", "--quantization: LlamaForCausalLM has no experts to store in MXFP4"),
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
