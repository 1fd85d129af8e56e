"""TRL's `trl sft` and `trl dpo`, and scripts of its CPO and ORPO trainers: YAML files and command lines.

The alignment handbook's recipes have the same names.
"""

from __future__ import annotations

from tools.translate import preferences, values
from tools.translate.data import HUB_FORMATS, is_hub_name, local_path, read_split, shown
from tools.translate.layouts import accelerate, ranks
from tools.translate.trainer import TRAINER_RULES, add_trainer_defaults, bf16
from tools.translate.translation import DatasetPart, Options, Tool, Translation, by_name

_REWARDS = (
    "reward_funcs",
    "reward_model_path",
    "num_generations",
    "desirable_weight",
    "teacher_model_name_or_path",
)
"""Keys of TRL's other trainers."""


def _trainer(translation: Translation) -> str:
    given = translation.text("trainer")
    return given or ("dpo" if translation.value("beta") is not None else "sft")


def _prefers(translation: Translation) -> bool:
    return _trainer(translation) != "sft"


def _loss_of_pairs(translation: Translation) -> str:
    trainer = _trainer(translation)
    return {"dpo": translation.text("loss_type") or "dpo", "cpo": translation.text("loss_type") or "cpo"}.get(
        trainer, trainer
    )


def _trainer_of_command(translation: Translation, key: str) -> None:
    if not _prefers(translation):
        translation.needless(key, "the dataset's format says what is learned")
    elif _trainer(translation) == "cpo" and _loss_of_pairs(translation) != "simpo":
        translation.refuse(key, "cpo is no loss here; with loss_type simpo it is --loss_type simpo")
    else:
        preferences.set_loss(translation, key, _loss_of_pairs(translation))


def _beta(translation: Translation, key: str) -> None:
    if translation.text("trainer") is None:
        preferences.set_loss(translation, key, _loss_of_pairs(translation))
    translation.set(key, preferences.weight_of(_loss_of_pairs(translation)), translation.text(key) or "")


def _length(translation: Translation, key: str) -> None:
    preferences.length_of_text(translation, key, _prefers(translation))


def _smoothing(translation: Translation, key: str) -> None:
    """`label_smoothing`: TRL's DPOTrainer reads it for other losses than these."""
    if _trainer(translation) == "cpo":
        translation.set(key, "preference_smoothing", translation.text(key) or "")
    elif _prefers(translation):
        translation.needless(key, "TRL does not read it for this loss; --preference_smoothing does")
    else:
        translation.set(key, "label_smoothing", translation.text(key) or "")


def _dropout(translation: Translation, key: str) -> None:
    if _prefers(translation) and translation.switch(key):
        translation.needless(key, "dropout is 0 (--lora_config.lora_dropout)")
    else:
        translation.needless(key, "dropout is what lora_dropout and the model's config.json say")


def _truncation(translation: Translation, key: str) -> None:
    if not _prefers(translation):
        translation.needless(key, "the first tokens of a sequence are kept (--truncation)")
    elif translation.text(key) == "keep_end":
        translation.needless(key, "of a long pair the prompt's first tokens are cut")
    else:
        translation.missing(key, "of a long pair the prompt's first tokens are cut, and never an answer")


def _dtype(translation: Translation, key: str) -> None:
    """`dtype`: of the loaded weights, which TRL trains in it."""
    text = (translation.text(key) or "").lower().removeprefix("torch.")
    if translation.trains_adapter:
        translation.needless(key, "under an adapter the base is in the dtype that is computed in")
    elif text in ("bfloat16", "bf16"):
        translation.take_back("mixed_precision", "needless", "weights and all products are in bf16")
        translation.set(key, "pure_bf16", "True")
    elif text in ("auto", "float32", "fp32"):
        translation.needless(key, "trained weights are in fp32, unless --pure_bf16 is given")
    else:
        translation.missing(key, f"trained weights are in fp32 or bf16, not in {text}; --use_fp16 computes in it")


def _dataset_name(translation: Translation, key: str) -> None:
    """The one dataset of a file. Its columns say its format, and are not known here."""
    path = translation.text(key) or ""
    options: Options = {}
    if translation.text("dataset_config") is not None:
        options["hub_config"] = ("dataset_config", translation.text("dataset_config") or "")
    if translation.text("dataset_train_split") is not None:
        read_split(translation, "dataset_train_split", options)
    if _evaluates(translation):
        test = translation.text("dataset_test_split")
        options["test_split"] = ("dataset_test_split" if test else key, test or "test")
    elif translation.text("dataset_test_split") is not None:
        translation.needless("dataset_test_split", "nothing is evaluated")
    _add(translation, key, path, options)


