"""Axolotl's configs (https://docs.axolotl.ai/docs/config-reference.html)."""

from __future__ import annotations

from tools.translate import preferences, rope, steps, values
from tools.translate.axolotl_data import datasets, prefers, pretraining, test_datasets
from tools.translate.layouts import copies, shards
from tools.translate.source import Tree
from tools.translate.trainer import TRAINER_RULES, add_trainer_defaults, fp16
from tools.translate.translation import Tool, Translation, by_name


def _adapter(tree: Tree) -> str:
    found = tree.get("adapter")
    return found if isinstance(found, str) else ""


def _adapter_rule(translation: Translation, key: str) -> None:
    name = translation.text(key) or ""
    if name not in ("lora", "qlora"):
        translation.refuse(key, f"{name} is no adapter that is trained here; lora and qlora are")
    translation.set(key, "use_peft", "True")
    if name == "qlora" and translation.value("load_in_4bit") is None and translation.value("load_in_8bit") is None:
        translation.set(key, "quantization", "4bit")


def _bf16(translation: Translation, key: str) -> None:
    """`bf16`: Axolotl loads the weights in bf16, too. A frozen base is in bf16 here without a flag."""
    text = (translation.text(key) or "").lower()
    if text == "full" or text == "auto" or translation.switch(key):
        if translation.trains_adapter:
            translation.needless(key, "under an adapter the base is in bf16, if the device has it")
        else:
            translation.set(key, "pure_bf16", "True")
    elif translation.switch("fp16"):
        translation.needless(key, "fp16 is computed in")
    else:
        translation.set(key, "mixed_precision", "False")


def _all_linear(translation: Translation, key: str) -> None:
    if translation.switch(key):
        translation.set(key, "lora_config.target_modules", ["all-linear"])
    else:
        translation.needless(key, "lora_target_modules says the layers")


def _target_modules(translation: Translation, key: str) -> None:
    if translation.switch("lora_target_linear"):
        translation.needless(key, "lora_target_linear means every linear layer")
    else:
        values.targets(translation, key)


def _chat_template(translation: Translation, key: str) -> None:
    name = translation.text(key) or ""
    if name == "jinja":
        translation.needless(key, "chat_template_jinja is the template")
    elif name.startswith("tokenizer_default"):
        translation.needless(key, "the tokenizer's own template is used")
    else:
        translation.missing(
            key,
            f"the tokenizer's own template is used; for {name} of a base model give --chat_dataset.chat_template FILE",
        )


def _jinja(translation: Translation, key: str) -> None:
    translation.files["chat_template"] = translation.text(key) or ""
    translation.dataset_wide.append((key, "chat_template", "CHAT_TEMPLATE"))
    translation.claim(key)


def _special_tokens(translation: Translation, key: str) -> None:
    for leaf in translation.source.leaves(key):
        name = leaf.rpartition(".")[2]
        if name == "pad_token":
            translation.needless(leaf, "padding is masked, whatever its token is")
        else:
            translation.missing(leaf, "the tokenizer's own is used")


def _too_long(translation: Translation, key: str) -> None:
    known = {"drop": "drop", "truncate": "left" if prefers(translation) else "right", "raise": "error"}
    text = translation.text(key) or ""
    translation.set(key, "truncation", known.get(text, text))


def _batch_size(translation: Translation, key: str) -> None:
    """`batch_size`: rows of a rank's step, the accumulated ones, too."""
    rows, of_each = translation.number(key) or 1, translation.number("micro_batch_size") or 1
    if translation.value("gradient_accumulation_steps") is not None:
        translation.needless(key, "gradient_accumulation_steps says it")
    else:
        translation.set(key, "gradient_accumulation_steps", f"{max(1, rows // of_each):.0f}")


def _offloads_activations(translation: Translation, key: str) -> None:
    if (translation.text(key) or "").lower() in ("false", "no"):
        translation.needless(key, "activations stay on the device")
    else:
        translation.set(key, "activation_offloading", "True")


def _rl(translation: Translation, key: str) -> None:
    name = (translation.text(key) or "").lower()
    if name in ("false", "no"):
        translation.needless(key, "it is off")
    else:
        preferences.set_loss(translation, key, name)


def _length(translation: Translation, key: str) -> None:
    preferences.length_of_text(translation, key, prefers(translation))


def _finish(translation: Translation) -> None:
    if prefers(translation):
        translation.default("context_length", "1024")
        if translation.given("loss_type") != "orpo":
            translation.default("beta", "0.1")
    if translation.trains_adapter:
        translation.default("lora_config.lora_dropout", "0.0")
    translation.default("scheduler", "cosine")
    translation.default("optimizer", "AdamW")
    translation.default("num_epochs", "1")
    translation.default("batch_size_training", "1")
    translation.default("context_length", "512")
    translation.default("truncation", "drop")
    translation.default("batching_strategy", "padding")
    translation.default("activation_checkpointing", "off")
    add_trainer_defaults(translation)
    if translation.value("pretraining_dataset") is not None:
        translation.settings.pop("train_config.truncation", None)


