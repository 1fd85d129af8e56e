"""torchtune's configs (recipes/configs of its repository): nested, with a `_component_` in most groups."""

from __future__ import annotations

import re
from typing import Any

from tools.translate import steps, values
from tools.translate.data import is_hub_name, local_path, read_split, shown
from tools.translate.layer_names import layers_of
from tools.translate.layouts import OFFLOAD, copies, shards
from tools.translate.source import Tree
from tools.translate.translation import DatasetPart, Options, Tool, Translation, by_name
from utils.errors import ConfigError

_ALPACA = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
_PLACES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "output_proj": "projection"}
_OPTIMIZERS = {"PagedAdamW": "paged_adamw_32bit", "Adam": "AdamW"}
_LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")
_SHARDED = ("custom_sharded_layers", "fsdp_cpu_offload", "fsdp_reshard_after_forward", "data_parallel_shard_dim")
_OF_MODEL = "the model's folder holds it"


def _component(value: Any) -> str:
    found = value.get("_component_") if isinstance(value, dict) else None
    return found.rpartition(".")[2] if isinstance(found, str) else ""


def _is_adapter(tree: Tree) -> bool:
    return "lora" in _component(tree.get("model")) or "dora" in _component(tree.get("model"))


def _model(translation: Translation, key: str) -> None:
    """The builder's name says what is trained. The weights are those of the checkpointer."""
    group, name = translation.mapping(key), _component(translation.value(key))
    if "vision" in name or "clip" in name:
        translation.refuse(key, f"{name} reads images in a way that no run here trains")
    component = f"{key}._component_"
    if "lora" not in name and "dora" not in name:
        return translation.needless(component, "the model's config.json says what it is")
    translation.set(component, "use_peft", "True")
    if name.startswith("qlora"):
        translation.set(component, "quantization", "4bit")
    if "quantize_base" in group:
        values.if_on("quantization", "4bit")(translation, f"{key}.quantize_base")
    layers: list[str] = []
    keys = []
    for place in translation.names(f"{key}.lora_attn_modules"):
        if place not in _PLACES:
            translation.refuse(f"{key}.lora_attn_modules", f"{place} is no layer of attention")
        layers += layers_of(name, _PLACES[place])
    keys.append("lora_attn_modules")
    for switch, place in (("apply_lora_to_mlp", "mlp"), ("apply_lora_to_output", "head")):
        if switch in group and translation.switch(f"{key}.{switch}"):
            layers += layers_of(name, place)
            keys.append(switch)
        elif switch in group:
            translation.needless(f"{key}.{switch}", "these layers are not among --lora_config.target_modules")
    for one in keys:
        if one in group:
            translation.set(f"{key}.{one}", "lora_config.target_modules", list(dict.fromkeys(layers)))
    return None


def _checkpoint_dir(translation: Translation, key: str) -> None:
    translation.set(key, "model_name", (translation.text(key) or "").rstrip("/"))


def _dataset(translation: Translation, key: str) -> None:
    """The dataset's builder is its format."""
    name = _component(translation.value(key))
    options: Options = {}
    source = translation.text(f"{key}.source") or _ALPACA.get(name)
    place = f"{key}.source" if translation.value(f"{key}.source") else f"{key}._component_"
    _split(translation, key, options)
    learns = translation.switch(f"{key}.train_on_input")
    if name in _ALPACA:
        dataset = "alpaca_dataset"
        where = f"{key}.train_on_input" if learns is not None else f"{key}._component_"
        options["mask_prompt"] = (where, str(learns is False))
    elif name in ("chat_dataset", "slimorca_dataset"):
        dataset = "chat_dataset"
        if column := translation.text(f"{key}.conversation_column"):
            options["messages_column"] = (f"{key}.conversation_column", column)
        translation.needless(f"{key}.conversation_style", "turns are read in both forms")
    elif name == "instruct_dataset":
        dataset = "instruction_dataset"
        for theirs, ours in (("input", "prompt_column"), ("output", "completion_column")):
            if column := translation.text(f"{key}.column_map.{theirs}"):
                options[ours] = (f"{key}.column_map.{theirs}", column)
    elif name == "text_completion_dataset":
        dataset = "text_dataset"
        if column := translation.text(f"{key}.column"):
            options["text_column"] = (f"{key}.column", column)
    elif name in ("samsum_dataset", "grammar_dataset"):
        dataset = name
        source = source or {"samsum_dataset": "knkarthick/samsum", "grammar_dataset": "liweili/c4_200m"}[name]
    else:
        translation.refuse(
            key, f"{name} is no format here; write the rows as chats, prompts or text (docs/datasets.md)"
        )
    if files := translation.names(f"{key}.data_files"):
        found = [local_path(translation.source, file) for file in files]
        source = ",".join(file if path is None else shown(path) for file, path in zip(files, found, strict=True))
        translation.needless(f"{key}.source", "data_files says the files")
        place = f"{key}.data_files"
    if source is None:
        translation.refuse(key, "a dataset without source; give it one")
    if not is_hub_name(source) and (local := local_path(translation.source, source)) is not None:
        source = shown(local)
    if translation.value(f"{key}.packed") is not None:
        values.packed(translation, f"{key}.packed")
    if place != f"{key}._component_":
        translation.needless(f"{key}._component_", f"it is --dataset {dataset}")
    translation.add(DatasetPart(place, dataset, source, options))