def _add(translation: Translation, key: str, path: str, options: Options) -> None:
    column = translation.text("dataset_text_field")
    dataset = preferences.PAIRS if _prefers(translation) else HUB_FORMATS.get(path, "chat_dataset")
    if dataset == preferences.PAIRS:
        translation.notes.append(
            f"{path}: prompts and answers that are texts are written as turns by the chat template; TRL joins them as "
            "they are, as --preference_dataset.as_chat False does"
        )
        translation.add(_part(translation, key, dataset, path, options))
        return
    if column is not None and (dataset == "text_dataset" or (path not in HUB_FORMATS and column != "messages")):
        dataset = "text_dataset"
        options["text_column"] = ("dataset_text_field", column)
    elif path not in HUB_FORMATS:
        translation.notes.append(
            f"{path} is taken for chats (a column messages); if it has prompt and completion, give --dataset "
            "instruction_dataset, if it has text alone, --dataset text_dataset, each with its data_path"
        )
    translation.add(_part(translation, key, dataset, path, options))


def _part(translation: Translation, key: str, dataset: str, path: str, options: Options) -> DatasetPart:
    if not is_hub_name(path) and (found := local_path(translation.source, path)) is not None:
        path = shown(found)
    return DatasetPart(key, dataset, path, options)


def _evaluates(translation: Translation) -> bool:
    strategy = translation.text("eval_strategy") or translation.text("evaluation_strategy") or "no"
    return strategy.lower() not in ("no", "false")


def _mixture(translation: Translation, key: str) -> None:
    """`datasets`, or the handbook's `dataset_mixture.datasets`: repositories, configurations and splits."""
    found = translation.value(key)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        translation.refuse(key, "is no list of datasets; write `- path: ...` below it")
    for index in range(len(found)):
        one = f"{key}[{index}]"
        place = next((f"{one}.{name}" for name in ("path", "id") if translation.text(f"{one}.{name}")), None)
        if place is None:
            translation.refuse(one, "a dataset without path; give it one")
        options: Options = {}
        for name in ("name", "config"):
            if (text := translation.text(f"{one}.{name}")) is not None:
                options["hub_config"] = (f"{one}.{name}", text)
        if translation.text(f"{one}.split") is not None:
            read_split(translation, f"{one}.split", options)
        for name in ("weight", "fraction"):
            if (share := translation.number(f"{one}.{name}")) is not None:
                if share == 1:
                    translation.needless(f"{one}.{name}", "all rows are read")
                else:
                    translation.missing(f"{one}.{name}", "--split_slice takes one share of all datasets")
        if translation.value(f"{one}.columns") is not None:
            translation.needless(f"{one}.columns", "columns that no one reads are named and not read")
        _add(translation, place, translation.text(place) or "", options)


def _chat_template(translation: Translation, key: str) -> None:
    """A file, a model's folder, or (in the handbook) the template itself."""
    text = translation.text(key) or ""
    if "{%" in text or "{{" in text:
        translation.files["chat_template"] = text
        translation.dataset_wide.append((key, "chat_template", "CHAT_TEMPLATE"))
        translation.claim(key)
        return
    found = local_path(translation.source, text)
    if found is not None and found.is_file():
        translation.dataset_wide.append((key, "chat_template", shown(found)))
        translation.claim(key)
    else:
        translation.missing(key, f"{text} is no file here; give --chat_dataset.chat_template FILE")


def _assistant_alone(translation: Translation, key: str) -> None:
    if translation.switch(key):
        translation.needless(key, "of chats the assistant's turns alone are learned")
    else:
        translation.missing(key, "of chats the assistant's turns alone are learned")


def _loss(translation: Translation, key: str) -> None:
    if _prefers(translation):
        preferences.set_loss(translation, key, _loss_of_pairs(translation))
    elif translation.text(key) in ("nll", "chunked_nll"):
        translation.needless(key, "it is the loss here, in chunks")
    elif translation.text(key) == "dft":
        translation.set(key, "loss_type", "dft")
    else:
        translation.missing(key, "the losses of prompts and answers are cross_entropy and dft (--loss_type)")


def _padding_free(translation: Translation, key: str) -> None:
    if not translation.switch(key) or translation.switch("packing"):
        translation.needless(key, "packing says it; packed rows have no padding")
    else:
        translation.missing(
            key, "rows are as wide as the longest of their batch; --batching_strategy packing fills them"
        )


