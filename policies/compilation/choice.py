"""Whether a run compiles its layers, if --compile auto leaves that open, and the step of its optimizer with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedConfig

from configs.adaptation import CANNOT_TRACE_DORA, why_not_compiled, why_optimizer_not_compiled
from configs.run import RunConfig
from policies.linear_attention.choice import why_slow_to_compile
from utils.device import DeviceFacts

KNOWN_TO_COMPILE = frozenset(
    ("gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
).union(("qwen3_moe", "stablelm"))
"""The model types whose layers a plan takes to be compiled under --compile auto (docs/compiling.md). A run tries its
own layers instead (`policies.compilation.trial`)."""

COMPILING_SECONDS = 10.0
"""What compiling adds to a start at least, with torch's caches filled: TinyLlama-1.1B's shape on an H100, torch 2.11,
25 November 2026, from the command to the end of step 3: 34.0 s, and 23.6 uncompiled; 39.7 with empty caches."""


def decide_compilation(
    config: RunConfig,
    model_config: PreTrainedConfig,
    device: DeviceFacts,
    *,
    was_compiled: bool | None = None,
    is_planned: bool = False,
) -> RunConfig:
    """The settings with --compile auto and --compile_optimizer decided, provided the layers pass their trial.

    A note says why the first is False; not on a CPU, where nobody expects it to be True who did not ask.

    Args:
        model_config: of transformers.
        device: that the run computes on.
        was_compiled: whether the checkpoint that the run goes on from was trained compiled; None: unknown, or there is
            none.
        is_planned: the device is not here, so layers are not tried.

    Raises:
        ConfigError: if the settings of the adapter that is trained on cannot be read.
    """
    compiles = config.train_config.compile
    if compiles is not None:
        return _decided(config, compiles=compiles)
    obstacle = _what_hinders(config, device, was_compiled) or why_slow_to_compile(model_config)
    if obstacle is None and is_planned and model_config.model_type not in KNOWN_TO_COMPILE:
        obstacle = (
            f"a run tries at its start whether {model_config.model_type} layers compile; the plan takes it that they "
            "do not; give --compile to plan with compiled layers"
        )
    if obstacle is None:
        return _decided(config, compiles=True)
    is_expected = device.type == "cpu" and not was_compiled and not config.was_given("train_config.compile")
    return _decided(config, compiles=False) if is_expected else uncompiled(config, obstacle)


def why_too_short(seconds_per_run: float | None) -> str | None:
    """Why a run that takes so long by its plan is not to be compiled, as a clause; None if it may be.

    Args:
        seconds_per_run: of all its steps and evaluations; None if they could not be planned.
    """
    if seconds_per_run is None or seconds_per_run >= COMPILING_SECONDS:
        return None
    return (
        f"the whole run is planned to take {seconds_per_run:.2g} s, and compiling takes {COMPILING_SECONDS:.0f} at "
        "least; give --compile to compile all the same"
    )


def uncompiled(config: RunConfig, why: str) -> RunConfig:
    """The settings with --compile auto as False, and a note that says why.

    Args:
        why: a clause.
    """
    config = _decided(config, compiles=False)
    return replace(config, notes=(*config.notes, f"--compile auto is False: {why}"))


def _decided(config: RunConfig, *, compiles: bool) -> RunConfig:
    fsdp = config.fsdp_config
    if not config.was_given("fsdp_config.compile_optimizer"):
        fsdp = replace(fsdp, compile_optimizer=compiles and why_optimizer_not_compiled(config) is None)
    return replace(config, train_config=replace(config.train_config, compile=compiles), fsdp_config=fsdp)


def _what_hinders(config: RunConfig, device: DeviceFacts, was_compiled: bool | None) -> str | None:
    """Why this run does not try to compile, as a clause."""
    if device.type == "cpu":
        return "it is for GPUs; give --compile to compile on a CPU"
    if (reason := why_not_compiled(config)) is not None:
        return reason
    if path := config.train_config.from_peft_checkpoint:
        from policies.adapters.saved import read_adapter_config  # peft takes seconds to import

        settings = read_adapter_config(Path(path).expanduser(), "--from_peft_checkpoint")
        if getattr(settings, "use_dora", False):
            return CANNOT_TRACE_DORA
    if was_compiled is False:
        return "the checkpoint was trained uncompiled; give --compile to compile from here on"
    return None
