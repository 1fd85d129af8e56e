"""Settings of the model: its files and kernels, layout and precision, loss, adapters and frozen layers."""

from dataclasses import MISSING, dataclass
from typing import Literal

from configs.setting import setting


@dataclass(frozen=True)
class ModelSettings:
    """The model, its layout and what of it is trained."""

    # Model
    model_name: str = setting(MISSING, "model to fine-tune: a folder, or a name on the Hugging Face hub", is_path=True)
    task: str | None = setting(
        None,
        "kind of model: causal_lm, seq2seq_lm (an encoder-decoder like BART and T5), image_text, "
        "preference, text_classification or reward_model (docs/tasks.md)",
        default_text="the kind that its config.json names",
    )
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = setting(
        None,
        "kind of the labels of --task text_classification: one class of each text, several classes, or a number",
        default_text="several for lists, a number if some have fractions, else one class",
    )
    class_weights: tuple[str, ...] = setting(
        (),
        "weights of classes in the loss: balanced (each class counts alike), or CLASS=WEIGHT,...; others have 1 "
        "(text_classification)",
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
    rope_scaling: Literal["yarn", "linear", "llama3"] | None = setting(
        None,
        "stretch the model's rotary positions, so that rows may be longer than it was made for: of long wavelengths "
        "alone (yarn, llama3), or all alike (linear); config.json of model/ says so, too",
        default_text="as its config.json says",
    )
    rope_factor: float | None = setting(
        None,
        "how many times its own positions the model gets (rope_scaling)",
        exclusive_minimum=1,
        default_text="the smallest whole number that --context_length needs",
    )
    rope_original_positions: int | None = setting(
        None,
        "positions that the model was made with, if config.json says more, as of Qwen3 (rope_scaling yarn or llama3)",
        unit="tokens",
        minimum=1,
        default_text="those of its config.json",
    )
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
    activation_offloading: Literal["auto"] | bool = setting(
        False,
        "keep in host memory what layers save for the backward pass: of all layers (True), or of as few as the GPU's "
        "memory needs (auto); of a layer with activation_checkpointing full or selective that is its input",
        bare="True",
    )
    num_offloaded_layers: int | None = setting(
        None,
        "the first layers, whose activations are kept in host memory (activation_offloading True)",
        unit="layers",
        minimum=1,
        default_text="all but the last one",
    )
    tile_tokens: int | Literal["auto"] | None = setting(
        None,
        "tokens of which a layer's MLP holds the inner values at a time; it computes them again in the backward pass "
        "(docs/long-rows.md); 0: those of the whole batch",
        unit="tokens",
        minimum=0,
        stands_for="auto",
        default_text="auto: the largest with which the run fits its GPU, and 0 if it fits without",
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
    loss_type: Literal["cross_entropy", "dft", "dpo", "simpo", "orpo"] = setting(
        "cross_entropy",
        "loss of a label token: its cross-entropy, or that times the token's own probability (dft, arXiv 2508.05629), "
        "so that unlikely tokens count less; evaluation uses cross-entropy; or loss of a pair of answers, of which one "
        "is preferred (dpo, simpo, orpo; docs/preferences.md)",
    )
    label_smoothing: float = setting(
        0.0,
        "spread this share of each target evenly over the vocabulary; evaluation uses plain targets",
        minimum=0,
        exclusive_maximum=1,
    )
    teacher_weight: float = setting(
        0.5,
        "share of the loss that is the divergence from a teacher, if rows have teacher_ids and teacher_logprobs "
        "(tools.teacher_logprobs); the rest is that of loss_type; 0: the teacher is ignored",
        minimum=0,
        maximum=1,
    )
    neftune_noise_alpha: float = setting(
        0.0,
        "add noise to embeddings in training: up to this / sqrt(a sequence's tokens x the embedding's size), often 5 "
        "(NEFTune, arXiv 2310.05914); 0: none",
        minimum=0,
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
    cache_vision_features: bool = setting(
        False,
        "compute what the frozen vision encoder makes of each image once, before the first step, and keep it on disk "
        "(HF_DATASETS_CACHE); for conversations (image_text)",
    )
    freeze_qformer: bool = setting(False, "freeze the Q-Former and its queries (BLIP-2)")
    freeze_language_model: bool = setting(False, "freeze the language model with its embeddings and head (image_text)")
