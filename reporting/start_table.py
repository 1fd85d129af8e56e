"""The table that is printed before a run's first step. Each line begins with its subject, for eyes and for grep."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from configs.fsdp import FsdpConfig
from configs.optimizers import OPTIMIZERS
from configs.quantization import QuantizationConfig
from configs.run import RunConfig
from configs.training import TrainConfig
from ranks.environment import Environment
from reporting.tables import table_of, value_range
from utils.units import readable
from utils.wording import plural


def start_table(
    config: RunConfig, env: Environment, start: dict[str, Any], resolved: dict[str, Any], description: dict[str, Any]
) -> Table:
    """The table of a run before its first step.

    Args:
        start: the `start` event.
        resolved: the settings as decided for this machine and model.
        description: of `reporting.run_description.describe_run`.
    """
    train, fsdp = config.train_config, config.fsdp_config
    rows = {
        "model": _model(train, description["model"]),
        "trained": _trained(config, description["model"]),
        "layout": _layout(env, resolved, description["devices"]),
        "compute": _compute(train, config.quantization_config, resolved),
        "optimizer": _optimizer(train, fsdp, resolved["lr"], train.warmup_of(start["num_steps"])),
        "devices": "; ".join(_device(group) for group in description["devices"]),
        "data": f"{train.dataset}: {_data(train, resolved, description['data'])}",
        "steps": _steps(config, start, resolved, env.world_size),
        "checkpoints": _checkpoints(train, resolved),
    }
    return table_of(rows)


def _model(train: TrainConfig, model: dict[str, Any]) -> str:
    by_dtype = model["num_parameters_by_dtype"]
    count = f"{model['num_parameters']:,}"
    dtypes = ", ".join(dtype if len(by_dtype) == 1 else f"{n:,} in {dtype}" for dtype, n in by_dtype.items())
    random = ", random weights" if train.random_weights else ""
    return f"{train.model_name} ({model['architecture']}{random}), {count} parameters ({dtypes})"


def _trained(config: RunConfig, model: dict[str, Any]) -> str:
    train, trained, total = config.train_config, model["num_trainable_parameters"], model["num_parameters"]
    if trained == total:
        return "all parameters"
    what = f"{trained:,} parameters, {100 * trained / total:.3g} %"
    if train.from_peft_checkpoint:
        return f"{what}: the adapter of {train.from_peft_checkpoint}"
    return f"{what}: {_adapter(config)}" if train.use_peft else what


def _adapter(config: RunConfig) -> str:
    lora, prompts = config.lora_config, config.llama_adapter_config
    if config.train_config.peft_method == "llama_adapter":
        return f"llama_adapter of {prompts.adapter_len} tokens in at most {prompts.adapter_layers} layers"
    if config.train_config.peft_method == "prefix":
        return f"prefix of {config.prefix_config.num_virtual_tokens} tokens"
    kinds = (("rslora", lora.use_rslora), ("dora", lora.use_dora))
    more = "".join(f" {name}" for name, used in kinds if used)
    return f"lora{more} r={lora.r} on {', '.join(lora.target_modules)}"


def _layout(env: Environment, resolved: dict[str, Any], devices: list[dict[str, Any]]) -> str:
    copies, ranks = resolved["mesh_shape"]
    if env.world_size == 1:
        over = "one process"
    elif ranks == 1:
        over = f"{copies} whole copies of the model, one on each rank"
    elif copies == 1:
        over = f"one copy of the model over {ranks} ranks"
    else:
        over = f"{copies} copies of the model, each over {ranks} ranks"
    hosts = len({group["host"] for group in devices})
    return f"{resolved['sharding_strategy']}: {over}, on {plural(hosts, 'host')}"


def _compute(train: TrainConfig, quantized: QuantizationConfig, resolved: dict[str, Any]) -> str:
    apart = f" (quantized layers {quantized.compute_dtype})" if quantized.compute_dtype else ""
    apart += f" (linear layers float8, {train.float8})" if train.float8 else ""
    return (
        f"{resolved['precision']}{apart}, activation checkpointing {resolved['activation_checkpointing']}, "
        f"{'compiled layers' if train.compile else 'not compiled'}"
    )


def _optimizer(train: TrainConfig, fsdp: FsdpConfig, lr: float, warmup_steps: int) -> str:
    schedule = f"{train.scheduler} (gamma {train.gamma:g})" if train.scheduler == "step" else train.scheduler
    schedule += f" to at least {train.min_lr:g}" if train.min_lr else ""
    warmup = f" after {plural(warmup_steps, 'step')} of warm-up" if warmup_steps else ""
    clips = f"clipping at {train.gradient_clipping_threshold:g}" if train.gradient_clipping else "no clipping"
    decays = "" if train.decay_norms_and_biases else " (not of norms and biases)"
    betas = (train.adam_beta1, train.adam_beta2)  # shown unless they are the defaults
    name = _name(fsdp) + (f" (betas {betas[0]:g}, {betas[1]:g})" if betas != (0.9, 0.999) else "")
    return f"{name}, lr {lr:g} {schedule}{warmup}, weight decay {train.weight_decay:g}{decays}, {clips}"


def _name(fsdp: FsdpConfig) -> str:
    own = [f"{field} {getattr(fsdp, field)}" for field in OPTIMIZERS[fsdp.optimizer].settings if hasattr(fsdp, field)]
    return f"{fsdp.optimizer} ({', '.join(own)})" if own else fsdp.optimizer


def _device(group: dict[str, Any]) -> str:
    ranks = len(group["ranks"])
    held = f"host memory {value_range(group['host_rss_gib'])} GiB per rank"
    if "allocated_gib" not in group:
        return f"{group['device']} on {group['host']}, {group['memory_gib']:g} GiB; after loading {held}"
    allocated = value_range(group["allocated_gib"])
    return (
        f"{ranks} x {group['device']} on {group['host']}, {group['memory_gib']:g} GiB each; "
        f"after loading {allocated} GiB, {held}"
    )


def _data(train_config: TrainConfig, resolved: dict[str, Any], data: dict[str, Any]) -> str:
    def split(name: str, part: dict[str, Any]) -> str:
        counts = (plural(part[f"num_{noun}s"], noun) for noun in ("sample", "token", "row"))
        return f"{name} {', '.join(counts)}"

    train = "train streamed" if data["train"].get("streamed") else split("train", data["train"])
    strategy = train_config.batching_strategy
    limits = f"rows of at most {resolved.get('context_length')} tokens"
    if "packed_length" in resolved:
        limits = (
            f"rows are filled with {resolved['packed_length']} tokens; a sample may have {resolved['context_length']}"
        )
    if "context_length" not in resolved:  # an encoder-decoder's sources and targets have lengths of their own
        limits = ", ".join(f"{name} {length}" for name, length in resolved.items() if name.endswith("_length"))
    validation = split("validation", data["validation"]) if data["validation"] else "no validation"
    return f"{train}; {validation} ({strategy}, {limits})"


def _steps(config: RunConfig, start: dict[str, Any], resolved: dict[str, Any], world_size: int) -> str:
    train, num_sharing = config.train_config, config.fsdp_config.context_parallel_size
    over = plural(world_size, "rank")
    if num_sharing > 1:
        over = f"{plural(world_size // num_sharing, 'group')} of {num_sharing} ranks that share rows"
    streams = start["num_train_rows"] is None
    epoch = "passes over the stream are said as they end" if streams else f"{start['steps_per_epoch']} per epoch"
    return (
        f"{start['num_steps']} ({epoch}) of {plural(resolved['global_batch_size'], 'row')} "
        f"= {train.batch_size_training} per micro-batch x {resolved['gradient_accumulation_steps']} "
        f"x {over}"
    )


def _checkpoints(train: TrainConfig, resolved: dict[str, Any]) -> str:
    times = {
        "at each epoch's end": train.save_every_steps is None,
        f"every {plural(train.save_every_steps or 0, 'step')}": bool(train.save_every_steps),
        f"every {train.save_every_minutes:g} minutes": bool(train.save_every_minutes),
        "at the best evaluation": train.keep_best,
    }
    when = [text for text, holds in times.items() if holds]
    if not when:
        return "none, unless the run is asked to stop"
    size = readable(resolved["checkpoint_bytes"])
    return f"{', '.join(when)}; the last {resolved['keep_last']} are kept, about {size} each"
