"""Axolotl's configs become recipes with the same batches, schedule, adapter and data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.translated import refusal_of, translate_text

QLORA = """
base_model: owner/model
model_type: LlamaForCausalLM
load_in_4bit: true
load_in_8bit: false
datasets:
  - path: owner/alpaca
    type: alpaca
    split: train
val_set_size: 0.05
output_dir: ./outputs/out
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.1
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
train_on_inputs: true
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.03
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.1
special_tokens: {pad_token: "<|end|>"}
"""


def test_qlora_on_alpaca(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, printed, _ = translate_text(QLORA, tmp_path, capsys)
    train, lora, alpaca = config.train_config, config.lora_config, config.datasets["alpaca_dataset"]
    assert (train.model_name, train.output_dir, train.dataset) == ("owner/model", "./outputs/out", "alpaca_dataset")
    assert (train.context_length, train.batching_strategy, train.truncation) == (2048, "packing", "drop")
    assert (train.batch_size_training, train.gradient_accumulation_steps, train.num_epochs) == (2, 4, 4)
    assert (train.lr, train.min_lr, train.scheduler, train.warmup_ratio) == (2e-4, 2e-5, "cosine", 0.03)
    assert (train.weight_decay, train.decay_norms_and_biases) == (0.1, False)  # transformers spares norms
    assert (train.gradient_clipping, train.gradient_clipping_threshold) == (True, 1.0)
    assert (train.evals_per_epoch, train.activation_checkpointing) == (4, "full")
    assert (train.use_peft, lora.r, lora.lora_alpha, lora.lora_dropout) == (True, 16, 32, 0.1)
    assert lora.target_modules == ("all-linear",)
    assert (config.quantization_config.quantization, config.fsdp_config.optimizer) == ("4bit", "AdamW")
    assert not config.fsdp_config.optimizer_cpu_offload  # an adapter's states are small
    assert (alpaca.data_path, alpaca.validation_fraction) == ("owner/alpaca", 0.05)
    assert config.value("alpaca_dataset.mask_prompt") is False
    assert "needless here: special_tokens.pad_token: padding is masked" in printed
    assert "needless here: load_in_8bit, tf32: it is off" in printed
    assert "no counterpart" not in printed


@pytest.mark.parametrize(
    ("keys", "targets", "said"),
    [
        (
            "lora_target_parameters: [experts.gate_up_proj, experts.down_proj]\nlora_target_modules: [q_proj, v_proj]",
            ("experts.gate_up_proj", "experts.down_proj", "q_proj", "v_proj"),
            "8 keys: 7 set, 1 needless here",
        ),
        (
            "lora_target_modules: [q_proj]\nlora_target_parameters: [experts.down_proj]",
            ("q_proj", "experts.down_proj"),
            "8 keys: 7 set, 1 needless here",
        ),
        (
            "lora_target_linear: true\nlora_target_parameters: [experts.down_proj]",
            ("all-linear",),
            "needless here: lora_target_parameters: all-linear adapts every expert, too",
        ),
        (
            "lora_target_parameters: [experts.down_proj]",
            ("experts.down_proj",),
            "note: lora_target_parameters: alone; name the layers that peft adds",
        ),
    ],
)
def test_parameters_of_experts_are_targets_like_layers(
    keys: str, targets: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data set counts by its keys, once."""
    text = "base_model: owner/model\nadapter: lora\nlora_r: 8\ndatasets: [{path: owner/alpaca, type: alpaca}]\n"
    config, printed, _ = translate_text(f"{text}learning_rate: 1e-4\n{keys}\n", tmp_path, capsys)
    assert config.lora_config.target_modules == targets
    assert said in printed


CHATS = """
base_model: owner/model
chat_template: jinja
chat_template_jinja: |
  {% for message in messages %}{{ message['content'] }}{% endfor %}
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: turns
    message_property_mappings: {role: from, content: value}
    roles: {user: [human, critic], assistant: [writer]}
    roles_to_train: [assistant]
bf16: true
optimizer: adamw_bnb_8bit
learning_rate: 1e-5
gradient_checkpointing: offload
max_grad_norm: 0.5
excess_length_strategy: truncate
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: false
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sharding_strategy: SHARD_GRAD_OP
lisa_n_layers: 4
adam_epsilon: 1e-5
"""


