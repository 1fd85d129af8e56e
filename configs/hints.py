"""Hints for names that other tools use for our settings."""

_BATCH = "--batch_size_training (rows per rank per micro-batch)"
_PRECISION = "--pure_bf16 (all bf16), --mixed_precision True|False, or --use_fp16"
_REDUCTION = "--reduce_dtype fp32|bf16"
_EPOCHS = "--num_epochs"
_STEPS = "--max_train_step (optimizer steps)"
_ACCUMULATION = "--gradient_accumulation_steps, or --global_batch_size in rows"
_TOKENS = "--add_special_tokens a,b"
_LENGTH = "--context_length (tokens)"
_MODEL = "--model_name"
_PEFT = "--use_peft, with --lora_config.r, .lora_alpha, .target_modules and .lora_dropout"
_QUANTIZATION = "--quantization 4bit|8bit"
_QUANT_TYPE = "--quant_type nf4|fp4, with --quantization 4bit"
_DOUBLE_QUANT = "--use_double_quant, with --quantization 4bit"
_QUANT_COMPUTE = "--compute_dtype fp32|bf16|fp16 (left out: that of the run)"
_QUANT_STORAGE = "--quant_storage (left out: one that every layout copies unchanged)"
_SHARDING = (
    "--enable_fsdp with --sharding_strategy FULL_SHARD|SHARD_GRAD_OP|NO_SHARD|HYBRID_SHARD; "
    "for DeepSpeed's offload of the optimizer, --optimizer_cpu_offload"
)
_CHECKPOINTING = "--activation_checkpointing off|selective|full|auto"
_OFFLOAD = "--fsdp_cpu_offload (weights too, under --enable_fsdp) or --optimizer_cpu_offload"
_ACTIVATIONS_ON_HOST = "--activation_offloading, with --activation_checkpointing full"
_UNITS = "--wrap layer|root (the layers are found in the model)"
_OPTIMIZER = "--optimizer AdamW|SGD|anyprecision|AdamW8bit|PagedAdamW8bit|Adafactor"
_CLIPPING = "--gradient_clipping with --gradient_clipping_threshold"
_KERNELS = "--use_fast_kernels"
_EVALUATION = "--run_validation True|False and --eval_every_steps (optimizer steps)"
_LOGGING = "--log_every_steps (optimizer steps)"
_TRACKERS = "--use_wandb or --use_tensorboard"
_SLICE = "--split_slice (1%, or a number of examples)"
_DATA = "--dataset NAME with --NAME.data_path FILE_OR_FOLDER"
_TARGETS = "--lora_config.target_modules, with"
_SAVING = "--save_every_steps N (0: no checkpoints) and --save_model True|False"
_WANDB = "--use_wandb, with the variables WANDB_PROJECT and WANDB_ENTITY"
_RUN_NAME = "--output_dir, whose last part names the run"
_FRACTION = "--chat_dataset.validation_fraction, with the name of your dataset"
_ANSWERS_ALONE = "--mask_prompt (True: answers alone are learned; of chats always)"
_EVALUATED_BEST = "--best_metric; model/ and adapter/ hold the weights of the best evaluation without a flag"
_TRAINED_ON = "--from_peft_checkpoint"
_FLOOR = "--min_lr (a learning rate, no share)"
_ROUGE = "--eval_generate"
_LAUNCHER = "torchrun's --nproc_per_node and --nnodes, before finetuning.py"

