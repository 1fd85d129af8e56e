"""Other tools' values of our settings, in lower case, and the flags that mean the same.

Hints name them, and `python -m tools.translate` sets them.
"""

from collections.abc import Mapping

from configs.optimizers import OPTIMIZERS

_4_BIT = {"quantization": "4bit"}
_8_BIT = {"quantization": "8bit"}
_FP4 = {"quantization": "4bit", "quant_type": "fp4"}
_DOUBLE = {"use_double_quant": "True"}
_KEEP_WEIGHTS = {"sharding_strategy": "SHARD_GRAD_OP"}
_SHARD_ALL = {"sharding_strategy": "FULL_SHARD"}

OTHER_VALUES: dict[str, dict[str, Mapping[str, str]]] = {
    "peft_method": {
        "none": {"use_peft": "False"},
        "qlora": {"peft_method": "lora", **_4_BIT},
        "dora": {"peft_method": "lora", "use_dora": "True"},
    },
    "quantization": {
        **dict.fromkeys(("4", "int4", "nf4", "bnb.nf4"), _4_BIT),
        **dict.fromkeys(("8", "int8", "bnb.int8"), _8_BIT),
        **dict.fromkeys(("fp4", "bnb.fp4"), _FP4),
        "bnb.nf4-dq": _4_BIT | _DOUBLE,
        "bnb.fp4-dq": _FP4 | _DOUBLE,
    },
    "mixed_precision": {
        "bf16": {"mixed_precision": "True"},
        "fp16": {"use_fp16": "True"},
        "fp8": {"float8": "tensorwise"},
    },
    "activation_checkpointing": {
        "true": {"activation_checkpointing": "full"},
        "false": {"activation_checkpointing": "off"},
    },
    "batching_strategy": {"true": {"batching_strategy": "packing"}, "false": {"batching_strategy": "padding"}},
    "scheduler": {
        "constant_with_warmup": {"scheduler": "constant", "warmup_steps": ""},
        "linear_with_warmup": {"scheduler": "linear", "warmup_steps": ""},
        "cosine_with_warmup": {"scheduler": "cosine", "warmup_steps": ""},
        "cosine_with_min_lr": {"scheduler": "cosine", "min_lr": ""},
    },
    "optimizer": {
        value: {"optimizer": name, **others}
        for name, listed in OPTIMIZERS.items()
        for value, others in listed.other_values.items()
    },
    "init_lora_weights": {
        "true": {"init_lora_weights": "default"},
    },
    "loss_type": {
        **{name: {"loss_type": "cross_entropy"} for name in ("nll", "chunked_nll")},
        **{name: {"loss_type": "dpo"} for name in ("sigmoid",)},
    },
    "sharding_strategy": {
        "ddp": {"enable_fsdp": "False"},
        "deepspeed": _SHARD_ALL,
        **dict.fromkeys(("zero2", "zero-2", "shard_grad_op auto_wrap"), _KEEP_WEIGHTS),
        **dict.fromkeys(("zero3", "zero-3", "full_shard auto_wrap"), _SHARD_ALL),
    },
}
"""By setting and value. An empty value belongs to a flag whose value the file or the user must give."""

_FOLLOWS_ROWS = "its frequencies follow the longest row so far, so a loss would depend on other rows; give yarn"
_SEARCHED = "its factors are found by a search for each model; yarn needs none"

_ONE_BY_ONE = "it learns from answers that are labelled one by one; of pairs give dpo, simpo or orpo"
_OTHER_PAIRS = "it is no loss here; of pairs there are dpo, simpo and orpo"

NOT_HERE: dict[str, dict[str, str]] = {
    "loss_type": {
        **dict.fromkeys(("kto", "kto_pair", "bco", "bco_pair"), _ONE_BY_ONE),
        **dict.fromkeys(
            (
                "ipo",
                "hinge",
                "cpo",
                "robust",
                "exo_pair",
                "nca_pair",
                "sppo_hard",
                "aot",
                "aot_pair",
                "aot_unpaired",
                "discopop",
            ),
            _OTHER_PAIRS,
        ),
        **dict.fromkeys(("apo_zero", "apo_down", "sigmoid_norm", "alphapo", "sft"), _OTHER_PAIRS),
    },
    "rope_scaling": {
        **dict.fromkeys(("dynamic", "ntk"), _FOLLOWS_ROWS),
        **dict.fromkeys(("longrope", "su"), _SEARCHED),
    },
}
"""Why a value is none here, by setting and value."""


def value_hint(setting: str, value: str) -> str:
    """What to write instead of a value of other tools, as a clause; empty if the value is unknown."""
    if why := NOT_HERE.get(setting, {}).get(value.lower()):
        return why
    flags = dict(OTHER_VALUES.get(setting, {}).get(value.lower(), {}))
    if not flags:
        return ""
    if flags == {"use_peft": "False"}:
        return "to train all weights, leave --use_peft and this out"
    own = flags.pop(setting, None)
    written = [f"--{name}" if given in ("True", "") else f"--{name} {given}" for name, given in flags.items()]
    if own is None:
        return f"here it is {' and '.join(written)}"
    return f"here it is {own}" + (f", with {' and '.join(written)}" if written else "")
