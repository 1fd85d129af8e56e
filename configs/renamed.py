"""Other tools' names of our settings. A value is taken over as it is: it has the same meaning and unit here.

Hints name them, and `python -m tools.translate` takes values over by them.
"""

_NAMES: dict[str, str] = {
    # Batches and schedule
    "batch_size_training": (
        "batch_size batchsize bs micro_batch_size train_batch_size per_device_train_batch_size "
        "train_micro_batch_size_per_gpu"
    ),
    "val_batch_size": "eval_batch_size per_device_eval_batch_size batch_size_val",
    "gradient_accumulation_steps": (
        "accumulate_grad_batches gradient_accumulation gradient_accumulation_iters grad_accum grad_accumulation_steps "
        "gas"
    ),
    "lr": "learning_rate",
    "num_epochs": "epochs max_epochs num_train_epochs",
    "max_train_step": "max_step max_steps max_train_steps iters max_iters num_training_steps",
    "warmup_steps": "warmup lr_warmup_steps num_warmup_steps warmup_updates",
    "warmup_ratio": "lr_warmup_ratio",
    "min_lr": "eta_min min_learning_rate lr_end final_lr",
    "seed": "random_seed data_seed random_state shuffle_seed",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "deterministic": "full_determinism",
    "label_smoothing": "label_smoothing_factor",
    "neftune_noise_alpha": "noisy_embedding_alpha neft_alpha",
    "router_aux_loss_coef": "moe_aux_loss_coef",
    "beta": "dpo_beta pref_beta rl_beta",
    "preference_smoothing": "dpo_label_smoothing",
    "orpo_weight": "orpo_alpha",
    # Data
    "context_length": (
        "max_length max_seq_length max_seq_len model_max_length sequence_len seq_len block_size cutoff_len "
        "max_packed_sequence_len seq_length sequence_length max_context_length context_window n_ctx"
    ),
    "num_workers_dataloader": "num_workers dataloader_num_workers",
    "split_slice": "num_train_samples max_train_samples max_samples",
    "shuffle_buffer_size": "buffer_size",
    "max_generate_samples": "max_predict_samples",
    # Model and adapter
    "model_name": (
        "model model_path model_id model_ckpt model_checkpoint model_name_or_path base_model checkpoint_dir "
        "checkpointer pretrained_model_name_or_path"
    ),
    "tokenizer_name": "tokenizer tokenizer_name_or_path tokenizer_path",
    "compile": "torch_compile use_compile",
    "rope_factor": "rope_scaling_factor scaling_factor",
    "rope_original_positions": "original_max_position_embeddings rope_original_max_position_embeddings",
    "low_cpu_fsdp": "low_cpu_mem_usage cpu_ram_efficient_loading fsdp_cpu_ram_efficient_loading",
    "lora_config.r": "lora_r lora_rank rank",
    "lora_config.lora_alpha": "alpha",
    "lora_config.lora_dropout": "dropout",
    "lora_config.use_dora": "dora peft_use_dora",
    "lora_config.init_lora_weights": "peft_init_lora_weights",
    "lora_config.lr_ratio": "loraplus_lr_ratio lora_plus_lr_ratio",
    "lora_config.use_rslora": "rslora peft_use_rslora",
    "from_peft_checkpoint": "lora_model_dir adapter_name_or_path adapter_path resume_adapter_file",
    "prefix_config.num_virtual_tokens": "prefix_length",
    "quant_type": "bnb_4bit_quant_type quantization_type",
    "use_double_quant": (
        "bnb_4bit_use_double_quant double_quant double_quantization nested_quant use_nested_quant use_bnb_nested_quant"
    ),
    "compute_dtype": "bnb_4bit_compute_dtype bnb_compute_dtype",
    "quant_storage": "bnb_4bit_quant_storage bnb_4bit_quant_storage_dtype",
    "peft_dtype": "lora_dtype",
    "reduce_dtype": "mixed_precision_reduce communication_data_type",
    "freeze_vision": "freeze_vision_tower freeze_vit",
    # Layout
    "tile_tokens": "tiled_mlp unsloth_tiled_mlp tiled_mlp_num_shards",
    "activation_offloading": "enable_activation_offloading activation_offload",
    "context_parallel_size": (
        "cp_size sp_size context_parallel_degree context_parallel_dim sequence_parallel_degree sequence_parallel_size "
        "ulysses_sequence_parallel_size"
    ),
    "sharding_group_size": "dp_shard_size data_parallel_shard_dim",
    "replica_group_size": "dp_replicate_size data_parallel_replicate_dim",
    "checkpoint_type": "state_dict_type fsdp_state_dict_type",
    # Evaluation and results
    "eval_every_steps": "eval_steps evaluation_steps eval_interval interval eval_every steps_per_eval "
    "val_check_interval run_val_every_n_steps",
    "log_every_steps": "logging_steps log_interval log_every_n_steps steps_per_report",
    "save_every_steps": "checkpointing_steps save_steps save_interval save_every steps_per_save save_freq",
    "num_beams": "generation_num_beams",
    "max_new_tokens": "generation_max_length",
    "keep_last": "save_total_limit",
    "output_dir": "out_dir save_dir",
    "overwrite": "overwrite_output_dir",
    "resume": "resume_from_checkpoint resume_training recipe_checkpoint",
    "eval_before_training": "eval_on_start initial_validation",
    "print_memory": "log_peak_memory_stats",
}

_REMARKS: dict[str, str] = {
    "beta": ", with --loss_type dpo|simpo (--orpo_weight of orpo)",
    "preference_smoothing": ", with --loss_type dpo|simpo",
    "orpo_weight": ", with --loss_type orpo",
    "batch_size_training": " (rows per rank per micro-batch)",
    "gradient_accumulation_steps": ", or --global_batch_size in rows",
    "max_train_step": " (optimizer steps)",
    "warmup_steps": " (optimizer steps), or --warmup_ratio (a share of them)",
    "min_lr": " (a learning rate, no share)",
    "context_length": " (tokens)",
    "split_slice": " (1%, or a number of examples)",
    "max_generate_samples": ", with --eval_generate",
    "quant_type": " nf4|fp4, with --quantization 4bit",
    "use_double_quant": ", with --quantization 4bit",
    "compute_dtype": " fp32|bf16|fp16 (left out: that of the run)",
    "quant_storage": " (left out: one that every layout copies unchanged)",
    "peft_dtype": " fp32|bf16",
    "reduce_dtype": " fp32|bf16",
    "tile_tokens": " (tokens of a tile, not the number of tiles)",
    "activation_offloading": ", with --activation_checkpointing full",
    "context_parallel_size": " (ranks that share each row)",
    "sharding_group_size": ", with --sharding_strategy HYBRID_SHARD",
    "replica_group_size": ", with --sharding_strategy HYBRID_SHARD",
    "checkpoint_type": " SHARDED_STATE_DICT|FULL_STATE_DICT",
    "eval_every_steps": " (optimizer steps), or --evals_per_epoch; --run_validation False evaluates nothing",
    "log_every_steps": " (optimizer steps)",
    "save_every_steps": " N (0: no checkpoints) and --save_model True|False",
    "num_beams": ", with --eval_generate",
    "max_new_tokens": ", with --eval_generate",
}

RENAMED: dict[str, str] = {name: setting for setting, names in _NAMES.items() for name in names.split()}
"""Our settings, as flags name them, by the names that other tools have for them."""

RENAMED_HINTS: dict[str, str] = {name: f"--{setting}{_REMARKS.get(setting, '')}" for name, setting in RENAMED.items()}
"""The flags with a word on their unit, by the names that other tools have for them."""