def _split(translation: Translation, key: str, options: Options) -> None:
    """`train[:95%]`: the rest is for validation, if `dataset_val` has it."""
    split = translation.text(f"{key}.split")
    if split is None:
        return
    found = re.fullmatch(r"train\[:(\d+)%\]", split)
    if found is not None and translation.text("dataset_val.split") == f"train[{found[1]}%:]":
        translation.fraction = (f"{key}.split", f"{(100 - int(found[1])) / 100:g}")
        translation.claim(f"{key}.split")
    else:
        read_split(translation, f"{key}.split", options)


def _validation(translation: Translation, key: str) -> None:
    if translation.fraction is not None:
        translation.needless(key, f"--NAME.validation_fraction {translation.fraction[1]} holds these rows out")
    else:
        translation.missing(
            key, "validation data stands with training data, in a folder, or as a split (--NAME.test_split)"
        )


def _optimizer(translation: Translation, key: str) -> None:
    translation.mapping(key)
    name = _component(translation.value(key))
    component = f"{key}._component_"
    steps.optimizer_named(translation, component, _OPTIMIZERS.get(name, name))
    if f"{key}.weight_decay" not in translation.source.lines:
        translation.default("weight_decay", "0.01")  # of torch and bitsandbytes


def _schedule(translation: Translation, key: str) -> None:
    name = _component(translation.value(key))
    if "cosine" in name:
        translation.set(f"{key}._component_", "scheduler", "cosine")
    else:
        translation.missing(f"{key}._component_", f"{name}: {steps.CANNOT}")
        translation.default("scheduler", "cosine")


def _loss(translation: Translation, key: str) -> None:
    name = _component(translation.value(key))
    if name not in _LOSSES:
        translation.refuse(key, f"{name} is no loss here; a run learns the tokens of given answers by cross-entropy")
    translation.needless(key, "it is the loss here, in chunks")


def _dtype(translation: Translation, key: str) -> None:
    if translation.text(key) == "bf16":
        translation.set(key, "pure_bf16", "True")
        if translation.trains_adapter:
            translation.set(key, "peft_dtype", "bf16")
    elif translation.text(key) == "fp32":
        translation.set(key, "mixed_precision", "False")
    else:
        translation.missing(key, "weights are in fp32 or bf16; --use_fp16 computes in fp16")


def _steps_of_epoch(translation: Translation, key: str) -> None:
    steps, of_each = translation.number(key) or 0, translation.number("gradient_accumulation_steps") or 1
    translation.set(key, "limit_train_batches", f"{steps * of_each:.0f}")


def _logger(translation: Translation, key: str) -> None:
    name = _component(translation.value(key))
    component = f"{key}._component_"
    if name.startswith("WandB"):
        translation.set(component, "use_wandb", "True")
    elif name.startswith("TensorBoard"):
        translation.set(component, "use_tensorboard", "True")
    elif name in ("DiskLogger", "StdoutLogger"):
        translation.needless(component, "metrics.jsonl is always written")
    else:
        translation.missing(component, f"no run reports to {name}; --use_wandb, --use_tensorboard, or metrics.jsonl")
    if translation.value(f"{key}.log_dir") is not None:
        translation.needless(f"{key}.log_dir", "logs stand in --output_dir")


