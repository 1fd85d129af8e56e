"""LitGPT's configs (config_hub/finetune of its repository): nested, with a `class_path` in some groups."""

from __future__ import annotations

import math
from typing import Any

from configs.other_values import OTHER_VALUES
from tools.translate import steps, values
from tools.translate.data import local_path, shown
from tools.translate.layer_names import layers_of
from tools.translate.layouts import ranks
from tools.translate.source import Tree
from tools.translate.translation import DatasetPart, Options, Tool, Translation, by_name

_DATA = {
    "Alpaca2k": ("alpaca_dataset", "mhenrichsen/alpaca_2k_test", "0.05"),
    "Alpaca": ("alpaca_dataset", "yahma/alpaca-cleaned", "0.03865"),
    "AlpacaGPT4": ("alpaca_dataset", "vicgalle/alpaca-gpt4", "0.03847"),
    "LIMA": ("chat_dataset", "GAIR/lima", "0.1"),
    "Deita": ("chat_dataset", "HuggingFaceH4/deita-10k-v0-sft", "0"),
    "TinyStories": ("text_dataset", "roneneldan/TinyStories", "0"),
}
"""Format, place and share for validation, by the data's class."""
_LORA = {"lora_query": "query", "lora_key": "key", "lora_value": "value", "lora_projection": "projection"}
_LORA |= {"lora_mlp": "mlp", "lora_head": "head"}
_OFF = {"lora_query": True, "lora_value": True}  # what LitGPT does without the key, if that is true


def _is_adapter(tree: Tree) -> bool:
    return any(name.startswith("lora_") for name in tree)


def _class(value: Any) -> str:
    found = value.get("class_path") if isinstance(value, dict) else value
    return found.rpartition(".")[2] if isinstance(found, str) else ""


def _checkpoint_dir(translation: Translation, key: str) -> None:
    """`checkpoints/OWNER/NAME` is where LitGPT puts a model of the hub, in a format of its own."""
    path = (translation.text(key) or "").rstrip("/")
    translation.set(key, "model_name", path.removeprefix("checkpoints/"))


def _precision(translation: Translation, key: str) -> None:
    text = translation.text(key) or ""
    if text == "bf16-true":
        translation.set(key, "pure_bf16", "True")
        if translation.trains_adapter:
            translation.set(key, "peft_dtype", "bf16")
    elif text in ("bf16-mixed", "16-mixed"):
        translation.set(key, *(("mixed_precision", "True") if text == "bf16-mixed" else ("use_fp16", "True")))
    elif text in ("32-true", "32"):
        translation.set(key, "mixed_precision", "False")
    else:
        translation.refuse(key, f"{text} is no precision here; bf16-true, bf16-mixed, 16-mixed and 32-true are")


def _quantize(translation: Translation, key: str) -> None:
    text = (translation.text(key) or "").lower()
    found = OTHER_VALUES["quantization"].get(text)
    if found is None:
        translation.refuse(key, f"{text} is no quantization here; bnb.nf4, bnb.fp4 (with -dq) and bnb.int8 are")
    for setting, value in found.items():
        translation.set(key, setting, value)


def _devices(translation: Translation, key: str) -> None:
    text = translation.text(key) or ""
    if text.isdigit() and int(text) > 1:
        translation.set(key, "enable_fsdp", "True")
        translation.ranks["nproc_per_node"] = text
    else:
        ranks("nproc_per_node")(translation, key)


def _lora_layer(translation: Translation, key: str) -> None:
    """All switches of layers together are the list of layers."""
    tree = translation.source.tree
    model = translation.text("checkpoint_dir") or ""
    if not translation.switch(key):
        translation.needless(key, "these layers are not among --lora_config.target_modules")
        return
    layers: list[str] = []
    for name, place in _LORA.items():
        is_on = translation.switch(name) if name in tree else _OFF.get(name, False)
        layers += layers_of(model, place) if is_on else ()
    translation.set(key, "lora_config.target_modules", list(dict.fromkeys(layers)))


def _data(translation: Translation, key: str) -> None:
    """The class of the data is its format and its place."""
    value = translation.value(key)
    name = _class(value)
    place = f"{key}.class_path" if isinstance(value, dict) else key
    arguments = f"{key}.init_args"
    options: Options = {}
    if name == "JSON":
        json_path = translation.text(f"{arguments}.json_path") or ""
        found = local_path(translation.source, json_path)
        dataset, path, share = "alpaca_dataset", json_path if found is None else shown(found), "0"
        translation.needless(place, "it is --dataset alpaca_dataset")
        place = f"{arguments}.json_path"
    elif name in _DATA:
        dataset, path, share = _DATA[name]
    else:
        translation.refuse(key, f"{name} is no dataset here; write its rows into a file (docs/datasets.md)")
    fraction = translation.text(f"{arguments}.val_split_fraction")
    translation.fraction = (f"{arguments}.val_split_fraction" if fraction else place, fraction or share)
    if fraction:
        translation.claim(f"{arguments}.val_split_fraction")
    masks = translation.switch(f"{arguments}.mask_prompt")
    if dataset == "alpaca_dataset":
        options["mask_prompt"] = (f"{arguments}.mask_prompt" if masks is not None else place, str(bool(masks)))
    style = translation.text(f"{arguments}.prompt_style")
    if style is not None:
        if style == "alpaca":
            translation.needless(f"{arguments}.prompt_style", "alpaca_dataset writes Alpaca's prompt")
        else:
            translation.missing(f"{arguments}.prompt_style", "--dataset instruction_dataset has --prompt_template")
    translation.add(DatasetPart(place, dataset, path, options))


