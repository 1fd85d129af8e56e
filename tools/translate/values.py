"""Rules for one key: what other tools' values are in the units and words of this one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tools.translate.translation import Rule, Translation


def to(setting: str) -> Rule:
    """The value as it is."""

    def rule(translation: Translation, key: str) -> None:
        translation.set(key, setting, translation.text(key) or "")

    return rule


def needless(why: str) -> Rule:
    """A key that a run here does without."""
    return lambda translation, key: translation.needless(key, why)


def missing(why: str) -> Rule:
    """A key that a run here cannot do, unless it is off."""

    def rule(translation: Translation, key: str) -> None:
        found = translation.value(key)
        if isinstance(found, str) and found.lower() in ("false", "0", "0.0", "none", "no"):
            translation.needless(key, "it is off, and so it is here")
        else:
            translation.missing(key, why)

    return rule


def refused(why: str) -> Rule:
    """A key of a training that there is not here, unless it is off."""

    def rule(translation: Translation, key: str) -> None:
        if str(translation.value(key)).lower() in ("false", "no"):
            translation.needless(key, "it is off")
        else:
            translation.refuse(key, f"{why}; there is no such training here")

    return rule


def if_on(setting: str, value: str, off: str = "it is off, and so it is here") -> Rule:
    """A switch that sets another setting to this value."""

    def rule(translation: Translation, key: str) -> None:
        if translation.switch(key):
            translation.set(key, setting, value)
        else:
            translation.needless(key, off)

    return rule


def for_datasets(name: str, value: str = "") -> Rule:
    """A setting of every dataset that has it."""

    def rule(translation: Translation, key: str) -> None:
        translation.dataset_wide.append((key, name, value or translation.text(key) or ""))
        translation.claim(key)

    return rule


def learns_prompts(is_prompt_learned: bool = True) -> Rule:
    """A switch that says whether prompts are learned, or (False) whether answers alone are."""

    def rule(translation: Translation, key: str) -> None:
        learned = bool(translation.switch(key)) == is_prompt_learned
        translation.dataset_wide.append((key, "mask_prompt", str(not learned)))
        translation.claim(key)

    return rule


def held_out(translation: Translation, key: str) -> None:
    """The share of training rows for validation; from 1 on it counts rows."""
    if (translation.number(key) or 0) < 0:
        translation.refuse(key, "is below 0; give a share of the rows, or their number")
    translation.fraction = (key, translation.text(key) or "0")
    translation.claim(key)


def trackers(translation: Translation, key: str) -> None:
    """Where metrics go: `none`, `wandb`, `tensorboard`, or several of them."""
    for name in translation.names(key):
        if name in ("wandb", "tensorboard"):
            translation.set(key, f"use_{name}", "True")
        elif name == "all":
            translation.missing(key, "give --use_wandb or --use_tensorboard")
        elif name in ("none", "no", "csv", "disk", "false"):
            translation.needless(key, "metrics.jsonl is always written")
        else:
            translation.missing(key, f"no run reports to {name}; --use_wandb, --use_tensorboard, or metrics.jsonl")
    if not translation.names(key):
        translation.needless(key, "metrics.jsonl is always written")


def wandb(translation: Translation, key: str) -> None:
    """A project or name of Weights & Biases, which its own variables say."""
    variable = key.rpartition(".")[2].upper()
    translation.set(key, "use_wandb", "True", ends=False)
    translation.needless(key, f"the variable {variable} says it")


def attention(translation: Translation, key: str) -> None:
    """The kernels of attention."""
    text = (translation.text(key) or "").lower()
    if text == "eager":
        translation.missing(key, "attention is fused if the model has it; there is no flag for plain products")
    elif text in ("false", "disabled"):
        translation.needless(key, "PyTorch's fused kernels are used if the model has them")
    else:
        translation.needless(key, "fused kernels are used if the model has them; --use_fast_kernels insists on them")


def recomputed(translation: Translation, key: str) -> None:
    """Whether activations are recomputed."""
    text = (translation.text(key) or "").lower()
    if translation.given("activation_checkpointing") is not None:
        translation.needless(key, "another key says what is recomputed")
    elif text in ("offload", "offload_disk"):
        translation.set(key, "activation_checkpointing", "full")
        translation.set(key, "activation_offloading", "True")
    elif text == "unsloth":
        translation.set(key, "activation_checkpointing", "full")
    else:
        translation.set(key, "activation_checkpointing", "full" if translation.switch(key) else "off")


def packed(translation: Translation, key: str) -> None:
    """Whether rows hold several sequences."""
    translation.set(key, "batching_strategy", "packing" if translation.switch(key) else "padding")


_ALL = (["all"], ["all-linear"], ["all_linear"])


def targets(translation: Translation, key: str) -> None:
    """The layers that get an adapter; `all` and `all-linear` are every one but the head."""
    names = translation.names(key)
    if names in _ALL:
        translation.set(key, "lora_config.target_modules", ["all-linear"])
    elif any(re.search(r"[^\w.]", name) for name in names):
        _targets_of_pattern(translation, key, translation.text(key) or "")
    else:
        _add_targets(translation, key, names)


def target_parameters(modules: str, takes_all: Callable[[Translation], bool] = lambda _: False) -> Rule:
    """Experts that get an adapter, by the names of their parameters: targets like the layers in the key `modules`.

    Args:
        takes_all: whether another key says that every linear layer is adapted.
    """

    def rule(translation: Translation, key: str) -> None:
        names = translation.names(key)
        if not names:
            translation.needless(key, "no parameter is named")
        elif translation.names(modules) in _ALL or takes_all(translation):
            translation.needless(key, "all-linear adapts every expert, too")
        else:
            _add_targets(translation, key, names)
            if not translation.names(modules):
                translation.notes.append(f"{key}: alone; name the layers that peft adds for this type of model")

    return rule


def _add_targets(translation: Translation, key: str, names: Sequence[str]) -> None:
    """Set the targets to those of all keys so far."""
    setting = "lora_config.target_modules"
    before = translation.given(setting)
    if isinstance(before, list) and before != ["all-linear"]:
        translation.widen(setting, [*dict.fromkeys([*before, *names])])
        names = translation.given(setting) or []
    translation.set(key, setting, [*names])


def _targets_of_pattern(translation: Translation, key: str, pattern: str) -> None:
    """The names at the end of a regular expression like `model.layers.[\\d]+.(mlp|self_attn).(up|down|q|v)_proj`."""
    found = re.search(r"(?:\.|^)(\w*)\((\w+(?:\|\w+)*)\)(\w*)\$?$", pattern)
    if found is None:
        translation.missing(key, "a pattern; name the layers, or give --lora_config.target_modules all-linear")
        return
    names = [f"{found[1]}{one}{found[3]}" for one in found[2].split("|")]
    _add_targets(translation, key, names)
    translation.notes.append(f"{key}: layers of these names get an adapter wherever they are, not as the pattern says")


def new_tokens(translation: Translation, key: str) -> None:
    """Tokens that the tokenizer gets."""
    if names := translation.names(key):
        translation.set(key, "add_special_tokens", names)
    else:
        translation.needless(key, "no token is added")
