"""torchtune and LitGPT, whose files are nested and name classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.translated import refusal_of, translate_text

TORCHTUNE = """
output_dir: /runs/out
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 16
  lora_alpha: 32
  lora_dropout: 0.1
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /models/m/tokenizer.model
  max_seq_len: 1024
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/m/
  checkpoint_files: [a.safetensors, b.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: False
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: True
  split: train[:95%]
dataset_val:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  split: train[95%:]
run_val_every_n_steps: 25
batch_size_val: ${batch_size}
seed: 7
shuffle: True
batch_size: 2
epochs: 1
max_steps_per_epoch: 10
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW, fused: True, lr: 3e-4, betas: [0.9, 0.95]}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
clip_grad_norm: null
compile: False
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, log_dir: "${output_dir}/logs"}
log_every_n_steps: 1
device: cuda
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: True
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: False, wait_steps: 5}
"""


def test_torchtune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, printed, _ = translate_text(TORCHTUNE, tmp_path, capsys)
    train, lora = config.train_config, config.lora_config
    assert (train.model_name, train.output_dir, train.seed) == ("/models/m", "/runs/out", 7)
    assert (train.use_peft, lora.r, lora.lora_alpha, lora.lora_dropout) == (True, 16, 32, 0.1)
    assert lora.target_modules == ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (config.fsdp_config.pure_bf16, train.peft_dtype) == (True, "bf16")  # torchtune's adapters are in bf16
    assert (train.context_length, train.batching_strategy, train.val_batch_size) == (1024, "packing", 2)
    assert (train.batch_size_training, train.gradient_accumulation_steps, train.limit_train_batches) == (2, 8, 80)
    assert (train.lr, train.adam_beta2, train.weight_decay) == (3e-4, 0.95, 0.01)  # torch's own decay
    assert (train.scheduler, train.warmup_steps, train.gradient_clipping) == ("cosine", 100, False)
    assert (train.eval_every_steps, train.activation_checkpointing, train.activation_offloading) == (25, "full", True)
    assert config.tracking_config.use_wandb is True
    assert config.value("alpaca_dataset.data_path") == "yahma/alpaca-cleaned"
    assert config.value("alpaca_dataset.validation_fraction") == 0.05
    assert config.value("alpaca_dataset.mask_prompt") is False  # torchtune learns the prompts
    assert "needless here: profiler._component_, profiler.enabled, profiler.wait_steps: nothing is profiled" in printed


@pytest.mark.parametrize(
    ("before", "after", "refusal"),
    [
        (
            "${batch_size}",
            "${rows}",
            "line 31: batch_size_val: ${rows} names no plain value of this file; write it out",
        ),
        (
            "LinearCrossEntropyLoss",
            "DPOLoss",
            "line 42: loss: DPOLoss is no loss here",
        ),
        (
            "datasets.alpaca_cleaned_dataset\n  packed",
            "datasets.my_dataset\n  packed",
            "line 23: dataset: my_dataset is",
        ),
    ],
)
def test_what_torchtune_alone_can_is_refused_with_its_line(
    before: str, after: str, refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal_of(TORCHTUNE.replace(before, after, 1), tmp_path, capsys).startswith(refusal)


LITGPT = """
checkpoint_dir: checkpoints/owner/model
out_dir: out/lora
precision: bf16-true
quantize: bnb.nf4-dq
devices: 4
num_nodes: 1
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_query: true
lora_key: false
lora_value: true
lora_projection: false
lora_mlp: true
lora_head: true
data:
  class_path: litgpt.data.Alpaca2k
  init_args: {mask_prompt: false, val_split_fraction: 0.03847, prompt_style: alpaca, ignore_index: -100, num_workers: 4}
train:
  save_interval: 800
  log_interval: 1
  global_batch_size: 8
  micro_batch_size: 2
  lr_warmup_steps: 10
  epochs: 3
  max_tokens:
  max_seq_length: 512
  max_norm:
  min_lr: 6.0e-05
eval: {interval: 25, max_new_tokens: 100, max_iters: 50, initial_validation: true, final_validation: true}
logger_name: csv
seed: 1337
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.0002, weight_decay: 0.0, betas: [0.9, 0.95]}
"""


def test_litgpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, printed, recipe = translate_text(LITGPT, tmp_path, capsys)
    train, lora, quantization = config.train_config, config.lora_config, config.quantization_config
    assert (train.model_name, train.output_dir, train.seed) == ("owner/model", "out/lora", 1337)
    assert (quantization.quantization, quantization.quant_type, quantization.use_double_quant) == ("4bit", "nf4", True)
    assert lora.target_modules == ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    assert (config.fsdp_config.pure_bf16, train.peft_dtype, train.enable_fsdp) == (True, "bf16", True)
    assert (train.global_batch_size, train.batch_size_training, train.context_length) == (8, 2, 512)
    assert (train.lr, train.scheduler, train.warmup_steps, train.min_lr, train.adam_beta2) == (
        2e-4,
        "cosine",
        10,
        0,
        0.95,
    )
    assert (train.eval_every_steps, train.max_eval_step, train.val_batch_size) == (25, 50, 2)
    assert (train.eval_before_training, train.save_every_steps, train.num_epochs) == (True, 800, 3)
    assert config.value("alpaca_dataset.data_path") == "mhenrichsen/alpaca_2k_test"
    assert config.value("alpaca_dataset.validation_fraction") == 0.03847
    assert config.value("alpaca_dataset.mask_prompt") is False
    assert (
        "needless here: lora_key, lora_projection: these layers are not among --lora_config.target_modules" in printed
    )
    assert "torchrun --nproc_per_node 4 finetuning.py --config" in recipe


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("tiiuae/falcon-7b", ("query_key_value", "dense_h_to_4h", "dense_4h_to_h", "lm_head")),
        ("microsoft/phi-2", ("q_proj", "v_proj", "fc1", "fc2", "lm_head")),
        ("microsoft/Phi-3-mini-4k-instruct", ("qkv_proj", "gate_up_proj", "down_proj", "lm_head")),
    ],
)
def test_layers_are_named_as_in_hugging_faces_model(
    model: str, layers: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = translate_text(LITGPT.replace("owner/model", model), tmp_path, capsys).config
    assert config.lora_config.target_modules == layers