def _optimizer(translation: Translation, key: str) -> None:
    value = translation.value(key)
    place = f"{key}.class_path" if isinstance(value, dict) else key
    names = {"PagedAdamW": "paged_adamw_32bit", "PagedAdam": "paged_adamw_32bit", "Adam": "AdamW"}
    name = _class(value)
    steps.optimizer_named(translation, place, names.get(name, name))
    if f"{key}.init_args.weight_decay" not in translation.source.lines and name == "AdamW":
        translation.default("weight_decay", "0.01")  # torch's


def _max_iters(translation: Translation, key: str) -> None:
    """Batches of an evaluation, which have the rows of a micro-batch."""
    translation.set(key, "max_eval_step", translation.text(key) or "")
    if (rows := translation.text("train.micro_batch_size")) is not None:
        translation.set(key, "val_batch_size", rows)


def _last_evaluation(translation: Translation, key: str) -> None:
    if translation.switch(key):
        translation.needless(key, "the end of the last epoch is evaluated")
    else:
        translation.missing(key, "the end of each epoch is evaluated")


def _max_tokens(translation: Translation, key: str) -> None:
    """Tokens of the whole run, as steps of full rows."""
    tokens = translation.number(key) or 0
    rows, length = translation.number("train.global_batch_size"), translation.number("train.max_seq_length")
    if rows and length:
        translation.set(key, "max_train_step", f"{math.ceil(tokens / rows / length)}")
    else:
        translation.missing(key, "--max_train_step is a number of steps; max_seq_length would say their tokens")


def _finish(translation: Translation) -> None:
    if translation.trains_adapter:
        translation.default("use_peft", "True")
        translation.default("lora_config.r", "8")
        translation.default("lora_config.lora_alpha", "16")
        translation.default("lora_config.lora_dropout", "0.05")
    translation.default("scheduler", "cosine")
    translation.default("lr", "1e-3")
    translation.default("batching_strategy", "padding")
    is_sharded = translation.given("enable_fsdp") == "True"
    translation.default("activation_checkpointing", "full" if is_sharded else "off")
    if (name := translation.given("model_name")) is not None and str(name).count("/") == 1:
        translation.notes.append(f"checkpoint_dir is a folder in LitGPT's format; {name} on the hub is the same model")


LITGPT = Tool(
    name="LitGPT",
    fits=lambda tree: isinstance(tree.get("train"), dict) and ("checkpoint_dir" in tree or "tokenizer_dir" in tree),
    trains_adapter=_is_adapter,
    finish=_finish,
    groups=("train", "eval", "data.init_args", "optimizer.init_args"),
    rules={
        "checkpoint_dir": _checkpoint_dir,
        "initial_checkpoint_dir": _checkpoint_dir,
        "precision": _precision,
        "quantize": _quantize,
        "devices": _devices,
        "num_nodes": ranks("nnodes"),
        **dict.fromkeys(_LORA, _lora_layer),
        "data": _data,
        "data.init_args.num_workers": values.to("num_workers_dataloader"),
        "data.init_args.seed": values.needless("--seed draws the held-out rows and shuffles"),
        "train.global_batch_size": values.to("global_batch_size"),
        "train.epochs": steps.all_epochs,
        "train.max_steps": steps.all_steps,
        "train.max_norm": steps.clipping,
        "train.min_lr": values.needless("LitGPT's finetuning does not read it; its rate falls to 0, as here"),
        "train.max_tokens": _max_tokens,
        "model_config": values.missing("a run builds the model that its folder's config.json says"),
        "eval.max_iters": _max_iters,
        "eval.max_new_tokens": values.needless(
            "LitGPT shows an answer at each evaluation; --eval_generate does so here"
        ),
        "eval.final_validation": _last_evaluation,
        "eval.initial_validation": values.if_on("eval_before_training", "True"),
        "optimizer": _optimizer,
        "optimizer.init_args.betas": steps.betas,
        "optimizer.init_args.eps": steps.epsilon,
        "logger_name": values.trackers,
    },
    missing=by_name(
        {"a run starts from a model's folder; --random_weights takes its config.json alone": "tokenizer_dir"}
    ),
)
