"""Flags of other tools that have no counterpart here, and the reason for each."""

_NO_PREFERENCES = "given answers are learned; there is no preference or reward training"
_CHUNKS = "the loss is computed in chunks, so whole logits are never held"
_TOKENIZED = "one rank of each machine tokenizes, on all of its cores, and the result is kept"
_UPLOAD = "nothing is uploaded; `hf upload OWNER/NAME RUN/model` does that"
_LOGIN = "`hf auth login`, or the variable HF_TOKEN, gives the hub's token"
_REVISION = "`hf download OWNER/NAME --revision R --local-dir DIR` gets it, and --model_name DIR takes it"
_OF_MODEL = "the model's files say it"
_ONE_WAY = "--enable_fsdp shards weights, gradients and optimizer states; layers and sequences stay whole"
_MERGE = "a run's folder holds the weights; `python -m tools.export RUN --to DIR --merge` merges an adapter"
_PICKED = "a GPU is used if there is one; the variable CUDA_VISIBLE_DEVICES says which"

_REASONS: dict[str, str] = {
    # Data
    "tokens are made anew when the data or a setting that changes them have changed": "overwrite_cache",
    "tokens are kept in the cache of Hugging Face's datasets (the variable HF_DATASETS_CACHE)": (
        "dataset_prepared_path tokenized_path"
    ),
    _TOKENIZED: "preprocessing_num_workers dataset_num_proc preprocessing_batch_size dataset_batch_size",
    "columns that no one reads are named and not read": "remove_unused_columns",
    "padding is never learned": "ignore_pad_token_for_loss",
    "examples are shuffled anew in each epoch (--seed)": "shuffle shuffle_dataset shuffle_merged_datasets",
    "the last, smaller batch of an epoch is trained on": "drop_last dataloader_drop_last",
    "the chat template writes the token that ends a turn; other texts get the tokenizer's": "eos_token eot_tokens",
    "padding is masked, whatever its token is": "pad_token",
    "the assistant's turns are learned, with the tokens that end them": "roles_to_train train_on_eos train_on_eot",
    "rows say it, in a column system": "default_system system_prompt",
    "data is read, and code that comes with it never runs": "samsum_dataset.trust_remote_code",
    "rows say it, in a column chat_template_kwargs": "enable_thinking",
    # Model and adapter
    _OF_MODEL: "model_type tokenizer_type processor_type model_class config_name checkpoint_files",
    "fast tokenizers are used if there are some": "use_fast_tokenizer use_slow_tokenizer tokenizer_use_fast",
    "downloads are kept where the variable HF_HOME says": "cache_dir",
    _LOGIN: "token hf_token hub_token hf_hub_token use_auth_token",
    _REVISION: "revision model_revision",
    _CHUNKS: "use_liger_kernel enable_liger_kernel liger_fused_linear_cross_entropy liger_cross_entropy",
    "the kernels are PyTorch's": "use_unsloth",
    "training keeps no keys and values": "use_cache",
    "an adapter trains its own factors, and the rows of --add_special_tokens": (
        "modules_to_save lora_modules_to_save additional_target"
    ),
    "biases stay as they are": "bias lora_bias",
    "the model says it, and an adapter is trained": "task_type lora_task_type inference_mode",
    "adapters begin without an effect on the model": "init_lora_weights pissa_init loftq_config",
    _MERGE: "merge_lora merge_weights merge_adapter merge_and_unload save_merged export_dir",
    # Layout
    _ONE_WAY: (
        "tensor_parallel_size tensor_model_parallel_size pipeline_model_parallel_size expert_parallel_size "
        "context_parallel_size sequence_parallel sequence_parallel_size tp_size pp_size cp_size sp_size"
    ),
    "it is FSDP2": "fsdp_version",
    "it is accelerate's; `accelerate launch --config_file FILE finetuning.py` takes such a file": (
        "compute_environment distributed_type main_training_function downcast_bf16 rdzv_backend same_network gpu_ids"
    ),
    _PICKED: "device use_cpu no_cuda",
    "the launcher's variable LOCAL_RANK says it": "local_rank",
    # Training
    _NO_PREFERENCES: "stage rl beta dpo_beta pref_beta pref_loss ref_model reward_model",
    "a run trains, but with --dry_run or --load_only": "do_train",
    "`python -m tools.plan FLAGS --find` lists what fits": "find",
    "no noise is added to embeddings": "neftune_noise_alpha",
    "the loss is the mean over all label tokens of a step, over ranks and micro-batches": (
        "average_tokens_across_devices"
    ),
    "fp32 is multiplied in fp32": "tf32",
    "it is PyTorch's": "adam_epsilon adam_eps",
    "a run takes all its steps; model/ or adapter/ holds the weights of the best evaluation": (
        "early_stopping early_stopping_patience early_stopping_steps early_stopping_threshold"
    ),
    # Results
    "the line of each step has its tokens, in all and per second": (
        "include_tokens_per_second include_num_input_tokens_seen include_effective_tokens_per_second"
    ),
    "weights are saved as safetensors": "save_safetensors",
    "a run prints lines, and no bars": "disable_tqdm",
    "--val_batch_size holds the evaluation's batches": "eval_accumulation_steps",
    "--dry_run says what fits": "auto_find_batch_size",
    "`python -m tools.report RUN` draws the curves of a run": "plot_loss",
    _UPLOAD: "push_to_hub hub_model_id push_dataset_to_hub export_hub_model_id",
}

UNSUPPORTED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""The reason why there is no such flag, by the name that other tools give it."""