HINTS: dict[str, str] = {
    # Batches
    "batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "eval_batch_size": "--val_batch_size",
    "per_device_eval_batch_size": "--val_batch_size",
    "accumulate_grad_batches": _ACCUMULATION,
    "gradient_accumulation": _ACCUMULATION,
    "gradient_accumulation_iters": _ACCUMULATION,
    "grad_accum": _ACCUMULATION,
    "grad_accumulation_steps": _ACCUMULATION,
    # Precision
    "precision": _PRECISION,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "fp32": _PRECISION,
    "dtype": _PRECISION,
    "torch_dtype": _PRECISION,
    # Length and schedule
    "learning_rate": "--lr",
    "epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "max_steps": _STEPS,
    "max_train_steps": _STEPS,
    "optim": _OPTIMIZER,
    "optimizer_name": _OPTIMIZER,
    "optim_args": "--lr, --weight_decay, and --optimizer with its own flags",
    "use_8bit_adam": "--optimizer AdamW8bit",
    "use_8bit_optimizer": "--optimizer AdamW8bit",
    "kahan_sum": "--optimizer anyprecision with --use_kahan_summation",
    "no_decay": "--decay_norms_and_biases False",
    "lr_scheduler": "--scheduler step|cosine|linear|constant",
    "lr_scheduler_type": "--scheduler step|cosine|linear|constant",
    "warmup": "--warmup_steps (optimizer steps)",
    "warmup_ratio": "--warmup_steps (optimizer steps)",
    "lr_warmup_steps": "--warmup_steps (optimizer steps)",
    "num_warmup_steps": "--warmup_steps (optimizer steps)",
    "min_lr_ratio": _FLOOR,
    "min_lr_rate": _FLOOR,
    "cosine_min_lr_ratio": _FLOOR,
    "eta_min": _FLOOR,
    "max_grad_norm": _CLIPPING,
    "clip_grad_norm": _CLIPPING,
    "gradient_clip_val": _CLIPPING,
    "random_seed": "--seed",
    # Data
    "max_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "model_max_length": _LENGTH,
    "sequence_len": _LENGTH,
    "seq_len": _LENGTH,
    "block_size": _LENGTH,
    "cutoff_len": _LENGTH,
    "max_packed_sequence_len": _LENGTH,
    "packing": "--batching_strategy packing|padding",
    "sample_packing": "--batching_strategy packing|padding",
    "group_by_length": "--batching_strategy padding (batches then hold sequences of similar length)",
    "eval_sample_packing": "--batching_strategy packing|padding",
    "pad_to_sequence_len": "--batching_strategy packing|padding",
    "special_tokens": _TOKENS,
    "new_special_tokens": _TOKENS,
    "additional_special_tokens": _TOKENS,
    "truncation_side": "--truncation right|left|drop|error|split",
    "pad_to_max_length": "--batching_strategy packing|padding",
    "num_workers": "--num_workers_dataloader",
    "dataloader_num_workers": "--num_workers_dataloader",
    "num_train_samples": _SLICE,
    "max_train_samples": _SLICE,
    "max_samples": _SLICE,
    "data": _DATA,
    "data_dir": _DATA,
    "dataset_name": _DATA,
    "dataset_path": _DATA,
    "train_file": _DATA,
    "datasets": _DATA,
    "train_dataset": _DATA,
    "val_size": _FRACTION,
    "val_set_size": _FRACTION,
    "template": "--chat_dataset.chat_template FILE (left out: the tokenizer's own)",
    "train_on_input": _ANSWERS_ALONE,
    "train_on_inputs": _ANSWERS_ALONE,
    "train_on_prompt": _ANSWERS_ALONE,
    "completion_only_loss": _ANSWERS_ALONE,
    "assistant_only_loss": _ANSWERS_ALONE,
    "mask_history": "--chat_dataset.learn last",
    # Model
    "model": _MODEL,
    "model_path": _MODEL,
    "model_id": _MODEL,
    "model_ckpt": _MODEL,
    "model_checkpoint": _MODEL,
    "model_name_or_path": _MODEL,
    "base_model": _MODEL,
    "checkpoint_dir": _MODEL,
    "tokenizer": "--tokenizer_name",
    "tokenizer_name_or_path": "--tokenizer_name",
    "attn_implementation": _KERNELS,
    "flash_attn": _KERNELS,
    "flash_attention": _KERNELS,
    "use_flash_attention_2": _KERNELS,
    "torch_compile": "--compile",
    "use_compile": "--compile",
    # Adapters
    "peft": _PEFT,
    "lora": _PEFT,
    "use_lora": _PEFT,
    "adapter": _PEFT,
    "finetuning_type": _PEFT,
    "qlora": f"--use_peft with {_QUANTIZATION}",
    "lora_query": f"{_TARGETS} q_proj",
    "lora_key": f"{_TARGETS} k_proj",
    "lora_value": f"{_TARGETS} v_proj",
    "lora_projection": f"{_TARGETS} o_proj",
    "lora_mlp": f"{_TARGETS} gate_proj,up_proj,down_proj",
    "lora_head": f"{_TARGETS} lm_head beside the others",
    "lora_r": "--lora_config.r",
    "lora_rank": "--lora_config.r",
    "rank": "--lora_config.r",
    "alpha": "--lora_config.lora_alpha",
    "lora_target": "--lora_config.target_modules a,b or all-linear",
    "lora_target_modules": "--lora_config.target_modules a,b or all-linear",
    "lora_target_linear": f"{_TARGETS} all-linear",
    "lora_model_dir": _TRAINED_ON,
    "adapter_name_or_path": _TRAINED_ON,
    "dropout": "--lora_config.lora_dropout",
    "dora": "--lora_config.use_dora",
    "rslora": "--lora_config.use_rslora",
    "prefix_tuning": "--peft_method prefix with --prefix_config.num_virtual_tokens",
    "prefix_length": "--prefix_config.num_virtual_tokens",
    "quantize": _QUANTIZATION,
    "load_in_4bit": _QUANTIZATION,
    "load_in_8bit": _QUANTIZATION,
    "use_4bit": _QUANTIZATION,
    "use_8bit": _QUANTIZATION,
    "bits": _QUANTIZATION,
    "quantization_bit": _QUANTIZATION,
    "quant_bits": _QUANTIZATION,
    "quantize_base": _QUANTIZATION,
    "bnb_4bit_quant_type": _QUANT_TYPE,
    "quantization_type": _QUANT_TYPE,
    "bnb_4bit_use_double_quant": _DOUBLE_QUANT,
    "double_quant": _DOUBLE_QUANT,
    "double_quantization": _DOUBLE_QUANT,
    "nested_quant": _DOUBLE_QUANT,
    "use_nested_quant": _DOUBLE_QUANT,
    "use_bnb_nested_quant": _DOUBLE_QUANT,
    "bnb_4bit_compute_dtype": _QUANT_COMPUTE,
    "bnb_compute_dtype": _QUANT_COMPUTE,
    "bnb_4bit_quant_storage": _QUANT_STORAGE,
    "bnb_4bit_quant_storage_dtype": _QUANT_STORAGE,
    "lora_dtype": "--peft_dtype fp32|bf16",
    "autocast_adapter_dtype": "--peft_dtype fp32|bf16",
    "freeze": "--freeze_layers with --num_freeze_layers",
    "mixed_precision_reduce": _REDUCTION,
    "communication_data_type": _REDUCTION,
    # Layout
    "fsdp": _SHARDING,
    "use_fsdp": _SHARDING,
    "strategy": _SHARDING,
    "deepspeed": _SHARDING,
    "gradient_as_bucket_view": "always so, under --sharding_strategy NO_SHARD too",
    "ddp": "--enable_fsdp False (several processes then replicate the model)",
    "cpu_offload": _OFFLOAD,
    "offload": _OFFLOAD,
    "offload_params": _OFFLOAD,
    "offload_optimizer": _OFFLOAD,
    "auto_wrap_policy": _UNITS,
    "fsdp_auto_wrap_policy": _UNITS,
    "fsdp_transformer_layer_cls_to_wrap": _UNITS,
    "act_ckpt": _CHECKPOINTING,
    "enable_activation_offloading": _ACTIVATIONS_ON_HOST,
    "activation_offload": _ACTIVATIONS_ON_HOST,
    "gradient_checkpointing": _CHECKPOINTING,
    "use_gradient_checkpointing": _CHECKPOINTING,
    "devices": _LAUNCHER,
    "num_gpus": _LAUNCHER,
    "num_nodes": _LAUNCHER,
    "ddp_timeout": "--step_timeout_seconds",
    "num_processes": _LAUNCHER,
    "num_machines": _LAUNCHER,
    "machine_rank": _LAUNCHER,
    "nnodes": _LAUNCHER,
    "nproc_per_node": _LAUNCHER,
    # Evaluation and results
    "do_eval": _EVALUATION,
    "eval_steps": _EVALUATION,
    "evaluation_steps": _EVALUATION,
    "eval_interval": _EVALUATION,
    "eval_strategy": _EVALUATION,
    "evaluation_strategy": _EVALUATION,
    "evals_per_epoch": _EVALUATION,
    "metric_for_best_model": _EVALUATED_BEST,
    "load_best_model_at_end": _EVALUATED_BEST,
    "logging_steps": _LOGGING,
    "log_interval": _LOGGING,
    "log_every_n_steps": _LOGGING,
    "report_to": _TRACKERS,
    "wandb": _TRACKERS,
    "wandb_project": _WANDB,
    "wandb_entity": _WANDB,
    "wandb_name": _RUN_NAME,
    "wandb_run_name": _RUN_NAME,
    "run_name": _RUN_NAME,
    "tensorboard": _TRACKERS,
    "rouge": _ROUGE,
    "predict_with_generate": _ROUGE,
    "generation_num_beams": "--num_beams, with --eval_generate",
    "generation_max_length": "--max_new_tokens, with --eval_generate",
    "enable_checkpointing": _SAVING,
    "checkpointing_steps": _SAVING,
    "save_steps": _SAVING,
    "save_strategy": _SAVING,
    "saves_per_epoch": _SAVING,
    "save_only_model": "--save_every_steps 0 with --save_every_minutes 0 (no checkpoints; the weights are saved)",
    "save_total_limit": "--keep_last",
    "out_dir": "--output_dir",
    "save_dir": "--output_dir",
    "overwrite_output_dir": "--overwrite",
    "resume_from_checkpoint": "--resume",
}
"""The flags that mean the same here, by the name that other tools use."""

