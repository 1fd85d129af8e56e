"""Hints for names that other tools use for our settings."""

from configs.optimizers import OPTIMIZERS
from configs.renamed import RENAMED_HINTS

_PRECISION = "--pure_bf16 (all bf16), --mixed_precision True|False, or --use_fp16"
_TOKENS = "--add_special_tokens a,b"
_PEFT = "--use_peft, with --lora_config.r, .lora_alpha, .target_modules and .lora_dropout"
_QUANTIZATION = "--quantization 4bit|8bit"
_QUANT_TYPE = "--quant_type nf4|fp4, with --quantization 4bit"
_SHARDING = (
    "--enable_fsdp with --sharding_strategy FULL_SHARD|SHARD_GRAD_OP|NO_SHARD|HYBRID_SHARD; "
    "for DeepSpeed's offload of the optimizer, --optimizer_cpu_offload"
)
_CHECKPOINTING = "--activation_checkpointing off|selective|full|auto"
_OFFLOAD = "--fsdp_cpu_offload (weights too, under --enable_fsdp) or --optimizer_cpu_offload"
_UNITS = "--wrap layer|root (the layers are found in the model)"
_OPTIMIZER = f"--optimizer {'|'.join(OPTIMIZERS)}"
_CLIPPING = "--gradient_clipping with --gradient_clipping_threshold"
_KERNELS = "--use_fast_kernels"
_EVALUATION = "--run_validation True|False and --eval_every_steps (optimizer steps)"
_LOGGING = "--log_every_steps (optimizer steps)"
_TRACKERS = "--use_wandb or --use_tensorboard"
_DATA = "--dataset NAME with --NAME.data_path FILE_OR_FOLDER"
_TARGETS = "--lora_config.target_modules, with"
_SAVING = "--save_every_steps N (0: no checkpoints) and --save_model True|False"
_WANDB = "--use_wandb, with the variables WANDB_PROJECT and WANDB_ENTITY"
_RUN_NAME = "--output_dir, whose last part names the run"
_FRACTION = "--chat_dataset.validation_fraction, with the name of your dataset"
_ANSWERS_ALONE = "--mask_prompt (True: answers alone are learned; of chats always)"
_EVALUATED_BEST = "--best_metric; model/ and adapter/ hold the weights of the best evaluation without a flag"
_FLOOR = "--min_lr (a learning rate, no share)"
_ROUGE = "--eval_generate"
_LAUNCHER = "torchrun's --nproc_per_node and --nnodes, before finetuning.py"
_DATA_FILES = "--chat_dataset.data_path with a folder of train.* and validation.*, with the name of your dataset"
_WANDB_NOTES = "--use_wandb, with the variables WANDB_TAGS, WANDB_NOTES, WANDB_RUN_GROUP, WANDB_JOB_TYPE and WANDB_MODE"
_HUB_CONFIG = "--chat_dataset.hub_config, with the name of your dataset"
_FROZEN = "--freeze_layers with --num_freeze_layers (the first layers, which are not trained)"
_PACKING = "--batching_strategy packing|padding"
_TRUNCATION = "--truncation right|left|drop|error|split"
_TEMPLATE = "--chat_dataset.chat_template FILE (left out: the tokenizer's own)"

