"""TRL's YAML files and command lines, and the alignment handbook's recipes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from configs.flags import parse_flags
from configs.run import RunConfig
from tests.helpers.translated import translate_text
from tools.translate.__main__ import main

COMMAND = """
accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml --num_processes 8 trl/scripts/sft.py
    --model_name_or_path owner/model --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 --packing
    --num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --eos_token '<|im_end|>'
    --eval_strategy steps --eval_steps 100 --use_peft --lora_r 32 --lora_alpha 16 --output_dir out --push_to_hub
    --warmup_steps 0.03 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}'
"""


def of_command(text: str, folder: Path) -> RunConfig:
    assert main(["--out", str(folder / "recipe.yaml"), "--", *shlex.split(text)]) == 0
    return parse_flags(["--config", str(folder / "recipe.yaml")])


def test_a_command_line_under_accelerate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = of_command(COMMAND, tmp_path)
    train, printed = config.train_config, capsys.readouterr().out
    assert (train.dataset, train.enable_fsdp, train.batching_strategy) == ("chat_dataset", True, "packing")
    assert (config.fsdp_config.sharding_strategy, train.activation_checkpointing) == ("FULL_SHARD", "full")
    assert (train.lr, train.min_lr, train.scheduler, train.warmup_ratio) == (2e-4, 2e-5, "cosine", 0.03)
    assert (train.num_epochs, train.batch_size_training, train.gradient_accumulation_steps) == (1, 2, 8)
    assert (train.eval_every_steps, train.context_length) == (100, 1024)  # TRL's own length
    assert (config.lora_config.r, config.lora_config.lora_alpha, config.lora_config.lora_dropout) == (32, 16, 0.05)
    assert config.value("chat_dataset.data_path") == "trl-lib/Capybara"
    assert config.value("chat_dataset.test_split") == "test"
    assert "torchrun --nproc_per_node 8 finetuning.py" in printed
    assert "no counterpart: push_to_hub: a run uploads nothing" in printed


def test_flags_go_before_the_file_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(
        "model_name_or_path: m\ndataset_name: stanfordnlp/imdb\nlearning_rate: 1e-3\n"
    )
    config = of_command(f"trl sft --config {tmp_path}/theirs.yaml --learning_rate 1e-4", tmp_path)
    assert (config.train_config.lr, config.train_config.dataset) == (1e-4, "text_dataset")
    assert config.train_config.run_validation is False  # without eval_strategy nothing is evaluated


HANDBOOK = """
model_name_or_path: owner/model
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
chat_template: "{% for message in messages %}\\n{{ message['content'] }}{% endfor %}"
dataset_mixture:
  datasets:
    - {id: owner/chats, config: default, split: train_sft, columns: [messages], weight: 1.0}
    - {id: owner/chats, config: default, split: test_sft, columns: [messages], weight: 0.5}
  test_split_size: 0.05
  seed: 0
bf16: true
dataset_kwargs: {add_special_tokens: false}
eval_strategy: epoch
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
learning_rate: 1.0e-03
max_seq_length: 2048
max_steps: -1
num_train_epochs: 2
per_device_train_batch_size: 4
report_to: [tensorboard, wandb]
save_strategy: "no"
warmup_ratio: 0.1
"""


def test_a_recipe_of_the_handbook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, printed, _ = translate_text(HANDBOOK, tmp_path, capsys)
    train, tracking = config.train_config, config.tracking_config
    assert (config.fsdp_config.pure_bf16, train.mixed_precision) == (True, None)
    assert (train.lr, train.scheduler, train.max_train_step, train.num_epochs) == (1e-3, "linear", 0, 2)
    assert (train.save_every_steps, train.save_every_minutes) == (0, 0)
    assert (tracking.use_wandb, tracking.use_tensorboard) == (True, True)
    parts = [f"hub_data/owner/chats/**/{split}-*.parquet" for split in ("train_sft", "test_sft")]
    assert config.value("chat_dataset.data_path").split(",") == parts
    assert config.value("chat_dataset.validation_fraction") == 0.05
    template = Path(config.value("chat_dataset.chat_template"))
    assert template.read_text() == "{% for message in messages %}\n{{ message['content'] }}{% endfor %}"
    assert "no counterpart: dataset_mixture.datasets[1].weight: --split_slice takes one share" in printed
    assert "dataset_mixture.datasets[0].weight: all rows are read" in printed


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            "trl kto --model_name_or_path m",
            "command: kto is not translated; `trl sft`, `trl dpo` and their scripts are",
        ),
        (
            "accelerate launch --num_processes 2 examples/grpo.py --x 1",
            "command: examples/grpo.py is not translated; `trl",
        ),
        ("trl dpo --model_name_or_path m --loss_type ipo", "command: loss_type: ipo is no loss here; of pairs of"),
        ("trl cpo --model_name_or_path m", "command: trainer: cpo is no loss here; with loss_type simpo it is"),
    ],
)
def test_commands_of_other_trainers_are_refused(
    words: str, refusal: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--tool", "trl", "--out", str(tmp_path / "recipe.yaml"), "--", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {refusal}")


def test_words_that_are_no_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", "trl", "sft", "--lr", "1e-4", "--lr", "2e-4"]) == 2
    assert capsys.readouterr().err == "error: command: --lr: given twice; leave one of them out\n"