NEEDLESS: dict[str, str] = {
    "stage": "given answers are learned; there is no preference or reward training",
    "do_train": "a run trains, but with --dry_run or --load_only",
    "overwrite_cache": "tokens are made anew when the data or a setting that changes them have changed",
    "dataset_prepared_path": "tokens are kept in the cache of Hugging Face's datasets (the variable HF_DATASETS_CACHE)",
    "preprocessing_num_workers": "one process of each machine tokenises, and the result is kept",
    "dataset_num_proc": "one process of each machine tokenises, and the result is kept",
    "remove_unused_columns": "columns that no one reads are named and not read",
    "use_liger_kernel": "the loss is computed in chunks, so whole logits are never held",
    "liger_fused_linear_cross_entropy": "the loss is computed in chunks, so whole logits are never held",
    "local_rank": "the launcher's variable LOCAL_RANK says it",
    "plot_loss": "`python -m tools.report RUN` draws the curves of a run",
    "push_to_hub": "nothing is uploaded; `hf upload OWNER/NAME RUN/model` does that",
    "hub_model_id": "nothing is uploaded; `hf upload OWNER/NAME RUN/model` does that",
    "export_dir": "a run's folder holds the weights; `python -m tools.export RUN --to DIR` merges adapters",
}
"""Why there is no such flag, by the name that other tools have for it."""

VALUE_HINTS: dict[str, dict[str, str]] = {
    "peft_method": {
        "none": "to train all weights, leave --use_peft and this out",
        "qlora": "here it is lora, with --quantization 4bit",
        "dora": "here it is lora, with --use_dora",
    },
    "activation_checkpointing": {"true": "here it is full", "false": "here it is off"},
    "batching_strategy": {"true": "here it is packing", "false": "here it is padding"},
    "scheduler": {"constant_with_warmup": "here it is constant, with --warmup_steps"},
    "optimizer": {"adam_8bit": "here it is AdamW8bit", "adam8bit": "here it is AdamW8bit"},
    "sharding_strategy": {"ddp": "here it is --enable_fsdp False", "deepspeed": "here it is FULL_SHARD"},
}
"""What means the same here, by setting and by the value, in lower case, that other tools have for it."""