def test_all_weights_on_chats_under_fsdp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CHATS.replace("[full_shard, auto_wrap]", "shard_grad_op auto_wrap")
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("{}\n")
    config, printed, recipe = translate_text(text, tmp_path, capsys)
    train, fsdp = config.train_config, config.fsdp_config
    assert (fsdp.pure_bf16, fsdp.optimizer, train.enable_fsdp) == (True, "AdamW8bit", True)
    assert (fsdp.sharding_strategy, fsdp.checkpoint_type) == ("SHARD_GRAD_OP", "FULL_STATE_DICT")
    assert (train.activation_checkpointing, train.activation_offloading) == ("full", True)
    assert (train.gradient_clipping_threshold, train.truncation) == (0.5, "right")
    assert (train.context_length, train.num_epochs, train.batch_size_training) == (512, 1, 1)  # Axolotl's own
    assert train.batching_strategy == "padding"
    assert config.value("chat_dataset.data_path") == "chats.jsonl"
    assert config.value("chat_dataset.messages_column") == "turns"
    assert config.value("chat_dataset.roles") == ("human=user", "critic=user", "writer=assistant")
    template = Path(config.value("chat_dataset.chat_template"))
    assert template.read_text() == "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"
    assert "no counterpart: lisa_n_layers: its states are those of --optimizer" in printed
    assert "no counterpart: adam_epsilon: AdamW has PyTorch's own, 1e-08" in printed
    assert "torchrun --nproc_per_node 4 finetuning.py --config" in recipe


def test_two_formats_are_mixed_and_two_datasets_of_the_hub_are_fetched_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = """
  - {path: a/alpaca, type: alpaca}
  - {path: b/alpaca, type: alpaca, split: part}
  - {path: c/texts, type: completion, field: body}
"""
    config, printed, _ = translate_text(f"base_model: m\nlearning_rate: 1e-4\ndatasets:{datasets}", tmp_path, capsys)
    assert config.train_config.dataset == "alpaca_dataset,text_dataset"
    places = "hub_data/a/alpaca/**/train-*.parquet,hub_data/b/alpaca/**/part-*.parquet"
    assert config.value("alpaca_dataset.data_path") == places
    assert config.value("alpaca_dataset.validation_fraction") == 0.0  # no key asks for an evaluation
    assert (config.value("text_dataset.data_path"), config.value("text_dataset.text_column")) == ("c/texts", "body")
    assert "hf download b/alpaca --repo-type dataset --local-dir hub_data/b/alpaca" in printed


def test_a_type_with_a_prompt_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
base_model: m
learning_rate: 1e-4
datasets:
  - path: owner/rows
    type: {field_instruction: q, field_output: a, format: "[INST] {instruction} [/INST]"}
"""
    config, _, _ = translate_text(text, tmp_path, capsys)
    assert config.value("instruction_dataset.prompt_column") == "q"
    assert config.value("instruction_dataset.completion_column") == "a"
    assert config.value("instruction_dataset.prompt_template") == "[INST] {prompt} [/INST]"


@pytest.mark.parametrize(
    ("name", "strategy", "offload"),
    [
        ("deepspeed_configs/zero2.json", "SHARD_GRAD_OP", None),
        ("deepspeed_configs/zero3_bf16.json", "FULL_SHARD", None),
        ("deepspeed_configs/zero3_bf16_cpuoffload_all.json", "FULL_SHARD", "optimizer_cpu_offload"),
    ],
)
def test_deepspeed_is_read_by_the_stage_in_its_name_if_its_file_is_not_here(
    name: str, strategy: str, offload: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"base_model: m\nlearning_rate: 1e-4\ndatasets: [{{path: a/b, type: alpaca}}]\ndeepspeed: {name}\n"
    fsdp = translate_text(text, tmp_path, capsys).config.fsdp_config
    assert (fsdp.sharding_strategy, fsdp.optimizer_cpu_offload) == (strategy, offload == "optimizer_cpu_offload")


def test_the_stage_and_the_offloads_of_a_deepspeed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    text = "base_model: m\nlearning_rate: 1e-4\ndatasets: [{path: a/b, type: alpaca}]\ndeepspeed: mine.json\n"
    fsdp = translate_text(text, tmp_path, capsys).config.fsdp_config
    assert (fsdp.sharding_strategy, fsdp.fsdp_cpu_offload) == ("FULL_SHARD", True)


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("reward_model: true", "line 3: reward_model: its pairs train a reward model: give --task reward_model and"),
        ("rl: kto", "line 3: rl: kto is no loss here; of pairs of answers there are dpo, simpo, orpo"),
        (
            "adapter: llama-adapter",
            "line 3: adapter: llama-adapter is no adapter that is trained here; lora and",
        ),
        ("learning_rate: fast", "line 3: learning_rate: 'fast' is not a number (--lr)"),
        ("sample_packing: often", "line 3: sample_packing: 'often' is neither true nor false; give one of them"),
        ("datasets: [{path: a, type: stars}]", "line 3: datasets[0].type: stars is no format here; write the rows as "),
        ("sequence_len: [1, 2]", "line 3: sequence_len: "),
    ],
)
def test_what_no_run_here_can_be_is_refused_with_its_line(
    line: str, refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal_of(f"base_model: m\n# a word\n{line}\n", tmp_path, capsys).startswith(refusal)