def _strategy(translation: Translation, key: str) -> None:
    if translation.text(key) == "wrapped":
        translation.set(key, "truncation", "split")
    else:
        translation.needless(key, "rows are packed so that few tokens are padding")


def _launch(translation: Translation, key: str) -> None:
    """Flags of `accelerate launch`, but for those with a rule."""
    for leaf in translation.source.leaves(key):
        if leaf not in TRL.rules:
            translation.needless(leaf, "it is accelerate's, whose place torchrun takes")


def _finish(translation: Translation) -> None:
    if _prefers(translation):
        _finish_pairs(translation)
    if translation.trains_adapter:
        translation.default("lora_config.r", "16")
        translation.default("lora_config.lora_alpha", "32")
        translation.default("lora_config.lora_dropout", "0.05")
    translation.default("lr", "2e-5")
    translation.default("context_length", "1024")
    translation.default("num_epochs", "3")
    translation.default("batching_strategy", "padding")
    translation.default("activation_checkpointing", "full")
    if not _evaluates(translation):
        translation.default("run_validation", "False")
    add_trainer_defaults(translation)


def _finish_pairs(translation: Translation) -> None:
    """Its defaults of DPO, CPO and ORPO."""
    translation.default(preferences.weight_of(_loss_of_pairs(translation)), "0.1")
    if _loss_of_pairs(translation) == "simpo":
        translation.default("simpo_gamma", "0.5")
    translation.default("lr", "1e-6")
    translation.default("context_length", "2048")
    if translation.switch("disable_dropout") is not False and translation.trains_adapter:
        translation.take_back("lora_config.lora_dropout", "needless", "TRL turns dropout off for pairs of answers")
        translation.default("lora_config.lora_dropout", "0.0")


TRL = Tool(
    name="TRL",
    fits=lambda tree: "model_name_or_path" in tree or "dataset_name" in tree,
    trains_adapter=lambda tree: str(tree.get("use_peft")).lower() in ("true", "yes", "1"),
    finish=_finish,
    rules={
        **TRAINER_RULES,
        **dict.fromkeys(_REWARDS, values.refused("it learns from preferences or rewards")),
        "trainer": _trainer_of_command,
        "beta": _beta,
        "simpo_gamma": values.to("simpo_gamma"),
        "cpo_alpha": preferences.extra_loss("the cross-entropy of the chosen answer"),
        "label_smoothing": _smoothing,
        "disable_dropout": _dropout,
        "max_length": _length,
        "bf16": bf16,
        "dtype": _dtype,
        "torch_dtype": _dtype,
        "dataset_name": _dataset_name,
        "dataset_mixture.datasets": _mixture,
        "datasets": _mixture,
        "dataset_mixture.test_split_size": values.held_out,
        "test_split_size": values.held_out,
        "dataset_mixture.seed": values.needless("--seed draws the held-out rows and shuffles"),
        "dataset_streaming": values.for_datasets("streaming"),
        "dataset_text_field": values.needless("it names the text of a dataset that has no other columns"),
        "dataset_train_split": values.needless("train is the name without a flag"),
        "dataset_test_split": values.needless("nothing is evaluated"),
        "dataset_kwargs": values.needless("templates write the special tokens, and no others are added"),
        "chat_template": _chat_template,
        "chat_template_path": _chat_template,
        "assistant_only_loss": _assistant_alone,
        "completion_only_loss": values.learns_prompts(False),
        "loss_type": _loss,
        "packing": values.packed,
        "padding_free": _padding_free,
        "packing_strategy": _strategy,
        "eval_packing": values.needless("validation data is batched as training data is"),
        "truncation_mode": _truncation,
        "use_peft": values.if_on("use_peft", "True", off="all weights are trained"),
        "lora_target_modules": values.targets,
        "lora_target_parameters": values.target_parameters("lora_target_modules"),
        "load_in_4bit": values.if_on("quantization", "4bit"),
        "load_in_8bit": values.if_on("quantization", "8bit"),
        "accelerate_config": accelerate,
        "num_processes": ranks("nproc_per_node"),
        "launch": _launch,
        "launch.config_file": accelerate,
        "launch.num_processes": ranks("nproc_per_node"),
        "launch.num_machines": ranks("nnodes"),
    },
    needless=by_name({"it starts no run here": "env", "packed rows need no kernel of the hub": "kernels"}),
)
