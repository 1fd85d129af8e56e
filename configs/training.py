"""What is trained, on what, and for how long."""

from dataclasses import MISSING, dataclass
from typing import Literal

from configs.setting import setting

DEFAULT_CONTEXT_LENGTH = 4096
DEFAULT_KEEP_LAST = 2


@dataclass(frozen=True)
class TrainConfig:
    """The model, the batches, the schedule and where the results go."""

    # Model
    model_name: str = setting(MISSING, "model to fine-tune: a folder, or a name on the Hugging Face hub")
    tokenizer_name: str | None = setting(None, "tokenizer folder or hub name; unset: the model's own")
    random_weights: bool = setting(False, "build the model from its config.json alone: for benchmarks and tests")
    trust_remote_code: bool = setting(False, "let code that was downloaded with the model run")
    use_fast_kernels: bool | None = setting(
        None,
        "insist on fused attention kernels; unset: use them if the model has them; False: packed rows get a dense "
        "mask, no variable-length flash attention",
        unset=False,
    )
    compile: bool = setting(False, "compile each decoder layer with torch.compile")
    activation_checkpointing: Literal["off", "full", "selective", "auto"] | None = setting(
        None,
        "recompute activations in the backward pass instead of keeping them: all of a layer (full), or all but what "
        "attention and every second matrix product gave (selective); unset: as fsdp_activation_checkpointing says "
        "under --enable_fsdp, else off",
        later="use off, selective or full",
        later_values=("auto",),
    )
    loss_chunk_size: int = setting(
        1024, "tokens whose logits exist at a time; 0: those of the whole batch at once", unit="tokens", minimum=0
    )

    # Layout and precision
    enable_fsdp: bool = setting(False, "shard model, gradients and optimizer over the ranks")
    low_cpu_fsdp: bool = setting(
        False,
        "let no rank hold the whole model in host memory when it is loaded; every layout does so, with and without it",
    )
    one_gpu: bool = setting(False, "insist on one process; a larger world size is refused")
    mixed_precision: bool | None = setting(
        None,
        "compute in half precision on fp32 master weights; unset: not on a CPU; False: all in fp32",
        unset=True,
    )
    use_fp16: bool | None = setting(
        None,
        "use fp16, with a loss scale, as the half precision; unset: on cards without bf16; False: fp32 on those",
        unset=False,
    )

    # Adapters and frozen layers
    use_peft: bool = setting(False, "train an adapter and leave the model's own weights as they are")
    peft_method: Literal["lora", "llama_adapter", "prefix"] = setting(
        "lora",
        "kind of adapter: low-rank factors beside linear layers, gated prompts in the upper layers, or a prefix of "
        "trained keys and values",
    )
    peft_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", "store and train adapters in this, and their optimizer states; bf16 where the model computes in bf16"
    )
    from_peft_checkpoint: str = setting("", "adapter folder to train on from; empty: a new adapter")
    freeze_layers: bool = setting(
        False,
        "leave the first num_freeze_layers decoder layers as they are, their adapters included; embeddings, later "
        "layers, last norm and head train as without it",
    )
    num_freeze_layers: int = setting(1, "decoder layers to freeze (freeze_layers)", unit="layers", minimum=1)

    # Data
    dataset: str = setting(
        "samsum_dataset",
        "samsum_dataset, alpaca_dataset, grammar_dataset, chat_dataset, instruction_dataset, text_dataset, "
        "custom_dataset, or in short FILE.py:FUNCTION; several as a,b",
    )
    dataset_weights: tuple[float, ...] = setting(
        (),
        "shares of the samples, one for each dataset of --dataset; empty: every sample of all once per epoch",
        exclusive_minimum=0,
    )
    shuffle_buffer_size: int = setting(
        10_000, "samples of a streamed dataset held in host memory to draw from (streaming)", unit="samples", minimum=1
    )
    split_slice: str | None = setting(
        None, "use only the start of both splits: a percentage (1%) or a number of samples (10)", unit="% or samples"
    )
    batching_strategy: Literal["packing", "padding"] = setting(
        "packing", "fill rows of context_length with several samples, or pad one sample per row"
    )
    context_length: int | None = setting(
        None,
        "longest row; unset: at most the positions that the model has; for longer samples see truncation",
        unit="tokens",
        minimum=8,
        unset=DEFAULT_CONTEXT_LENGTH,
    )
    truncation: Literal["right", "left", "drop", "error"] = setting(
        "right",
        "what becomes of a sample longer than context_length: keep its first tokens (right), its last (left), leave "
        "it out (drop), or end the run (error)",
    )
    pad_to_multiple_of: int = setting(
        8,
        "round the width of a batch up to a multiple of so many tokens, though never above context_length",
        unit="tokens",
        minimum=1,
    )
    show_sample: bool = setting(True, "print the first training sample, what is learned of it marked")
    num_workers_dataloader: int = setting(1, "data loading processes per rank; 0: none", unit="processes", minimum=0)

    # Batches
    batch_size_training: int = setting(4, "rows per rank per micro-batch", unit="rows", minimum=1)
    gradient_accumulation_steps: int = setting(1, "micro-batches per optimizer step", unit="micro-batches", minimum=1)
    global_batch_size: int | None = setting(
        None, "rows per optimizer step over all ranks; sets the accumulation instead", unit="rows", minimum=1
    )

    # Length and schedule
    num_epochs: int = setting(3, "passes over the training data", unit="epochs", minimum=1)
    max_train_step: int = setting(0, "end after so many optimizer steps; 0: no limit", unit="steps", minimum=0)
    lr: float = setting(1e-4, "learning rate at its highest", exclusive_minimum=0)
    scheduler: Literal["step", "cosine", "linear", "constant"] = setting(
        "step", "how lr falls: by gamma after each epoch, or towards 0 at the last step, or not at all"
    )
    gamma: float = setting(0.85, "factor on lr after each epoch (scheduler step)", exclusive_minimum=0, maximum=1)
    warmup_steps: int = setting(0, "optimizer steps over which lr rises from 0", unit="steps", minimum=0)
    weight_decay: float = setting(0.0, "weight decay of the optimizer", minimum=0)
    decay_norms_and_biases: bool = setting(
        True, "let weight_decay hold for parameters of one dimension too: the weights of norms, and biases"
    )
    momentum: float | None = setting(
        None, "momentum of SGD; unset: 0.9 with --optimizer SGD", minimum=0, exclusive_maximum=1
    )
    gradient_clipping: bool = setting(False, "scale gradients down where their norm is above the threshold")
    gradient_clipping_threshold: float = setting(
        1.0, "largest global gradient norm (gradient_clipping)", exclusive_minimum=0
    )
    seed: int = setting(42, "seed of every random choice", minimum=0, maximum=2**32 - 1)
    deterministic: bool = setting(
        False, "have the same run give the same bits on the same devices, with slower kernels where that needs them"
    )
    step_timeout_seconds: int | None = setting(
        None,
        "end the run where a rank stands still for so long in a step after the first; 0: for an hour, as anywhere "
        "else; unset: for 300 s, or 3 x the longest step so far",
        unit="seconds",
        minimum=0,
        maximum=3600,
    )

    # Evaluation
    run_validation: bool | None = setting(
        None, "evaluate at the end of each epoch; unset: if there is validation data", unset=True
    )
    val_batch_size: int = setting(1, "rows per rank per evaluation batch", unit="rows", minimum=1)
    max_eval_step: int = setting(0, "end an evaluation after so many batches; 0: no limit", unit="batches", minimum=0)
    eval_every_steps: int = setting(
        0, "evaluate every so many optimizer steps too; 0: only at each epoch's end", unit="steps", minimum=0
    )
    eval_before_training: bool = setting(False, "evaluate once before the first step")

    # Results
    output_dir: str | None = setting(None, "folder of this run; unset: outputs/MODEL-DATASET-TIME")
    overwrite: bool = setting(False, "let the run replace an earlier one in output_dir")
    resume: Literal[False] | str | None = setting(
        None,
        "continue an earlier run: auto (from the newest checkpoint in output_dir, if there is one), the path of a run "
        "or a checkpoint, or False; unset: auto if torchrun or Slurm restarted the job",
        bare="auto",
        unset=False,
    )
    resume_anyway: bool = setting(False, "resume though settings have changed that change the result")
    save_every_steps: int | None = setting(
        None, "write a checkpoint every so many optimizer steps; 0: never; unset: at each epoch's end", minimum=0
    )
    save_every_minutes: float = setting(
        30.0, "write a checkpoint when the last one is so old, too; 0: never", unit="minutes", minimum=0
    )
    keep_last: int | None = setting(
        None,
        "newest checkpoints to keep; unset: fewer if the disk is too full",
        unit="checkpoints",
        minimum=1,
        unset=DEFAULT_KEEP_LAST,
    )
    keep_best: bool = setting(False, "write a checkpoint at every best evaluation so far, and keep the last such one")
    async_save: bool | None = setting(
        None,
        "write checkpoints beside training, from a copy in host memory; auto: on GPUs, if host memory has room",
        unset="auto",
    )
    save_model: bool = setting(True, "save the weights, or the adapter, in Hugging Face format")
    dist_checkpoint_root_folder: str | None = setting(
        None,
        "where checkpoints go instead of output_dir/checkpoints, and a copy of the final model; unset: no copy",
    )
    dist_checkpoint_folder: str = setting("fine-tuned", "name of that folder below dist_checkpoint_root_folder")
    save_optimizer: bool = setting(False, "put the optimizer's state into that copy (checkpoints always hold it)")

    @property
    def datasets(self) -> tuple[str, ...]:
        """The names in `dataset`."""
        return tuple(name.strip() for name in self.dataset.split(","))
