"""LLaMA-Factory's configs, and the dataset_info.json that they name (its examples/ and data/README.md)."""

from __future__ import annotations

from typing import Any

from tools.translate import preferences, rope, values
from tools.translate.data import is_hub_name, local_path, shown
from tools.translate.source import Tree
from tools.translate.trainer import TRAINER_RULES, add_trainer_defaults, bf16
from tools.translate.translation import DatasetPart, Options, Rule, Tool, Translation, by_name
from utils.small_files import read_json

_INFO = "dataset_info.json"
_OWN = ("model_name_or_path", "stage"), ("model_name_or_path", "finetuning_type"), ("model_name_or_path", "template")
_MORE_OWN = ("model_name_or_path", "cutoff_len")
_ALPACA = {
    "prompt": ("instruction", "prompt_column"),
    "query": ("input", "input_column"),
    "response": ("output", "completion_column"),
    "system": ("", "system_column"),
    "history": ("", "history_column"),
}
"""The columns of its Alpaca form: the name without a key, and our field."""


def _kind(tree: Tree) -> str:
    found = tree.get("finetuning_type")
    return found if isinstance(found, str) else "lora"


def _stage(translation: Translation, key: str) -> None:
    name = translation.text(key)
    if name == "dpo":
        preferences.set_loss(translation, key, _loss(translation))
    elif name in ("sft", "pt"):
        translation.needless(key, "the dataset's format says what is learned")
    elif name == "rm":
        translation.refuse(
            key, "rm trains a reward model: give --task reward_model and --dataset preference_dataset with its pairs"
        )
    else:
        translation.refuse(key, f"{name} learns from rewards or labelled answers; there is no such training here")


def _prefers(translation: Translation) -> bool:
    return translation.text("stage") == "dpo"


def _loss(translation: Translation) -> str:
    return translation.text("pref_loss") or "sigmoid"


def _pref_loss(translation: Translation, key: str) -> None:
    if _prefers(translation):
        preferences.set_loss(translation, key, _loss(translation))
    else:
        translation.needless(key, "only stage dpo reads it")


def _of_pairs(setting: str) -> Rule:
    """A setting of stage dpo."""

    def rule(translation: Translation, key: str) -> None:
        if _prefers(translation):
            name = preferences.weight_of(_loss(translation)) if setting == "beta" else setting
            translation.set(key, name, translation.text(key) or "")
        else:
            translation.needless(key, "only stage dpo reads it")

    return rule


def _length(translation: Translation, key: str) -> None:
    preferences.length_of_text(translation, key, _prefers(translation))


def _finetuning_type(translation: Translation, key: str) -> None:
    name = translation.text(key)
    if name == "lora":
        translation.set(key, "use_peft", "True")
    elif name == "full":
        translation.needless(key, "all weights are trained without a flag")
    elif name == "freeze":
        translation.refuse(
            key, "freeze trains the last layers alone, and new ones; --freeze_layers freezes the first ones"
        )
    else:
        translation.refuse(key, f"{name} is no adapter that is trained here; lora is")


def _quantization(translation: Translation, key: str) -> None:
    bits = translation.text(key)
    if bits not in ("4", "8"):
        translation.refuse(key, f"{bits} bits are no quantization here; 4 and 8 are")
    translation.set(key, "quantization", f"{bits}bit")


def _quantization_method(translation: Translation, key: str) -> None:
    name = (translation.text(key) or "").lower()
    if name in ("bnb", "bitsandbytes"):
        translation.needless(key, "it is bitsandbytes")
    else:
        translation.missing(key, f"{name} does not quantize here; bitsandbytes does")


def _template(translation: Translation, key: str) -> None:
    name = translation.text(key) or ""
    translation.missing(
        key, f"the tokenizer's own template is used; for {name} of a base model give a file by --NAME.chat_template"
    )


def _datasets(translation: Translation, key: str) -> None:
    """`dataset: a,b`, by the entries of dataset_info.json."""
    names = translation.names(key)
    folder = translation.text("dataset_dir") or "data"
    info_path = local_path(translation.source, f"{folder}/{_INFO}")
    if info_path is None:
        dataset = preferences.PAIRS if _prefers(translation) else "instruction_dataset"
        translation.missing(
            key,
            f"{folder}/{_INFO} is not here, which says where {' and '.join(names)} is; start this "
            f"where LLaMA-Factory starts, or give --{dataset}.data_path",
        )
        translation.default("dataset", dataset)
        if not _prefers(translation):
            translation.default("instruction_dataset.as_chat", "True")
        return
    try:
        info = read_json(info_path)
    except (OSError, ValueError) as error:
        translation.refuse(key, f"{info_path}: is no JSON ({error}); mend it")
    for name in names:
        entry = info.get(name) if isinstance(info, dict) else None
        if not isinstance(entry, dict):
            translation.refuse(key, f"{name} is not in {info_path}; add it, or name another")
        translation.add(_part(translation, key, name, entry, folder))


