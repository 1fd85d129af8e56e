"""Settings that `accelerate launch` hands to a process in variables and a run ignores, since its own flags decide."""

from __future__ import annotations

from collections.abc import Mapping

_STARTED_BY = "ACCELERATE_MIXED_PRECISION"  # it always sets this one
_OFF = ("", "no", "false", "0", "none")
_INSTEAD = {
    "ACCELERATE_MIXED_PRECISION": "give --mixed_precision True|False, --use_fp16 or --pure_bf16",
    "ACCELERATE_USE_FSDP": "give --enable_fsdp, with --sharding_strategy and --fsdp_cpu_offload",
    "ACCELERATE_USE_DEEPSPEED": "give --enable_fsdp, and --optimizer_cpu_offload for its offload",
    "ACCELERATE_USE_MEGATRON_LM": "give --enable_fsdp",
    "ACCELERATE_DYNAMO_BACKEND": "give --compile",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "give --gradient_accumulation_steps",
    "ACCELERATE_USE_CPU": "hide the GPUs with CUDA_VISIBLE_DEVICES=''",
}
_PREFIXES = ("FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "ACCELERATE_DYNAMO_", "ACCELERATE_DEEPSPEED_")


def not_followed(variables: Mapping[str, str], *, has_gpu: bool) -> list[str]:
    """A line for each setting that is not followed; none if accelerate did not start this process.

    Args:
        variables: of the environment.
        has_gpu: whether the run uses a GPU.
    """
    if _STARTED_BY not in variables:
        return []
    lines = []
    for name, value in sorted(variables.items()):
        is_detail = name not in _INSTEAD and name.startswith(_PREFIXES)
        holds_anyway = (name, value) == ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") or (
            name == "ACCELERATE_USE_CPU" and not has_gpu
        )
        if name.startswith("ACCELERATE_") and value.lower() not in _OFF and not is_detail and not holds_anyway:
            remedy = _INSTEAD.get(name, "the flags of this run decide")
            lines.append(f"accelerate launch: {name}={value} is not followed; {remedy}")
    if prefixes := [prefix for prefix in _PREFIXES[:3] if any(name.startswith(prefix) for name in variables)]:
        named = ", ".join(f"{prefix}*" for prefix in prefixes)
        lines.append(f"accelerate launch: its variables {named} are not followed; the flags of this run decide")
    if "RANK" not in variables and "MASTER_ADDR" in variables:
        lines.append(
            "accelerate launch: it was asked for several processes and started one; add its --multi_gpu, or start with "
            "torchrun --nproc_per_node"
        )
    return lines
