"""What an encoder-decoder does not take, and what only it takes, is refused in one line before weights are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, MBartConfig

from configs.flags import parse_flags
from resolving.resolved import with_default_targets
from tasks.finding import find_task, settings_of_task
from tasks.image_text import ImageText
from tests.helpers.refusals import Bench
from tests.helpers.seq2seq_models import make_config, save_seq2seq
from utils.errors import ConfigError


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seq2seq("bart", tmp_path_factory.mktemp("models") / "bart")


@pytest.mark.parametrize(
    ("family", "flags", "parts"),
    [
        ("bart", "--context_length 64", ["--context_length", "give --max_source_length and --max_target_length"]),
        ("bart", "--batching_strategy packing", ["--batching_strategy", "padding, or leave it out"]),
        ("bart", "--truncation split", ["--truncation", "right, left, drop or error"]),
        ("t5", "--dataset alpaca_dataset --mask_prompt False", ["mask_prompt", "leave it out"]),
        ("t5", "--use_peft --add_special_tokens <a>", ["--add_special_tokens", "without --use_peft"]),
        (
            "llama",
            "--max_source_length 64",
            ["--task causal_lm", "give --context_length instead"],
        ),
        ("llama", "--source_prefix summarize:", ["--source_prefix", "leave it out"]),
    ],
)
def test_settings_of_another_task_are_refused(family: str, flags: str, parts: list[str]) -> None:
    model_config = AutoConfig.for_model("llama") if family == "llama" else make_config(family)
    with pytest.raises(ConfigError) as error:
        settings_of_task(parse_flags(["--model_name", "M", *flags.split()]), find_task(model_config), model_config)
    assert all(part in str(error.value) for part in parts), error.value


def test_the_text_model_of_mistral_small_4_is_one_of_text() -> None:
    """transformers lists it among models of image and text alone."""
    config = AutoConfig.for_model("mistral4")
    task = find_task(config)
    assert task.NAME == "causal_lm"
    assert task.AUTO_MODEL._model_mapping[type(config)].__name__ == "Mistral4ForCausalLM"
    with pytest.raises(ConfigError, match="no AutoModelForImageTextToText of mistral4 models; give --task causal_lm"):
        find_task(config, "image_text")
    assert find_task(AutoConfig.for_model("fuyu")).NAME == "image_text"


def test_phi_4_multimodal_is_a_model_of_text() -> None:
    """transformers has no model of images and text of it."""
    config = AutoConfig.for_model("phi4_multimodal")
    assert find_task(config).NAME == "causal_lm"
    reason = "no AutoModelForImageTextToText of phi4_multimodal models; give --task causal_lm"
    with pytest.raises(ConfigError, match=reason):
        find_task(config, "image_text")


@pytest.mark.skipif(not hasattr(transformers, "DeepseekOcr2Config"), reason="this transformers does not have it")
def test_deepseek_ocr_2_is_refused() -> None:
    """Its encoder is called a second time if an image of the batch is large: sharded ranks would wait for each other,
    and images of both sizes do not stack."""
    text = {"num_hidden_layers": 1, "mlp_layer_types": ["dense"], "hidden_size": 16, "num_attention_heads": 2}
    config = AutoConfig.for_model("deepseek_ocr2", text_config=text)
    with torch.device("meta"):
        model = ImageText.AUTO_MODEL.from_config(config)
    with pytest.raises(ConfigError, match=r"sees the tiles of large images in a call of its own \(pixel_values_local"):
        ImageText().check_model(model, "deepseek-ai/DeepSeek-OCR-2")


def test_the_task_is_found_from_the_config_and_may_be_asked_for() -> None:
    """transformers' mapping of causal models names BART, too."""
    bart, llama = make_config("bart"), AutoConfig.for_model("llama")
    assert find_task(bart).NAME == find_task(make_config("mt5")).NAME == "seq2seq_lm"
    assert find_task(llama).NAME == find_task(llama, "causal_lm").NAME == "causal_lm"
    assert find_task(bart, "causal_lm").NAME == "causal_lm"
    with pytest.raises(
        ConfigError, match=r"--task: transformers has no AutoModelForSeq2SeqLM of llama models; give --task c"
    ):
        find_task(llama, "seq2seq_lm")
    with pytest.raises(ConfigError, match=r"--loss_type: pairs .* no AutoModelForCausalLM of qwen2_vl models; give an"):
        find_task(AutoConfig.for_model("qwen2_vl"), "preference")


def test_defaults_follow_the_task_and_the_family() -> None:
    config = parse_flags(["--model_name", "M", "--use_peft"])
    adapted = settings_of_task(config, find_task(make_config("t5")), make_config("t5"))
    assert adapted.train_config.batching_strategy == "padding"
    assert with_default_targets(adapted, make_config("t5")).lora_config.target_modules == ("q", "v")
    assert with_default_targets(adapted, make_config("bart")).lora_config == config.lora_config
    given = replace(adapted, given=adapted.given | {"lora_config.target_modules"})
    assert with_default_targets(given, make_config("t5")) is given


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--max_source_length 513", ["--max_source_length: 513 is more than the 512 positions"]),
        ("--dataset chat_dataset", ["--dataset: a chat template writes prompt and answer as one text"]),
        ("--use_peft --peft_method prefix --batching_strategy padding", ["--peft_method", "bart"]),
        ("--use_peft --peft_method llama_adapter", ["--peft_method", "bart"]),
    ],
)
def test_a_run_of_bart_refuses(flags: str, parts: list[str], bart: Path, bench: Bench) -> None:
    line = flags.split()
    if "chat_dataset" in flags:
        line += ["--chat_dataset.data_path", str(bench.samples)]
    message = bench.refused("--model_name", str(bart), *line)
    assert all(part in message for part in parts), message


def test_a_family_that_was_not_tried_is_refused(bench: Bench) -> None:
    folder = bench.copy_of_model()
    MBartConfig().save_pretrained(folder)
    message = bench.refused("--model_name", str(folder), "--random_weights")
    assert "is a mbart model" in message
    assert "bart, mt5, pegasus, t5" in message