def _part(translation: Translation, key: str, name: str, entry: dict[str, Any], folder: str) -> DatasetPart:
    """One entry of dataset_info.json."""
    if "script_url" in entry:
        translation.refuse(key, f"{name} is a script of its own; write its rows into a file")
    is_ranked = bool(entry.get("ranking"))
    if is_ranked != _prefers(translation):
        what = "holds pairs of answers, which stage: dpo learns" if is_ranked else "holds no pairs of answers (ranking)"
        translation.refuse(key, f"{name} {what}")
    options: Options = {}
    if "file_name" in entry:
        found = local_path(translation.source, f"{folder}/{entry['file_name']}")
        path = shown(found) if found is not None else f"{folder}/{entry['file_name']}"
    else:
        path = str(entry.get("hf_hub_url") or entry.get("ms_hub_url") or "")
        if not is_hub_name(path):
            translation.refuse(key, f"{name} has neither file_name nor hf_hub_url; add one to its entry")
        for ours, theirs in (("hub_config", "subset"), ("train_split", "split")):
            if entry.get(theirs):
                options[ours] = (key, str(entry[theirs]))
    columns = entry.get("columns") or {}
    for media in ("videos", "audios"):
        if columns.get(media):
            translation.refuse(key, f"{name} has {media}; --dataset chat_dataset trains on text and images")
    if columns.get("images"):
        options["image_column"] = (key, str(columns["images"]))
    if is_ranked:
        if columns.get("images"):
            translation.refuse(key, f"{name} has images, and pairs of answers are texts")
        names = [str(columns.get(side, side)) for side in ("chosen", "rejected")]
        preferences.check_columns(translation, key, *names)
        return DatasetPart(key, preferences.PAIRS, path, options)
    if translation.text("stage") == "pt":
        options["text_column"] = (key, str(columns.get("prompt", "text")))
        return DatasetPart(key, "text_dataset", path, options)
    if entry.get("formatting", "alpaca") in ("sharegpt", "openai"):
        options["messages_column"] = (key, str(columns.get("messages", "conversations")))
        own = {role.removesuffix("_tag"): str(tag) for role, tag in (entry.get("tags") or {}).items()}
        named = {
            "user": "user",
            "assistant": "assistant",
            "observation": "tool",
            "function": "tool_call",
            "system": "system",
        }
        usual = {"human", "gpt", "user", "assistant", "system", "observation", "function_call", "tool"}
        roles = [f"{tag}={named[role]}" for role, tag in own.items() if role in named and tag not in usual]
        if roles:
            options["roles"] = (key, roles)
        return DatasetPart(key, "chat_dataset", path, options)
    if columns.get("images"):
        return _alpaca_with_images(translation, key, name, path, options, columns)
    options["as_chat"] = (key, "True")
    for theirs, (usual_name, ours) in _ALPACA.items():
        column = columns.get(theirs, usual_name)
        if theirs in ("prompt", "response") or theirs in columns:
            options[ours] = (key, str(column))
    return DatasetPart(key, "instruction_dataset", path, options)


def _alpaca_with_images(
    translation: Translation, key: str, name: str, path: str, options: Options, columns: dict[str, Any]
) -> DatasetPart:
    """Rows of Alpaca's form with images, which chat_dataset makes turns of if their columns have the usual names."""
    usual = {theirs: usual_name or theirs for theirs, (usual_name, _) in _ALPACA.items()}
    if renamed := [str(columns[theirs]) for theirs in usual if columns.get(theirs, usual[theirs]) != usual[theirs]]:
        translation.refuse(
            key, f"{name} has images, and other columns than Alpaca's ({', '.join(renamed)}); rename them"
        )
    return DatasetPart(key, "chat_dataset", path, options)


def _eval_dataset(translation: Translation, key: str) -> None:
    translation.missing(
        key, "validation data stands with training data, in a folder, or as a split (--NAME.test_split)"
    )


def _probabilities(translation: Translation, key: str) -> None:
    weights = translation.names(key)
    if len(weights) == len(translation.names("dataset")):
        translation.set(key, "dataset_weights", weights)
    else:
        translation.refuse(key, "has not one share for each dataset; give as many")


def _tokens(translation: Translation, key: str) -> None:
    values.new_tokens(translation, key)


def _pissa(translation: Translation, key: str) -> None:
    if not translation.switch(key):
        translation.needless(key, "it is off, and so it is here")
        return
    is_exact = (translation.number("pissa_iter") or 16) < 0
    translation.set(key, "lora_config.init_lora_weights", "pissa" if is_exact else "pissa_niter_16")