def _profiler(translation: Translation, key: str) -> None:
    if translation.switch(f"{key}.enabled"):
        translation.set(f"{key}.enabled", "use_profiler", "True")
        translation.needless(key, "--use_profiler waits 1 step, warms up 2 and records 3, into the run folder")
    else:
        translation.needless(key, "nothing is profiled")


def _reshard(translation: Translation, key: str) -> None:
    translation.set(key, "sharding_strategy", "FULL_SHARD" if translation.switch(key) else "SHARD_GRAD_OP")


def _finish(translation: Translation) -> None:
    if "optimizer" not in translation.source.tree:
        raise ConfigError(f"{translation.source.name}: trains nothing; give a file with an optimizer and a dataset")
    if any(name in translation.source.tree for name in _SHARDED):
        translation.default("enable_fsdp", "True")
    else:
        translation.notes.append(
            "torchtune's file does not say whether ranks shard the model; --enable_fsdp does so here"
        )
    translation.default("scheduler", "constant")
    translation.default("batching_strategy", "padding")
    translation.default("activation_checkpointing", "off")
    if translation.fraction is None:
        translation.default("run_validation", "False")


TORCHTUNE = Tool(
    name="torchtune",
    fits=lambda tree: any(isinstance(one, dict) and "_component_" in one for one in tree.values()),
    trains_adapter=_is_adapter,
    finish=_finish,
    has_references=True,
    groups=("model", "optimizer", "lr_scheduler"),
    rules={
        "model": _model,
        "checkpointer.checkpoint_dir": _checkpoint_dir,
        "checkpointer.adapter_checkpoint": values.missing("--from_peft_checkpoint takes an adapter's folder"),
        "checkpointer": lambda translation, key: None,
        "tokenizer.max_seq_len": values.to("context_length"),
        "tokenizer.prompt_template": values.missing("chats are written by the tokenizer's own template"),
        "dataset": _dataset,
        "dataset_val": _validation,
        "optimizer": _optimizer,
        "optimizer.betas": steps.betas,
        "optimizer.eps": steps.epsilon,
        "lr_scheduler": _schedule,
        "loss": _loss,
        "dtype": _dtype,
        "clip_grad_norm": steps.clipping,
        "max_steps_per_epoch": _steps_of_epoch,
        "epochs": steps.all_epochs,
        "compile": values.if_on("compile", "True", off="layers are compiled only if that is known to help"),
        "enable_activation_checkpointing": values.recomputed,
        "metric_logger": _logger,
        "profiler": _profiler,
        "resume_from_checkpoint": values.if_on("resume", "auto", off="a new run starts"),
        "fsdp_cpu_offload": OFFLOAD,
        "fsdp_reshard_after_forward": _reshard,
        "run_val_every_n_steps": steps.every("eval_every_steps"),
        "save_adapter_weights_only": values.needless(
            "adapter/ holds the adapter alone, and checkpoints all that resumes"
        ),
        "optimizer_in_bwd": values.missing("gradients are summed before a step is taken"),
        "teacher_model": values.refused("it learns from another model"),
        "kd_loss": values.refused("it learns from another model"),
        "quantizer": values.missing("weights are trained in the precision that they are stored in"),
        "data_parallel_shard_dim": shards("data_parallel_replicate_dim"),
        "data_parallel_replicate_dim": copies,
        "tensor_parallel_dim": values.missing("layers stay whole"),
        "tensor_parallel_plan": values.missing("layers stay whole"),
    },
    needless=by_name(
        {
            _OF_MODEL: (
                "checkpointer._component_ checkpointer.model_type checkpointer.checkpoint_files "
                "checkpointer.checkpoint_files.filename_format checkpointer.checkpoint_files.max_filename "
                "checkpointer.safe_serialization tokenizer._component_ tokenizer.path tokenizer.merges_file "
                "tokenizer.vocab_path tokenizer.merges_path tokenizer.special_tokens_path"
            ),
            "results stand in --output_dir": "checkpointer.output_dir",
            "a new run starts": "checkpointer.recipe_checkpoint",
            "the kernels are PyTorch's": "optimizer.fused",
            "each rank reads its own part alone": "low_cpu_ram",
            "rows have the width that their batch needs": "collate_fn",
        }
    ),
)
