"""FSDP, DeepSpeed and accelerate: how the ranks share the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from configs.other_values import OTHER_VALUES
from tools.translate.data import local_path
from tools.translate.source import Source, read_source
from tools.translate.translation import Rule, Translation
from tools.translate.values import if_on
from utils.small_files import read_json

_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}  # accelerate's numbers
OFFLOAD = if_on("fsdp_cpu_offload", "True", off="shards stay on the device")
_CLASSES = "the layers are found in the model"
_STAGE = re.compile(r"(?:zero|z|stage)_?-?([0-3])", re.IGNORECASE)


def fsdp(translation: Translation, key: str) -> None:
    """`fsdp: full_shard auto_wrap`, or a list of these words."""
    found = translation.value(key)
    words = " ".join(translation.names(key)).replace(",", " ").split() if not isinstance(found, dict) else []
    if not words or words in (["false"], ["False"]):
        return translation.needless(key, "nothing is sharded")
    translation.set(key, "enable_fsdp", "True")
    for word in words:
        if word in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard"):
            translation.set(key, "sharding_strategy", word.upper())
        elif word == "offload":
            translation.set(key, "fsdp_cpu_offload", "True")
        elif word not in ("auto_wrap", "true", "True"):
            translation.missing(key, f"{word} is no strategy here")
    return None


def fsdp_config(translation: Translation, key: str) -> None:
    """The mapping `fsdp_config`, with or without `fsdp_` before its names. It has what `fsdp` says, too."""
    translation.mapping(key)
    names = translation.source.leaves(key)
    if translation.value("fsdp") is None:
        translation.set(key, "enable_fsdp", "True", ends=False)
    for leaf in names:
        rule = _FSDP_RULES.get(leaf.removeprefix(f"{key}.").removeprefix("fsdp_"))
        if rule is not None:
            rule(translation, leaf)


def _strategy(translation: Translation, key: str) -> None:
    text = (translation.text(key) or "").lower()
    name = _STRATEGIES.get(text) or text.upper().removeprefix("SHARDINGSTRATEGY.")
    translation.set(key, "sharding_strategy", name)


def _reshard(translation: Translation, key: str) -> None:
    text = (translation.text(key) or "").lower()
    if (translation.number("dp_replicate_size") or 1) > 1:
        translation.needless(key, "HYBRID_SHARD gathers one layer at a time")
    elif text in ("true", "false"):
        translation.set(key, "sharding_strategy", "FULL_SHARD" if text == "true" else "SHARD_GRAD_OP")
    else:
        _strategy(translation, key)  # FSDP1 files of accelerate have the strategy's name there


def _state_dict(translation: Translation, key: str) -> None:
    text = translation.text(key) or ""
    if text == "SHARDED_STATE_DICT":
        translation.needless(key, "checkpoints are of shards")
    else:
        translation.set(key, "checkpoint_type", text)


def _checkpointing(translation: Translation, key: str) -> None:
    if translation.switch(key):
        translation.take_back("activation_checkpointing", "needless", f"{key} says it")
        translation.set(key, "activation_checkpointing", "full")
    else:
        translation.needless(key, "the other keys say what is recomputed")


_FSDP_RULES: dict[str, Rule] = {
    "sharding_strategy": _strategy,
    "reshard_after_forward": _reshard,
    "offload_params": OFFLOAD,
    "cpu_offload": OFFLOAD,
    "state_dict_type": _state_dict,
    "activation_checkpointing": _checkpointing,
    "version": lambda translation, key: translation.needless(key, "it is FSDP2"),
    "cpu_ram_efficient_loading": lambda translation, key: translation.needless(key, "every run loads so"),
    "auto_wrap_policy": lambda translation, key: translation.needless(key, _CLASSES),
    "transformer_layer_cls_to_wrap": lambda translation, key: translation.needless(key, _CLASSES),
}


def layer_classes(translation: Translation, key: str) -> None:
    """`fsdp_transformer_layer_cls_to_wrap` outside of `fsdp_config`."""
    translation.needless(key, _CLASSES)


def deepspeed(translation: Translation, key: str) -> None:
    """`deepspeed: FILE.json`. The stage is read in the file, or in its name if the file is not here."""
    name = translation.text(key) or ""
    path = local_path(translation.source, name)
    if path is None or not path.is_file():
        found = _STAGE.search(Path(name).stem)
        if found is None:
            translation.missing(key, f"{name} is not here, and its name says no stage; give --enable_fsdp")
            return
        _stage(translation, key, int(found[1]), Path(name).stem)
        return
    try:
        content = read_json(path)
        zero = content.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        translation.refuse(key, f"{path} is no file of DeepSpeed ({error}); give another, or leave this out")
    offloads = {
        part: (zero.get(f"offload_{part}") or {}).get("device", "none") != "none" for part in ("optimizer", "param")
    }
    _stage(translation, key, stage, json.dumps([part for part, is_so in offloads.items() if is_so]))
    unread = [part for part, value in content.items() if part not in _READ and not _is_auto(value)]
    if unread:
        translation.notes.append(f"{key}: of {name} the stage and its offloads are read, and not {', '.join(unread)}")


_READ = ("zero_optimization", "_comment", "zero_allow_untested_optimizer", "steps_per_print", "wall_clock_breakdown")


def _is_auto(value: Any) -> bool:
    """Whether DeepSpeed takes it from the file that names it."""
    return value == "auto" or (isinstance(value, dict) and value.get("enabled") in ("auto", False))


def _stage(translation: Translation, key: str, stage: int, offloads: str) -> None:
    """Stages 1 and 2 keep the weights whole in a step, 3 gathers one layer at a time."""
    if stage == 0:
        translation.needless(key, "stage 0 copies the model to each rank, as several ranks do here without a flag")
        return
    translation.set(key, "enable_fsdp", "True")
    strategy = OTHER_VALUES["sharding_strategy"]["zero3" if stage == 3 else "zero2"]
    translation.set(key, "sharding_strategy", strategy["sharding_strategy"])
    if "param" in offloads:
        translation.set(key, "fsdp_cpu_offload", "True")
    elif "optimizer" in offloads or "offload" in offloads:
        translation.set(key, "optimizer_cpu_offload", "True")


def ranks(name: str) -> Rule:
    """A number of processes or machines, which torchrun gets as this flag of its own."""

    def rule(translation: Translation, key: str) -> None:
        text = translation.text(key) or ""
        if text not in ("auto", "-1", "1"):
            translation.ranks[name] = text
        translation.needless(key, f"torchrun's --{name} {text} says it, before finetuning.py")

    return rule


def accelerate(translation: Translation, key: str) -> None:
    """`--config_file FILE` of `accelerate launch`: its keys that shape the run. accelerate reads the file here, too."""
    name = translation.text(key) or ""
    path = local_path(translation.source, name)
    stem = Path(name).stem
    if path is None:
        if found := _STAGE.search(stem):
            _stage(translation, key, int(found[1]), stem)
        elif "fsdp" in stem:
            translation.set(key, "enable_fsdp", "True")
        else:
            translation.needless(key, f"{name} is not here; several ranks copy the model without a flag")
        return
    config = read_source(path)
    zero = config.value("deepspeed_config.zero_stage")
    if zero is not None:
        offloads = [
            part for part in ("optimizer", "param") if _is_on(config, f"deepspeed_config.offload_{part}_device")
        ]
        if zero not in ("0", "1", "2", "3"):
            translation.refuse(key, f"{name} has zero_stage {zero}; give 0 to 3")
        _stage(translation, key, int(zero), json.dumps(offloads))
    elif config.value("distributed_type") == "FSDP":
        translation.set(key, "enable_fsdp", "True")
        reshard = config.value("fsdp_config.fsdp_reshard_after_forward")
        if reshard == "false":
            translation.set(key, "sharding_strategy", "SHARD_GRAD_OP")
    else:
        translation.needless(key, "several ranks copy the model without a flag")
    translation.notes.append(f"{key}: of {name} the sharding and the number of ranks are read")
    if (processes := config.value("num_processes")) not in (None, "1"):
        translation.ranks["nproc_per_node"] = processes


def _is_on(config: Source, key: str) -> bool:
    return config.value(key) not in (None, "none")


def shards(copies_key: str) -> Rule:
    """The number of ranks that hold one copy together; -1 are those that are left."""

    def rule(translation: Translation, key: str) -> None:
        if (translation.number(copies_key) or 1) > 1 and translation.text(key) != "-1":
            translation.set(key, "sharding_group_size", translation.text(key) or "")
        else:
            translation.needless(key, "a model is sharded over all ranks, or over those that its copies leave")

    return rule


def copies(translation: Translation, key: str) -> None:
    """The number of copies of a sharded model."""
    if (translation.number(key) or 1) > 1:
        translation.set(key, "enable_fsdp", "True", ends=False)
        translation.set(key, "sharding_strategy", "HYBRID_SHARD", ends=False)
        translation.set(key, "replica_group_size", translation.text(key) or "")
    else:
        translation.needless(key, "there is one copy")


LAYOUT_RULES: dict[str, Rule] = {
    "fsdp": fsdp,
    "fsdp_config": fsdp_config,
    "fsdp_transformer_layer_cls_to_wrap": layer_classes,
    "deepspeed": deepspeed,
}
"""For tools whose files have transformers' names."""
