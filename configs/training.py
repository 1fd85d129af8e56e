"""Settings of the training: model, data, batches, schedule, evaluation and results."""

import math
from dataclasses import MISSING, dataclass
from typing import Literal

from configs.datasets import FORMATS
from configs.setting import setting

DEFAULT_CONTEXT_LENGTH = 4096
DEFAULT_SOURCE_LENGTH = 1024
DEFAULT_TARGET_LENGTH = 128
DEFAULT_KEEP_LAST = 2


@dataclass(frozen=True)
class TrainConfig:
    """The model, the batches, the schedule and where the results go."""

    # Model
    model_name: str = setting(MISSING, "model to fine-tune: a folder, or a name on the Hugging Face hub", is_path=True)
    task: str | None = setting(
        None,
        "kind of model: causal_lm, seq2seq_lm (an encoder-decoder like BART and T5) or image_text (docs/tasks.md)",
        default_text="the kind that its config.json names",
    )
    tokenizer_name: str | None = setting(
        None, "tokenizer folder or hub name", default_text="the model's own tokenizer", is_path=True
    )
    add_special_tokens: tuple[str, ...] = setting(
        (),
        "tokens to add to the tokenizer, like '<|im_start|>,<|im_end|>'; embeddings grow; LoRA trains their rows, too",
    )
    template_date: str | None = setting(
        None,
        "the day that a chat template which writes today's date takes for today, as in 2026-11-26",
        default_text="the day on which the run first starts",
    )
    random_weights: bool = setting(
        False, "build the model from its config.json alone, with random weights: for benchmarks and tests"
    )
    allow_unused_weights: bool = setting(
        False, "train although the files hold weights that the model has no place for, such as those of more layers"
    )
    trust_remote_code: bool = setting(False, "allow Python code that comes with the model to run")
    use_fast_kernels: bool | None = setting(
        None,
        "require fused attention kernels; False: give packed rows a dense mask instead of variable-length flash "
        "attention",
        stands_for=False,
        default_text="fused kernels if the model has them",
    )
    compile: bool | None = setting(
        None,
        "compile each decoder layer with torch.compile",
        stands_for="auto",
        default_text="auto: on GPUs, if every kind of layer passes a trial before the first step",
    )
    activation_checkpointing: Literal["off", "full", "selective", "auto"] | None = setting(
        None,
        "recompute activations in the backward pass instead of keeping them: those of whole layers (full), or all but "
        "the outputs of attention and of every second matrix product (selective), or in as few layers as the GPU's "
        "memory needs (auto)",
        default_text="auto on GPUs, off on a CPU; if fsdp_activation_checkpointing is given, as that says",
    )
    spare_layers: bool = setting(
        True,
        "do not recompute the last layers if keeping their activations does not raise the peak "
        "(activation_checkpointing full, or auto if nothing less fits); False: recompute every layer",
    )
    activation_offloading: bool = setting(
        False,
        "keep in host memory what layers save for the backward pass; with activation_checkpointing full that is each "
        "layer's input",
    )
    loss_chunk_size: int = setting(
        1024, "tokens whose logits are computed at a time; 0: those of the whole batch", unit="tokens", minimum=0
    )

    # Layout and precision
    enable_fsdp: bool = setting(False, "shard the model, gradients and optimizer states over the ranks")
    low_cpu_fsdp: bool | None = setting(
        None,
        "load the model without the whole of it in any rank's host memory; every run does so, with or without this",
        stands_for=False,
        default_text="always so",
    )
    one_gpu: bool = setting(False, "require a single process; refuse a larger world size")
    mixed_precision: bool | None = setting(
        None,
        "compute in half precision and keep fp32 master weights; False: all in fp32",
        stands_for=True,
        default_text="bf16 on GPUs that have it, fp16 on other GPUs, fp32 on a CPU",
    )
    use_fp16: bool | None = setting(
        None,
        "compute in fp16 with a loss scale instead of bf16; False: in fp32 on GPUs without bf16",
        stands_for=False,
        default_text="only on GPUs without bf16",
    )

    float8: Literal["tensorwise", "rowwise"] | None = setting(
        None,
        "compute linear layers in float8, with one scale per tensor (tensorwise) or one per row (rowwise, nearer to "
        "bf16); under LoRA the frozen weights are also stored so",
    )

    # Loss
    label_smoothing: float = setting(
        0.0,
        "spread this share of each target evenly over the vocabulary; evaluation uses plain targets",
        minimum=0,
        exclusive_maximum=1,
    )
    router_aux_loss_coef: float | None = setting(
        None,
        "weight of the loss that evens out the experts of a mixture; 0: cross-entropy alone",
        minimum=0,
        default_text="that of config.json if it says output_router_logits, else 0",
    )

    # Adapters and frozen layers
    use_peft: bool = setting(False, "train an adapter and freeze the model's own weights")
    peft_method: Literal["lora", "llama_adapter", "prefix"] = setting(
        "lora",
        "kind of adapter: low-rank matrices next to linear layers (lora), gated prompts in the upper layers "
        "(llama_adapter), or trained keys and values before each row (prefix)",
    )
    peft_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", "dtype of adapters and their optimizer states; bf16 only if the model computes in bf16"
    )
    from_peft_checkpoint: str = setting(
        "", "folder of an adapter to continue training; empty: a new adapter", is_path=True
    )
    freeze_layers: bool = setting(
        False,
        "freeze the first num_freeze_layers decoder layers (and encoder layers, if there are any) and their adapters; "
        "this does not affect embeddings, later layers, the final norm and the head",
    )
    num_freeze_layers: int = setting(1, "layers to freeze (freeze_layers)", unit="layers", minimum=1)

    freeze_vision: bool = setting(False, "freeze the vision encoder (image_text)")
    freeze_qformer: bool = setting(False, "freeze the Q-Former and its queries (BLIP-2)")
    freeze_language_model: bool = setting(False, "freeze the language model with its embeddings and head (image_text)")

    # Data
    dataset: str = setting(
        "samsum_dataset",
        f"training data: {', '.join(f'{name}_dataset' for name in FORMATS)}, custom_dataset, or FILE.py:FUNCTION in "
        "short; several as a,b",
    )
    dataset_weights: tuple[float, ...] = setting(
        (),
        "share of the examples for each dataset of --dataset, or for each of several files in the data_path of one; "
        "empty: all examples once per epoch",
        exclusive_minimum=0,
    )
    shuffle_buffer_size: int = setting(
        10_000, "examples of a stream kept in host memory to shuffle (streaming)", unit="examples", minimum=1
    )
    split_slice: str | None = setting(
        None, "use only the start of both splits: a percentage (1%) or a number (10)", unit="% or examples"
    )
    batching_strategy: Literal["packing", "padding"] = setting(
        "packing", "fill each row of context_length with several sequences, or pad one sequence per row"
    )
    context_length: int | None = setting(
        None,
        "length of the longest row; longer sequences are cut off (see truncation)",
        unit="tokens",
        minimum=8,
        stands_for=DEFAULT_CONTEXT_LENGTH,
        default_text=f"{DEFAULT_CONTEXT_LENGTH}, or less if the model has fewer positions",
    )
    max_source_length: int | None = setting(
        None,
        "length of the longest source of an encoder-decoder",
        unit="tokens",
        minimum=8,
        stands_for=DEFAULT_SOURCE_LENGTH,
        default_text=f"{DEFAULT_SOURCE_LENGTH}, or less if the model has fewer positions",
    )
    max_target_length: int | None = setting(
        None,
        "length of the longest target of an encoder-decoder",
        unit="tokens",
        minimum=2,
        stands_for=DEFAULT_TARGET_LENGTH,
        default_text=f"{DEFAULT_TARGET_LENGTH}, or less if the model has fewer positions",
    )
    source_prefix: str = setting(
        "", "text before every source of an encoder-decoder, such as 'summarize: ' for T5 (its task prefix)"
    )
    truncation: Literal["right", "left", "drop", "error", "split"] | None = setting(
        None,
        "what to do with a sequence longer than context_length (a source or target longer than its own limit): keep "
        "its first tokens (right) or its last (left), skip it (drop), end the run (error), or make several of it "
        "(split)",
        stands_for="right",
        default_text="split for text_dataset, right for others",
    )
    max_text_length: int = setting(
        50, "longest caption, its end token counted; the rest is cut off (caption_dataset)", unit="tokens", minimum=2
    )
    pad_to_multiple_of: int = setting(
        8,
        "pad the width of a batch to a multiple of this, but never beyond context_length; 16 under float8",
        unit="tokens",
        minimum=1,
    )
    show_sample: bool = setting(
        True, "print the first training example, its label tokens marked, and keep it in run.yaml; False: do neither"
    )
    num_workers_dataloader: int = setting(
        1, "data loading processes per rank; 0: load in the training process", unit="processes", minimum=0
    )

    # Batches
    batch_size_training: int = setting(4, "rows per rank per micro-batch", unit="rows", minimum=1)
    gradient_accumulation_steps: int = setting(1, "micro-batches per optimizer step", unit="micro-batches", minimum=1)
    global_batch_size: int | None = setting(
        None,
        "rows per optimizer step over all ranks; sets gradient_accumulation_steps",
        unit="rows",
        minimum=1,
    )

    min_steps: int = setting(
        0,
        "at least so many optimizer steps in the run: if the data makes fewer, a step takes fewer rows and then, when "
        "they are packed, shorter ones, until one sample per rank is left; 0: batches are as large as the flags say",
        unit="steps",
        minimum=0,
    )

    # Length and schedule
    num_epochs: int = setting(3, "passes over the training data", unit="epochs", minimum=1)
    limit_train_batches: int = setting(
        0,
        "end each epoch after so many micro-batches of each rank; epochs differ in their rows; 0: no limit",
        unit="micro-batches",
        minimum=0,
    )
    max_train_step: int = setting(0, "end after so many optimizer steps; 0: no limit", unit="steps", minimum=0)
    lr: float = setting(1e-4, "peak learning rate", exclusive_minimum=0)
    lr_scale_with_world_size: Literal["none", "linear", "sqrt"] = setting(
        "none",
        "multiply lr by the number of ranks (linear), or by its square root (sqrt); a resumed run keeps the number it "
        "started with",
    )
    scheduler: Literal["step", "cosine", "linear", "constant"] = setting(
        "step",
        "how the learning rate falls: by gamma after each epoch (step), to min_lr at the last step (cosine, linear), "
        "or not at all (constant)",
    )
    min_lr: float = setting(
        0.0, "the learning rate never falls below this after warm-up (step, cosine, linear)", minimum=0
    )
    gamma: float = setting(
        0.85, "multiply the learning rate by this after each epoch (scheduler step)", exclusive_minimum=0, maximum=1
    )
    warmup_steps: int = setting(0, "optimizer steps over which the learning rate rises from 0", unit="steps", minimum=0)
    warmup_ratio: float = setting(
        0.0,
        "warmup_steps as a share of all optimizer steps of the run, rounded up",
        minimum=0,
        exclusive_maximum=1,
    )
    weight_decay: float = setting(0.0, "weight decay of the optimizer", minimum=0)
    decay_norms_and_biases: bool = setting(
        True, "apply weight_decay to parameters of one dimension too: biases and the weights of norms"
    )
    adam_beta1: float = setting(
        0.9, "decay of the averaged gradients of AdamW and its variants", minimum=0, exclusive_maximum=1
    )
    adam_beta2: float = setting(
        0.999, "decay of the averaged squared gradients of AdamW and its variants", minimum=0, exclusive_maximum=1
    )
    momentum: float | None = setting(
        None, "momentum of SGD", minimum=0, exclusive_maximum=1, default_text="0.9 with --optimizer SGD"
    )
    gradient_clipping: bool = setting(False, "scale gradients down if their norm is above gradient_clipping_threshold")
    gradient_clipping_threshold: float = setting(
        1.0, "largest norm of all gradients together (gradient_clipping)", exclusive_minimum=0
    )
    seed: int = setting(42, "seed of every random choice", minimum=0, maximum=2**32 - 1)
    deterministic: bool = setting(False, "give the same bits in every run on the same devices; some kernels are slower")
    step_timeout_seconds: int | None = setting(
        None,
        "end the run if a rank makes no progress for so long in a step after the first; 0: an hour, as outside of "
        "steps",
        default_text="300, or 3 x the longest step so far if that is more",
        unit="seconds",
        minimum=0,
        maximum=3600,
    )
    timeout_seconds: int | None = setting(
        None, "short for step_timeout_seconds", unit="seconds", minimum=0, maximum=3600
    )

    # Evaluation
    run_validation: bool | None = setting(
        None, "evaluate at the end of each epoch", stands_for=True, default_text="True if there is validation data"
    )
    val_batch_size: int = setting(1, "rows per rank per evaluation batch", unit="rows", minimum=1)
    max_eval_step: int = setting(0, "end an evaluation after so many batches; 0: no limit", unit="batches", minimum=0)
    eval_every_steps: int = setting(
        0, "also evaluate every so many optimizer steps; 0: only at the end of each epoch", unit="steps", minimum=0
    )
    evals_per_epoch: int = setting(
        0,
        "eval_every_steps as a number of evaluations in an epoch, its end counted; 0: as eval_every_steps says",
        unit="evaluations",
        minimum=0,
    )
    eval_before_training: bool = setting(False, "evaluate once before the first step")
    early_stopping_patience: int = setting(
        0,
        "end the run after so many evaluations in a row that are not the best (best_metric); 0: take all its steps",
        unit="evaluations",
        minimum=0,
    )
    stop_on_divergence: bool = setting(
        False,
        "end the run, with a checkpoint and as failed, if the mean loss of the last 20 steps is over 1.5 times that of "
        "its first 20; without this, a line says so",
    )
    eval_generate: bool = setting(
        False, "also let the model answer the validation prompts at each evaluation, and compute the answers' ROUGE"
    )
    num_beams: int = setting(1, "beams of the beam search (eval_generate); 1: greedy", unit="beams", minimum=1)
    max_new_tokens: int = setting(
        128, "longest answer that is generated (eval_generate)", unit="tokens", minimum=1, maximum=10**6
    )
    max_generate_samples: int = setting(
        0,
        "generate for so many of the evaluated samples, evenly spaced over the set (eval_generate); 0: for all",
        unit="samples",
        minimum=0,
    )
    best_metric: str = setting(
        "eval_loss",
        "metric by which an evaluation is the best, whose weights are saved: eval_loss, the lowest, or of ROUGE "
        "rouge1, rouge2 or rougeL, the highest (eval_generate)",
    )

    # Results
    output_dir: str | None = setting(
        None, "folder for the run's results", default_text="outputs/MODEL-DATASET-TIME", is_path=True
    )
    overwrite: bool = setting(False, "replace an earlier run in output_dir")
    resume: Literal[False] | str | None = setting(
        None,
        "continue an earlier run: auto (from the newest checkpoint in output_dir, if there is one), the path of a run "
        "or a checkpoint, or False",
        bare="auto",
        stands_for=False,
        default_text="False, but auto if torchrun or Slurm restarted the job",
        is_path=True,
    )
    resume_anyway: bool = setting(False, "resume even if settings that change the result have changed")
    save_every_steps: int | None = setting(
        None,
        "write a checkpoint every so many optimizer steps; 0: never",
        default_text="at the end of each epoch",
        unit="steps",
        minimum=0,
    )
    save_every_minutes: float = setting(
        30.0, "also write a checkpoint if the last one is older than this; 0: never", unit="minutes", minimum=0
    )
    keep_last: int | None = setting(
        None,
        "newest checkpoints to keep",
        unit="checkpoints",
        minimum=1,
        stands_for=DEFAULT_KEEP_LAST,
        default_text=f"{DEFAULT_KEEP_LAST}, or fewer if the disk is too full",
    )
    keep_best: bool = setting(
        False, "write a checkpoint after each evaluation that is the best so far, and keep the newest of them"
    )
    async_save: bool | None = setting(
        None,
        "write checkpoints while training goes on, from a copy in host memory",
        stands_for="auto",
        default_text="auto: on GPUs, if host memory has room",
    )
    save_model: bool = setting(True, "save the weights, or the adapter, in Hugging Face format")
    save_dtype: Literal["base", "fp32", "bf16", "fp16"] = setting(
        "base",
        "dtype of the weights in output_dir/model: that of the base's config.json if it is smaller than that of "
        "training (base), or this one; checkpoints and adapters keep that of training",
    )
    dist_checkpoint_root_folder: str | None = setting(
        None,
        "folder for checkpoints instead of output_dir/checkpoints, and for a copy of the final model",
        default_text="output_dir/checkpoints, and no copy",
        is_path=True,
    )
    dist_checkpoint_folder: str = setting(
        "fine-tuned",
        "subfolder of dist_checkpoint_root_folder for this run; the model's name is added: fine-tuned-MODEL",
        is_path=True,
    )
    save_optimizer: bool = setting(
        False, "save the optimizer states with the copy of the final model (checkpoints always hold them)"
    )

    @property
    def datasets(self) -> tuple[str, ...]:
        """The dataset names in `dataset`."""
        return tuple(name.strip() for name in self.dataset.split(","))

    def warmup_of(self, num_steps: int) -> int:
        """Optimizer steps of warm-up in a run of so many; a ratio is rounded up, as in transformers."""
        return math.ceil(self.warmup_ratio * num_steps) if self.warmup_ratio else self.warmup_steps

    def eval_every(self, steps_per_epoch: int) -> int:
        """Optimizer steps from one evaluation to the next; 0: only at the end of each epoch."""
        return math.ceil(steps_per_epoch / self.evals_per_epoch) if self.evals_per_epoch else self.eval_every_steps
