"""Apply a tool's rules to a source, key by key, and check what comes out."""

from __future__ import annotations

import re

from configs.flags import build_config
from configs.hints import HINTS
from configs.names import find, flag
from configs.renamed import RENAMED
from configs.run import SETTINGS
from configs.unsupported_flags import MISSING, NEEDLESS
from tools.translate.data import put_together
from tools.translate.source import Source, below, with_references
from tools.translate.translation import Tool, Translation
from utils.errors import ConfigError

_EMPTY = "it is empty"


def translate(source: Source, tool: Tool) -> Translation:
    """The settings of a source, and the end of each of its keys.

    Raises:
        ConfigError: if a value is none of its key's, or the file trains something that no run here trains.
    """
    if tool.has_references:
        source = with_references(source)
    translation = Translation(source, tool.trains_adapter(source.tree))
    _walk(translation, tool, "")
    tool.finish(translation)
    put_together(translation)
    _leave_out_what_is_idle(translation)
    _leave_out_what_is_refused(translation)
    forgotten = [key for key in source.leaves() if key not in translation.outcomes]
    assert not forgotten, forgotten
    return translation


def _walk(translation: Translation, tool: Tool, key: str) -> None:
    """End all keys below this one, in the order of the file."""
    value = translation.value(key) if key else translation.source.tree
    if isinstance(value, list):
        below_it = [f"{key}[{index}]" for index in range(len(value))]
    else:
        below_it = [below(key, name) for name in value]
    for one in below_it:
        found = translation.value(one)
        plain = re.sub(r"\[\d+\]", "", one)
        rule = None if isinstance(value, list) else tool.rules.get(plain)  # a list's rule was the list's own
        if found is None:
            translation.needless(one, _EMPTY)
        elif rule is not None:
            rule(translation, one)
        elif isinstance(found, dict) and one in RENAMED and not _is_group(tool, one):
            _take_over(translation, one, RENAMED[one])  # refuses it
        # What a rule left, and keys without one.
        leaves = [leaf for leaf in translation.source.leaves(one) if leaf not in translation.outcomes]
        if leaves == [one]:
            _end_by_name(translation, tool, one)
        elif leaves and isinstance(found, dict | list):
            _walk(translation, tool, one)


def _is_group(tool: Tool, key: str) -> bool:
    """Whether the tool has a mapping there."""
    return key in tool.groups or any(name.startswith(f"{key}.") for name in {**tool.rules, **tool.needless})


def _end_by_name(translation: Translation, tool: Tool, key: str) -> None:
    """End a key that has no rule, by its name."""
    group, _, name = key.rpartition(".")
    value = translation.value(key)
    known = not group or group in tool.groups
    if why := tool.needless.get(key) or tool.needless.get(name):
        translation.needless(key, why)
    elif why := tool.missing.get(key) or tool.missing.get(name):
        translation.missing(key, why)
    elif value is None:
        translation.needless(key, _EMPTY)
    elif known and name in RENAMED:
        _take_over(translation, key, RENAMED[name])
    elif why := NEEDLESS.get(name):
        translation.needless(key, why)
    elif why := MISSING.get(name):
        if isinstance(value, str) and value.lower() in ("false", "no", "0", "none"):
            translation.needless(key, "it is off, and so it is here")
        else:
            translation.missing(key, why)
    elif known and len(find(name)) == 1:
        _take_over(translation, key, name)
    elif name in HINTS:
        translation.missing(key, f"not translated; here it is {HINTS[name]}")
    else:
        translation.missing(key, "no setting here has this meaning")


def _take_over(translation: Translation, key: str, setting: str) -> None:
    """Take a value over as it is. Whole numbers may be written as 3.0."""
    value = translation.value(key)
    kind = SETTINGS[find(setting)[0]].kind
    if isinstance(value, str) and kind in (int, int | None) and re.fullmatch(r"-?\d+\.0+", value):
        value = value.partition(".")[0]
    if isinstance(value, str) and kind in (int, int | None) and re.fullmatch(r"\d[\d_]*\d", value):
        value = value.replace("_", "")  # as YAML reads 500_000
    if isinstance(value, dict):
        translation.refuse(key, f"is a group of settings, and {flag(find(setting)[0])} has one value; give that")
    translation.set(key, setting, value if isinstance(value, str) else translation.names(key))


_WITHOUT_ADAPTER = ("lora_config", "quantization_config", "prefix_config", "llama_adapter_config")
_EVALUATION = ("eval_every_steps", "evals_per_epoch", "eval_before_training", "eval_generate", "keep_best")


def _leave_out_what_is_idle(translation: Translation) -> None:
    """Take settings back that this tool refuses since they would have no effect."""
    if translation.given("use_peft") is None:
        for dotted in list(translation.settings):
            if dotted.split(".")[0] in _WITHOUT_ADAPTER or dotted in ("train_config.from_peft_checkpoint",):
                translation.take_back(dotted, "needless", "no adapter is trained")
    if translation.given("run_validation") == "False":
        for setting in (*_EVALUATION, "val_batch_size", "max_eval_step"):
            translation.take_back(setting, "needless", "nothing is evaluated")
    if translation.given("quantization") != "4bit":
        for setting in ("quant_type", "use_double_quant"):
            translation.take_back(setting, "needless", "the base is not in 4 bits")
    if translation.given("quantization") is None:
        for setting in ("compute_dtype", "quant_storage"):
            translation.take_back(setting, "needless", "the base is not quantized")
    if translation.given("enable_fsdp") is None:
        for setting in ("sharding_strategy", "fsdp_cpu_offload", "wrap"):
            translation.take_back(setting, "needless", "nothing is sharded")
    if translation.given("warmup_steps") not in (None, "0") and translation.given("warmup_ratio") is not None:
        translation.take_back("warmup_ratio", "needless", "steps of warm-up are given, and go before a ratio")
    if translation.given("warmup_steps") == "0":
        translation.take_back("warmup_steps", "needless", "no warm-up is the default")


_MOST_CONFLICTS = 20


def _leave_out_what_is_refused(translation: Translation) -> None:
    """Take settings back that contradict others here, with the refusal as the reason."""
    for _ in range(_MOST_CONFLICTS):
        flags = {
            dotted: given.value if isinstance(given.value, str) else ",".join(given.value)
            for dotted, given in translation.settings.items()
        }
        try:
            build_config({"train_config.model_name": "M", **flags})
        except ConfigError as error:
            (text, *_) = error.parts()
            found = re.match(r"--([\w.]+): ", text)
            dotted = find(found[1])[0] if found and find(found[1]) else ""
            if dotted not in translation.settings or dotted in ("train_config.dataset", "train_config.model_name"):
                raise ConfigError(
                    f"{translation.source.name}: its settings contradict each other here: {text}"
                ) from error
            translation.take_back(dotted, "missing", f"refused here: {text}")
        else:
            return
    raise ConfigError(f"{translation.source.name}: more than {_MOST_CONFLICTS} of its settings are refused here")