_NAMES: dict[str, str] = {
    # Precision
    _PRECISION: "precision bf16 fp16 fp32 dtype torch_dtype bfloat16 use_bf16 float16 half",
    "--float8 tensorwise": "fp8 use_fp8",
    # Length and schedule
    _OPTIMIZER: "optim optimizer_name",
    "--lr, --weight_decay, and --optimizer with its own flags": "optim_args",
    "--optimizer AdamW8bit": "use_8bit_adam use_8bit_optimizer",
    "--optimizer anyprecision with --use_kahan_summation": "kahan_sum",
    "--decay_norms_and_biases False": "no_decay",
    "--optimizer Muon": "use_muon",
    "--loss_type dft": "use_dft_loss",
    "--loss_type dpo|simpo|orpo, or --task reward_model, with --dataset preference_dataset": (
        "stage rl pref_loss rl_type rlhf_type"
    ),
    "--task reward_model, with --dataset preference_dataset": "reward_model",
    "--init_lora_weights pissa or pissa_niter_16": "pissa_init",
    "--scheduler step|cosine|linear|constant": "lr_scheduler lr_scheduler_type",
    _FLOOR: "min_lr_ratio min_lr_rate cosine_min_lr_ratio",
    _CLIPPING: "max_grad_norm clip_grad_norm gradient_clip_val max_norm",
    "--limit_train_batches (micro-batches of each rank)": "max_steps_per_epoch",
    "--adam_beta1 and --adam_beta2": "betas adam_betas",
    # Images
    "--max_pixels (of models that limit them; other settings: --image_processor NAME=VALUE)": (
        "image_max_pixels max_image_pixels image_max_size"
    ),
    "--min_pixels (of models that limit them)": "image_min_pixels",
    "--image_processor size.longest_edge=N (its names are those of preprocessor_config.json)": (
        "image_size image_resolution image_resize_algorithm do_image_splitting max_image_size mm_processor_kwargs"
    ),
    "--chat_dataset.image_folder": "media_dir image_dir images_dir",
    "--chat_dataset.image_column": "images_column image_key",
    "--freeze_vision": "freeze_vision_tower freeze_vit freeze_vision_encoder",
    # Data
    _PACKING: (
        "packing sample_packing eval_sample_packing pad_to_sequence_len pad_to_max_length padding_free "
        "neat_packing packed eval_packing packing_strategy"
    ),
    "--batching_strategy padding (batches then hold sequences of similar length)": "group_by_length",
    _TOKENS: (
        "special_tokens new_special_tokens additional_special_tokens add_tokens resize_vocab resize_token_embeddings"
    ),
    _TRUNCATION: "truncation_side truncation_mode",
    _DATA: "data data_dir dataset_name dataset_path train_file datasets train_dataset data_files dataset_dir",
    _FRACTION: (
        "val_size val_set_size validation_split_percentage val_split_fraction test_split_size split_dataset_ratio"
    ),
    _TEMPLATE: "template chat_template_path",
    _ANSWERS_ALONE: (
        "train_on_input train_on_inputs train_on_prompt completion_only_loss assistant_only_loss response_template"
    ),
    "--chat_dataset.learn last": "mask_history",
    "--context_length, or --max_source_length of an encoder-decoder": "max_input_length source_max_len",
    "--max_target_length of an encoder-decoder": "max_output_length target_max_len",
    "--max_target_length (of both splits), and --max_new_tokens with --eval_generate": "val_max_target_length",
    _DATA_FILES: "validation_file test_file eval_dataset val_dataset dataset_val eval_data_path valid_file",
    "--max_eval_step (batches of --val_batch_size), or --split_slice": (
        "max_eval_samples max_val_samples val_batches limit_val_batches eval_iters"
    ),
    _HUB_CONFIG: "dataset_config dataset_config_name subset",
    "--text_dataset.text_column": "dataset_text_field",
    "--chat_dataset.train_split, with the name of your dataset": "dataset_train_split",
    "--chat_dataset.test_split, with the name of your dataset": "dataset_test_split",
    "--chat_dataset.streaming, with the name of your dataset": "dataset_streaming lazy_preprocess",
    "--dataset_weights, one for each of --dataset": "interleave_probs probabilities",
    "--dataset FILE.py:FUNCTION": "formatting_func",
    "--dataset, whose name is the format": "dataset_format dataset_type",
    # Model
    _KERNELS: (
        "attn_implementation flash_attn flash_attention use_flash_attention_2 attn_impl sdp_attention "
        "xformers_attention"
    ),
    "--compile": "torch_compile_backend torch_compile_mode",
    "--rope_scaling yarn|linear|llama3, with --rope_factor": (
        "rope_type rope_parameters use_dynamic_ntk yarn longrope rope_scaling_type"
    ),
    "--enable_fsdp, under torchrun": "device_map",
    # Adapters
    _PEFT: "peft lora use_lora adapter finetuning_type lora_enable train_type tuner_type fine_tune_type",
    f"--use_peft with {_QUANTIZATION}": "qlora",
    f"{_TARGETS} q_proj": "lora_query",
    f"{_TARGETS} k_proj": "lora_key",
    f"{_TARGETS} v_proj": "lora_value",
    f"{_TARGETS} o_proj": "lora_projection",
    f"{_TARGETS} gate_proj,up_proj,down_proj": "lora_mlp apply_lora_to_mlp",
    f"{_TARGETS} lm_head with the others": "lora_head apply_lora_to_output",
    "--lora_config.target_modules a,b or all-linear": (
        "lora_target lora_target_modules lora_target_parameters target_parameters lora_modules lora_attn_modules "
        "target_regex"
    ),
    f"{_TARGETS} all-linear": "lora_target_linear",
    "--peft_method prefix with --prefix_config.num_virtual_tokens": "prefix_tuning",
    _QUANTIZATION: (
        "quantize load_in_4bit load_in_8bit use_4bit use_8bit bits quantization_bit quant_bits quantize_base"
    ),
    _QUANT_TYPE: "nf4 fp4",
    "--peft_dtype fp32|bf16": "autocast_adapter_dtype",
    "--freeze_layers with --num_freeze_layers": "freeze",
    _FROZEN: "freeze_trainable_layers trainable_layers unfreeze_layers",
    "--freeze_language_model": "freeze_LLM_only freeze_llm",
    # Layout
    _SHARDING: "fsdp use_fsdp strategy deepspeed deepspeed_config zero_optimization",
    "always so, under --sharding_strategy NO_SHARD too": "gradient_as_bucket_view",
    "--enable_fsdp False (several processes then replicate the model)": "ddp",
    _OFFLOAD: "cpu_offload offload offload_params offload_optimizer fsdp_offload_params",
    _UNITS: "auto_wrap_policy fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap",
    _CHECKPOINTING: (
        "act_ckpt gradient_checkpointing use_gradient_checkpointing gradient_checkpointing_kwargs grad_checkpoint "
        "use_reentrant use_reentrant_gc enable_activation_checkpointing disable_gradient_checkpointing"
    ),
    _LAUNCHER: (
        "devices num_gpus num_nodes num_processes num_machines machine_rank nnodes nproc_per_node gpus ngpus "
        "world_size num_gpus_per_node"
    ),
    "--step_timeout_seconds": "ddp_timeout",
    "--sharding_strategy FULL_SHARD (True) or SHARD_GRAD_OP (False)": (
        "reshard_after_forward fsdp_reshard_after_forward"
    ),
    # Evaluation and results
    _EVALUATION: "do_eval eval_strategy evaluation_strategy skip_eval no_eval",
    _EVALUATED_BEST: "metric_for_best_model load_best_model_at_end",
    _LOGGING: "logging_strategy",
    _TRACKERS: (
        "report_to wandb tensorboard enable_wandb use_swanlab use_mlflow use_trackio logger logger_name log_with "
        "trackers"
    ),
    _WANDB: "wandb_project wandb_entity project entity",
    _RUN_NAME: "wandb_name wandb_run_name run_name",
    _ROUGE: "rouge predict_with_generate do_predict",
    _SAVING: "enable_checkpointing save_strategy saves_per_epoch",
    "--save_every_steps 0 with --save_every_minutes 0 (no checkpoints; the weights are saved)": (
        "save_only_model save_adapter_weights_only"
    ),
    _WANDB_NOTES: "wandb_mode wandb_tags wandb_group tags group notes job_type mode",
    "--output_dir (its folder tensorboard)": "logging_dir log_dir",
}

HINTS: dict[str, str] = {name: hint for hint, names in _NAMES.items() for name in names.split()} | RENAMED_HINTS
"""The flags that mean the same here, by the name that other tools use."""