def _finish(translation: Translation) -> None:
    if translation.trains_adapter:
        translation.default("use_peft", "True")
        rank = str(translation.given("lora_config.r") or 8)
        translation.default("lora_config.r", rank)
        translation.default("lora_config.lora_alpha", str(2 * int(rank)))
        translation.default("lora_config.lora_dropout", "0.0")
        if translation.given("lora_config.target_modules") is None:
            translation.default("lora_config.target_modules", "all-linear")
    if translation.value("max_samples") is not None and len(translation.names("dataset")) > 1:
        translation.notes.append("max_samples: the first rows of all datasets of one format together, not of each")
    translation.default("context_length", "4096" if _prefers(translation) else "2048")
    if _prefers(translation):
        translation.default(preferences.weight_of(_loss(translation)), "0.1")
    if _loss(translation) == "simpo" and _prefers(translation):
        translation.default("simpo_gamma", "0.5")
    translation.default("num_epochs", "3")
    translation.default("batching_strategy", "packing" if translation.text("stage") == "pt" else "padding")
    translation.default("activation_checkpointing", "full")
    add_trainer_defaults(translation)


LLAMA_FACTORY = Tool(
    name="LLaMA-Factory",
    fits=lambda tree: any({*own} <= tree.keys() for own in (*_OWN, _MORE_OWN)),
    trains_adapter=lambda tree: _kind(tree) == "lora",
    finish=_finish,
    rules={
        **TRAINER_RULES,
        "stage": _stage,
        "pref_loss": _pref_loss,
        "pref_beta": _of_pairs("beta"),
        "dpo_label_smoothing": _of_pairs("preference_smoothing"),
        "simpo_gamma": _of_pairs("simpo_gamma"),
        "pref_ftx": preferences.extra_loss("the cross-entropy of the chosen answer"),
        "cutoff_len": _length,
        "finetuning_type": _finetuning_type,
        "bf16": bf16,
        "quantization_bit": _quantization,
        "quantization_method": _quantization_method,
        "template": _template,
        "dataset": _datasets,
        "dataset_dir": values.needless("the entries of its dataset_info.json are read"),
        "eval_dataset": _eval_dataset,
        "interleave_probs": _probabilities,
        "mix_strategy": values.needless("an epoch holds every row; --dataset_weights gives shares"),
        "val_size": values.held_out,
        "train_on_prompt": values.learns_prompts(),
        "mask_history": values.for_datasets("learn", "last"),
        "streaming": values.for_datasets("streaming"),
        "packing": values.packed,
        "neat_packing": values.packed,
        "lora_target": values.targets,
        "flash_attn": values.attention,
        "disable_gradient_checkpointing": values.if_on("activation_checkpointing", "off"),
        "add_tokens": values.new_tokens,
        "add_special_tokens": _tokens,
        "new_special_tokens": _tokens,
        "resize_vocab": values.needless("embeddings grow with --add_special_tokens"),
        "upcast_layernorm": values.needless("weights that are trained are in fp32 unless --pure_bf16 is given"),
        "predict_with_generate": values.if_on("eval_generate", "True"),
        "do_predict": values.needless("python -m tools.generate answers prompts after a run"),
        "rope_scaling": rope.kind,
        "pissa_init": _pissa,
        "use_muon": values.if_on("optimizer", "Muon"),
        "use_dft_loss": values.if_on("loss_type", "dft"),
        "fp8": values.if_on("float8", "tensorwise"),
        "image_max_pixels": values.to("max_pixels"),
        "image_min_pixels": values.to("min_pixels"),
        "media_dir": values.for_datasets("image_folder"),
        "freeze_vision_tower": values.if_on("freeze_vision", "True"),
        "freeze_language_model": values.if_on("freeze_language_model", "True"),
        "ray_num_workers": values.needless("torchrun's --nproc_per_node says it, before finetuning.py"),
    },
    needless=by_name(
        {
            "torchao computes float8, and shards are gathered in bf16": "fp8_backend fp8_enable_fsdp_float8_all_gather",
            "torchrun starts the ranks": "ray_run_name ray_storage_path ray_storage_filesystem resources_per_worker "
            "placement_strategy ray_init_kwargs use_ray",
            "the weights are fetched from Hugging Face's hub": "use_modelscope_hub use_openmind_hub",
        }
    ),
    missing=by_name(
        {
            "no layer is added": "use_llama_pro freeze_trainable_modules freeze_extra_modules",
            "attention is that of the model": "shift_attn mixture_of_depths",
            "W&B and TensorBoard have flags": "use_swanlab swanlab_project swanlab_run_name swanlab_mode",
            "the projector is trained with the model": "freeze_multi_modal_projector",
            "videos are not read": "video_max_pixels video_min_pixels video_fps video_maxlen",
            "another program trains then": "use_mca use_megatron_bridge use_kt use_hyper_parallel",
        }
    ),
)
