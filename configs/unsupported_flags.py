"""Flags of other tools that have no counterpart here, and the reason for each."""

_NO_REWARDS = "answers are given, alone or in pairs (--loss_type dpo, simpo, orpo); no reward scores new ones"
_NO_MIXED_LOSS = "--loss_type says the whole loss of a pair"
_CHUNKS = "the loss is computed in chunks, so whole logits are never held"
_TOKENIZED = "one rank of each machine tokenizes, on all of its cores, and the result is kept"
_UPLOAD = "a run uploads nothing; `python -m tools.export RUN --push_to_hub OWNER/NAME` does it afterwards"
_LOGIN = "`hf auth login`, or the variable HF_TOKEN, gives the hub's token"
_REVISION = "`hf download OWNER/NAME --revision R --local-dir DIR` gets it, and --model_name DIR takes it"
_OF_MODEL = "the model's files say it"
_ONE_WAY = "--enable_fsdp shards a model, --context_parallel_size shares rows among ranks; layers stay whole"
_MERGE = "a run's folder holds the weights; `python -m tools.export RUN --to DIR --merge` merges an adapter"
_PICKED = "a GPU is used if there is one; the variable CUDA_VISIBLE_DEVICES says which"
_FSDP2 = "FSDP2 does so, or needs no such choice"
_OWN_LOSS = "the losses are those of --loss_type"
_PLAIN_ADAPTER = "adapters are LoRA and DoRA on whole linear layers, with one rank; --lr_ratio is B's learning rate"

_NEEDLESS_REASONS: dict[str, str] = {
    # Data
    "tokens are made anew when the data or a setting that changes them have changed": "overwrite_cache",
    "tokens are kept in the cache of Hugging Face's datasets (the variable HF_DATASETS_CACHE)": (
        "dataset_prepared_path tokenized_path download_dir"
    ),
    _TOKENIZED: (
        "preprocessing_num_workers dataset_num_proc dataset_processes preprocessing_batch_size dataset_batch_size"
    ),
    "classes are found in the labels (--task text_classification)": "num_labels num_classes id2label label2id",
    "columns that no one reads are named and not read": "remove_unused_columns",
    "padding is never learned": "ignore_pad_token_for_loss ignore_index",
    "examples are shuffled anew in each epoch (--seed)": "shuffle shuffle_dataset shuffle_merged_datasets",
    "the last, smaller batch of an epoch is trained on": "drop_last dataloader_drop_last",
    "the chat template writes the token that ends a turn; other texts get the tokenizer's": (
        "eos_token eot_tokens eos_tokens"
    ),
    "padding is masked, whatever its token is": "pad_token",
    "the assistant's turns are learned, with the tokens that end them": "roles_to_train train_on_eos train_on_eot",
    "data is read, and code that comes with it never runs": "samsum_dataset.trust_remote_code",
    "rows say it, in a column chat_template_kwargs": "enable_thinking",
    "batches are pinned and prefetched on GPUs": (
        "dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers"
    ),
    # Model and adapter
    _OF_MODEL: (
        "model_type tokenizer_type processor_type model_class config_name checkpoint_files model_config tie_embeddings "
        "is_llama_derived_model is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model"
    ),
    "fast tokenizers are used if there are some": "use_fast_tokenizer use_slow_tokenizer tokenizer_use_fast",
    "downloads are kept where the variable HF_HOME says": "cache_dir",
    _LOGIN: "token hf_token hub_token hf_hub_token use_auth_token hf_use_auth_token",
    _CHUNKS: (
        "use_liger_kernel enable_liger_kernel liger_fused_linear_cross_entropy liger_cross_entropy use_liger "
        "cut_cross_entropy chunked_cross_entropy"
    ),
    "the kernels are PyTorch's": (
        "use_unsloth unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "lora_embedding_kernel"
    ),
    "torch.compile fuses norms, rotary embeddings and activations (--compile)": (
        "liger_rope liger_rms_norm liger_layer_norm liger_glu_activation liger_rms_norm_gated flash_attn_rms_norm "
        "flash_attn_fuse_mlp flash_attn_fuse_qkv fused_attn_kernel"
    ),
    "training keeps no keys and values": "use_cache",
    "biases stay as they are": "bias lora_bias",
    "--init_lora_weights pissa_niter_16 has 16 iterations, and every saved adapter fits the untouched base": (
        "pissa_iter pissa_convert"
    ),
    "the model says it, and an adapter is trained": "task_type lora_task_type inference_mode",
    "a run's adapter is saved apart from the model": "lora_on_cpu lora_fan_in_fan_out create_new_adapter",
    _MERGE: "merge_lora merge_weights merge_adapter merge_and_unload save_merged export_dir",
    # Layout
    "it is FSDP2": "fsdp_version",
    _FSDP2: (
        "fsdp_limit_all_gathers limit_all_gathers fsdp_sync_module_states sync_module_states fsdp_use_orig_params "
        "use_orig_params fsdp_backward_prefetch fsdp_backward_prefetch_policy backward_prefetch fsdp_forward_prefetch "
        "forward_prefetch fsdp_min_num_params custom_sharded_layers fsdp_final_state_dict_type final_state_dict_type"
    ),
    "every rank's parameters take part in each step": "ddp_find_unused_parameters find_unused_parameters",
    "copies of the model are kept equal by DistributedDataParallel": "ddp_broadcast_buffers ddp_bucket_cap_mb",
    "it is accelerate's; `accelerate launch --config_file FILE finetuning.py` takes such a file": (
        "compute_environment distributed_type main_training_function downcast_bf16 rdzv_backend same_network gpu_ids "
        "enable_cpu_affinity tpu_env tpu_use_cluster tpu_use_sudo main_process_port main_process_ip"
    ),
    _PICKED: "device use_cpu no_cuda",
    "the launcher's variable LOCAL_RANK says it": "local_rank",
    # Training
    "log-probabilities of the reference are always computed once, before the first step": (
        "precompute_ref_log_probs precompute_ref_batch_size precompute_ref_eval_batch_size"
    ),
    "--context_length holds for both answers of a pair with their prompts; of longer pairs the prompt is cut": (
        "max_prompt_length max_completion_length"
    ),
    "a run trains, but with --dry_run or --load_only": "do_train",
    "`python -m tools.plan FLAGS --find` lists what fits": "find",
    "the loss is the mean over all label tokens of a step, over ranks and micro-batches": (
        "average_tokens_across_devices"
    ),
    "it is PyTorch's": "adam_epsilon adam_eps fused",
    # Results
    "the line of each step has its tokens, in all and per second": (
        "include_tokens_per_second include_num_input_tokens_seen include_effective_tokens_per_second include_tkps"
    ),
    "weights are saved as safetensors": "save_safetensors",
    "a run prints lines, and no bars": "disable_tqdm",
    "a run prints what it needs to say": "log_level log_level_replica strict verbose debug",
    "the first step is logged, and `--load_only` checks that a run loads": "logging_first_step save_first_step",
    "an evaluation writes loss, perplexity and the accuracy of label tokens": (
        "do_causal_lm_eval eval_causal_lm_metrics prediction_loss_only compute_accuracy"
    ),
    "--val_batch_size holds the evaluation's batches": "eval_accumulation_steps",
    "--dry_run says what fits": "auto_find_batch_size",
    "`python -m tools.report RUN` draws the curves of a run": "plot_loss",
}

