"""The optimizers that --optimizer names, with the facts of each that the command line needs.

Flags are checked before torch is imported, which takes seconds, so this stands apart from the optimizers themselves,
`policies/optimizers/NAME.py`, NAME in lower case. To add one, see CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_STEPS_ON_HOST = (
    "8-bit states save GPU memory, but this keeps them in host memory, where 8-bit steps are slow; {}, or --optimizer "
    "AdamW"
)
_IN_8_BITS = _STEPS_ON_HOST.format("give --optimizer PagedAdamW8bit instead of this")
_PAGED = _STEPS_ON_HOST.format("leave this out")
_WHOLE = "Muon makes whole matrices orthogonal, by products that a CPU takes minutes for; leave one of them out"


@dataclass(frozen=True)
class ListedOptimizer:
    """One optimizer, as --help shows it and as its flags are checked.

    Attributes:
        help: a clause for --help.
        settings: the settings that it reads, of those that not every optimizer has. Others of them are refused.
        momentum: the default of --momentum.
        compiles: whether --compile_optimizer applies.
        conflicts: switches that cannot be on, and for each the reason and the remedy.
        spellings: other names of it, in lower case.
        other_values: for other tools' values of this flag, in lower case, that are refused: the flags to give besides.
    """

    help: str
    settings: tuple[str, ...] = ()
    momentum: float | None = None
    compiles: bool = False
    conflicts: Mapping[str, str] = field(default_factory=dict)
    spellings: tuple[str, ...] = ()
    other_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


_BETAS = ("adam_beta1", "adam_beta2")

OPTIMIZERS: dict[str, ListedOptimizer] = {
    "AdamW": ListedOptimizer(
        "fused",
        settings=_BETAS,
        compiles=True,
        spellings=("adamw_torch", "adamw_torch_fused", "adamw_hf"),
        other_values={"paged_adamw_32bit": {"optimizer_cpu_offload": "True"}},
    ),
    "SGD": ListedOptimizer("with momentum", settings=("momentum",), momentum=0.9),
    "anyprecision": ListedOptimizer(
        "AdamW with states in bf16",
        settings=(*_BETAS, "momentum_dtype", "variance_dtype", "use_kahan_summation"),
        spellings=("adamw_anyprecision", "anyprecision_adamw", "anyprecisionadamw"),
    ),
    "AdamW8bit": ListedOptimizer(
        "AdamW with states in 8 bits",
        settings=_BETAS,
        conflicts={"fsdp_cpu_offload": _IN_8_BITS, "optimizer_cpu_offload": _IN_8_BITS},
        spellings=("adamw_8bit", "adamw_bnb_8bit"),
        other_values={name: {} for name in ("adam_8bit", "adam8bit", "adamw_torch_8bit")},
    ),
    "PagedAdamW8bit": ListedOptimizer(
        "AdamW8bit with states that move to host memory if the GPU's is full",
        settings=_BETAS,
        conflicts={"fsdp_cpu_offload": _PAGED, "optimizer_cpu_offload": _PAGED},
        spellings=("paged_adamw_8bit", "paged_adamw8bit"),
    ),
    "Muon": ListedOptimizer(
        "orthogonal updates of the matrices of layers, and AdamW for the rest",
        settings=("momentum", *_BETAS),
        momentum=0.95,
        conflicts={"fsdp_cpu_offload": _WHOLE, "optimizer_cpu_offload": _WHOLE},
    ),
    "Adafactor": ListedOptimizer(
        "almost no states, and lr relative to the weights",
        conflicts={
            "optimizer_cpu_offload": ("Adafactor has almost no states to keep in host memory; leave one of them out")
        },
    ),
}
"""By the names that users type, in the order of --help."""


def optimizers_with(setting: str) -> list[str]:
    """The names of the optimizers that read this setting; all others refuse it."""
    return [name for name, listed in OPTIMIZERS.items() if setting in listed.settings]


SETTINGS_OF_SOME = tuple(dict.fromkeys(setting for listed in OPTIMIZERS.values() for setting in listed.settings))
"""The settings that not every optimizer has, each once."""