def _reward_model(translation: Translation, key: str) -> None:
    if translation.switch(key):
        translation.refuse(
            key, "its pairs train a reward model: give --task reward_model and --dataset preference_dataset"
        )
    translation.needless(key, "it is off")


AXOLOTL = Tool(
    name="Axolotl",
    fits=lambda tree: "base_model" in tree,
    trains_adapter=lambda tree: _adapter(tree) in ("lora", "qlora"),
    finish=_finish,
    groups=("bnb_config_kwargs",),
    rules={
        **TRAINER_RULES,
        "adapter": _adapter_rule,
        "bf16": _bf16,
        "bfloat16": _bf16,
        "rl": _rl,
        "sequence_len": _length,
        "rpo_alpha": preferences.extra_loss("the cross-entropy of the chosen answer"),
        "cpo_alpha": preferences.extra_loss("the cross-entropy of the chosen answer"),
        "reward_model": _reward_model,
        "process_reward_model": values.refused("it trains a model of rewards"),
        "load_in_4bit": values.if_on("quantization", "4bit"),
        "load_in_8bit": values.if_on("quantization", "8bit"),
        "lora_target_linear": _all_linear,
        "lora_target_modules": _target_modules,
        "lora_target_parameters": values.target_parameters(
            "lora_target_modules", lambda translation: bool(translation.switch("lora_target_linear"))
        ),
        "datasets": datasets,
        "pretraining_dataset": pretraining,
        "test_datasets": test_datasets,
        "val_set_size": values.held_out,
        "train_on_inputs": values.learns_prompts(),
        "chat_template": _chat_template,
        "chat_template_jinja": _jinja,
        "special_tokens": _special_tokens,
        "tokens": values.new_tokens,
        "sample_packing": values.packed,
        "eval_sample_packing": values.needless("validation data is batched as training data is"),
        "pad_to_sequence_len": values.needless("batches are as wide as their longest row needs"),
        "excess_length_strategy": _too_long,
        "num_epochs": steps.all_epochs,
        "batch_size": _batch_size,
        "dp_shard_size": shards("dp_replicate_size"),
        "dp_replicate_size": copies,
        "activation_offloading": _offloads_activations,
        "float16": fp16,
        "overrides_of_model_config.rope_scaling": rope.group,
        "overrides_of_model_config.rope_parameters": rope.group,
        "fp8": values.if_on("float8", "tensorwise"),
        "streaming": values.for_datasets("streaming"),
        "torch_compile_mode": values.needless("PyTorch's default mode compiles"),
        "optimizer": steps.optimizer,
        "lr_scheduler": steps.schedule,
        "cosine_min_lr_ratio": steps.lowest_share("learning_rate"),
        "evals_per_epoch": steps.per_epoch,
        "saves_per_epoch": steps.saves_per_epoch,
        "flash_attention": values.attention,
        "sdp_attention": values.attention,
        "xformers_attention": values.attention,
        "flex_attention": values.attention,
        "unfrozen_parameters": values.missing("--freeze_layers freezes whole layers; others train"),
    },
    needless=by_name(
        {
            "the processor of images is the model's": "processor_type is_multimodal",
            "rows are tokenized before training, and images opened in it": "skip_prepare_dataset",
            "each dataset is read once, and its repository's version is the newest": "ds_type",
            "metrics and weights are written to the run folder": "wandb_watch wandb_log_model wandb_run_id",
            "examples are shuffled with --seed": "shuffle_merged_datasets",
            "packing fills rows as they come": (
                "sample_packing_bin_size sample_packing_group_size sample_packing_eff_est sample_packing_sequentially "
                "curriculum_sampling multipack_real_batches eval_table_size eval_max_new_tokens"
            ),
            "embeddings keep their size; --pad_to_multiple_of pads batches": "resize_token_embeddings_to_32x",
            "equal rows are named at the start, if they are in both splits": "dataset_exact_deduplication",
            "it is Axolotl's own": "plugins strict unsloth low_cpu_mem_usage gpu_memory_limit is_preprocess",
        }
    ),
    missing=by_name(
        {
            "the processor's own settings have --image_processor NAME=VALUE": "image_size image_resize_algorithm",
            "experts are computed and quantized as other linear layers": "quantize_moe_experts use_kernels",
            "weights are trained in the precision that they are stored in": "qat fp8_enable_fsdp_float8_all_gather",
            "--output_dir names the run, by its last part": "wandb_name wandb_run_name",
        }
    ),
)