_MISSING_REASONS: dict[str, str] = {
    # Data
    "rows say it, in a column system": "default_system system_prompt",
    # Model and adapter
    _REVISION: "revision model_revision revision_of_model",
    "an adapter trains its own factors, the rows of --add_special_tokens, and a classifier's head": (
        "modules_to_save lora_modules_to_save additional_target"
    ),
    "adapters begin as --init_lora_weights says": "loftq_config loftq_init",
    _PLAIN_ADAPTER: (
        "loraplus_lr_embedding loraplus_lr_groups lora_rank_pattern lora_alpha_pattern "
        "peft_layers_to_transform peft_layers_pattern layers_to_transform relora relora_steps "
        "relora_warmup_steps relora_anneal_steps relora_cpu_offload relora_prune_ratio"
    ),
    "positions are those of config.json; --rope_scaling stretches them": (
        "rope_theta rope_base rotary_emb_base max_position_embeddings"
    ),
    # Layout
    _ONE_WAY: (
        "tensor_parallel_size tensor_model_parallel_size pipeline_model_parallel_size expert_parallel_size "
        "sequence_parallel tp_size pp_size tensor_parallel_dim"
    ),
    # Training
    _NO_REWARDS: "reward_funcs num_generations",
    _NO_MIXED_LOSS: (
        "pref_ftx rpo_alpha cpo_alpha ld_alpha loss_weights pref_bco_weight use_weighting dpo_use_weighting"
    ),
    "the reference is the model before training, whose log-probabilities stay as they are": (
        "ref_model sync_ref_model ref_model_adapters ref_model_quantization_bit ref_model_mixup_alpha "
        "ref_model_sync_steps"
    ),
    "answers that are labelled one by one are not compared; --loss_type dpo, simpo and orpo learn from pairs": (
        "desirable_weight undesirable_weight kto_chosen_weight kto_rejected_weight kto_desirable_weight "
        "kto_undesirable_weight"
    ),
    "fp32 is multiplied in fp32": "tf32",
    "gradients are summed before a step is taken": "optimizer_in_bwd",
    _OWN_LOSS: "use_asft_loss asft_alpha use_eaft use_eaft_loss eaft_alpha eaft_k",
    "its states are those of --optimizer": (
        "use_galore galore_layerwise galore_target galore_rank galore_update_interval galore_scale use_apollo "
        "apollo_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale apollo_scale_type use_badam "
        "badam_mode badam_switch_mode badam_switch_interval badam_start_block badam_update_ratio badam_mask_mode "
        "badam_verbose use_adam_mini optim_target_modules lisa_n_layers lisa_step_interval "
        "lisa_layers_attribute"
    ),
    "any better evaluation counts (--early_stopping_patience)": "early_stopping_threshold",
    # Results
    _UPLOAD: "push_to_hub hub_model_id hub_strategy hub_private_repo push_dataset_to_hub export_hub_model_id",
}


def _by_name(reasons: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


NEEDLESS: dict[str, str] = _by_name(_NEEDLESS_REASONS)
"""The reason why a run does without it, by the name that other tools give it."""

MISSING: dict[str, str] = _by_name(_MISSING_REASONS)
"""The reason why a run cannot do this, by the name that other tools give it."""

UNSUPPORTED: dict[str, str] = NEEDLESS | MISSING
"""The reason why there is no such flag, by the name that other tools give it."""
