"""LLaMA-Factory's configs, with the entries of dataset_info.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.translated import refusal_of, translate_text

INFO: dict[str, dict[str, Any]] = {
    "identity": {"file_name": "identity.json"},
    "alpaca_demo": {"file_name": "alpaca_demo.json"},
    "chats": {
        "file_name": "chats.json",
        "formatting": "sharegpt",
        "columns": {"messages": "turns"},
        "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "asker", "assistant_tag": "gpt"},
    },
    "texts": {"hf_hub_url": "owner/texts", "subset": "en", "columns": {"prompt": "body"}},
    "pairs": {"file_name": "pairs.json", "ranking": True},
    "pictures": {
        "file_name": "pictures.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "pictured_alpaca": {"file_name": "pictured.json", "columns": {"prompt": "instruction", "images": "shown"}},
    "clips": {"file_name": "clips.json", "formatting": "sharegpt", "columns": {"videos": "videos"}},
}

LORA = """
model_name_or_path: owner/model
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
dataset: identity,alpaca_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/out
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
per_device_eval_batch_size: 2
eval_strategy: steps
eval_steps: 500
"""


@pytest.fixture(autouse=True)
def dataset_info(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    for entry in INFO.values():
        if "file_name" in entry:
            (tmp_path / "data" / str(entry["file_name"])).write_text("[]")


def test_lora_on_two_files_of_alpaca_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, printed, _ = translate_text(LORA, tmp_path, capsys)
    train, lora = config.train_config, config.lora_config
    assert (train.batch_size_training, train.gradient_accumulation_steps, train.num_epochs) == (1, 8, 3)
    assert (train.lr, train.scheduler, train.warmup_ratio, train.mixed_precision) == (1e-4, "cosine", 0.1, True)
    assert (train.context_length, train.split_slice, train.batching_strategy) == (2048, "1000", "padding")
    assert (train.eval_every_steps, train.val_batch_size, train.save_every_steps) == (500, 2, 500)
    assert (train.overwrite, train.trust_remote_code, train.num_workers_dataloader) == (True, True, 4)
    assert train.step_timeout_seconds == 3600  # the most that is allowed
    assert train.activation_checkpointing == "full"  # LLaMA-Factory's own, as twice the rank is
    assert (train.use_peft, lora.r, lora.lora_alpha, lora.lora_dropout) == (True, 16, 32, 0.0)
    assert lora.target_modules == ("all-linear",)
    assert config.value("instruction_dataset.as_chat") is True
    places = config.value("instruction_dataset.data_path").split(",")
    assert [Path(place).name for place in places] == ["identity.json", "alpaca_demo.json"]
    assert all(Path(place).exists() for place in places)
    assert config.value("instruction_dataset.validation_fraction") == 0.1
    assert "note: ddp_timeout: a step may take 3600 seconds at most" in printed
    assert "no counterpart: template: the tokenizer's own template is used" in printed
    assert "needless here: preprocessing_num_workers: one rank of each machine tokenizes" in printed


def test_all_weights_on_chats_under_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LORA.replace(
        "finetuning_type: lora", "finetuning_type: full\ndeepspeed: examples/deepspeed/ds_z3_config.json"
    )
    text = text.replace("identity,alpaca_demo", "chats").replace(
        "lora_rank: 16\nlora_target: all\n", "mask_history: true\n"
    )
    config = translate_text(text, tmp_path, capsys).config
    assert (config.train_config.use_peft, config.train_config.enable_fsdp) == (False, True)
    assert (config.train_config.mixed_precision, config.fsdp_config.pure_bf16) == (True, False)  # fp32 master weights
    assert config.value("chat_dataset.messages_column") == "turns"
    assert config.value("chat_dataset.roles") == ("asker=user",)
    assert config.value("chat_dataset.learn") == "last"


@pytest.mark.parametrize(("name", "column"), [("pictures", "images"), ("pictured_alpaca", "shown")])
def test_conversations_with_images(name: str, column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LORA.replace("identity,alpaca_demo", name)
    text += "image_max_pixels: 262144\nimage_min_pixels: 1024\nfreeze_vision_tower: true\nmedia_dir: pictures\n"
    config = translate_text(text, tmp_path, capsys).config
    train = config.train_config
    assert (train.dataset, train.max_pixels, train.min_pixels) == ("chat_dataset", 262144, 1024)
    assert train.freeze_vision is True
    assert config.value("chat_dataset.image_column") == column
    assert config.value("chat_dataset.image_folder") == "pictures"


def test_pretraining_reads_text_and_packs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        LORA.replace("stage: sft", "stage: pt").replace("identity,alpaca_demo", "texts").replace("template: q", "x: q")
    )
    config = translate_text(text + "quantization_bit: 8\n", tmp_path, capsys).config
    assert (config.train_config.dataset, config.train_config.batching_strategy) == ("text_dataset", "packing")
    assert (config.value("text_dataset.data_path"), config.value("text_dataset.hub_config")) == ("owner/texts", "en")
    assert config.value("text_dataset.text_column") == "body"
    assert config.quantization_config.quantization == "8bit"


@pytest.mark.parametrize(
    ("before", "after", "refusal"),
    [
        (
            "stage: sft",
            "stage: kto",
            "line 4: stage: kto learns from rewards or labelled answers; there is no such training",
        ),
        ("stage: sft", "stage: rm", "line 4: stage: rm trains a reward model: give --task reward_model and --dataset"),
        ("alpaca_demo", "other", "line 9: dataset: other is not in "),
        ("identity,alpaca_demo", "pairs", "line 9: dataset: pairs holds pairs of answers, which stage: dpo learns"),
        (
            "identity,alpaca_demo",
            "clips",
            "line 9: dataset: clips has videos; --dataset chat_dataset trains",
        ),
        ("type: lora", "type: freeze", "line 6: finetuning_type: freeze trains the last layers alone"),
    ],
)
def test_what_no_run_here_can_be_is_refused_with_its_line(
    before: str, after: str, refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal_of(LORA.replace(before, after), tmp_path, capsys).startswith(refusal)


def test_weights_in_bf16_go_before_products_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LORA.replace("type: lora", "type: full").replace("lora_rank: 16\nlora_target: all\n", "")
    config = translate_text(f"{text}pure_bf16: true\n", tmp_path, capsys).config
    assert (config.fsdp_config.pure_bf16, config.train_config.mixed_precision) == (True, None)
