"""What a person sees of a run at its start and at its end: each line begins with its subject, for eyes and for grep."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.fsdp import FsdpConfig
from configs.run import RunConfig
from configs.training import TrainConfig
from reporting.log_line import clock
from reporting.run_yaml import read_run_yaml
from utils.environment import Environment
from utils.units import readable

LOG_WIDTH = 110  # a log file has no width of its own


def start_table(
    config: RunConfig, env: Environment, start: dict[str, Any], resolved: dict[str, Any], description: dict[str, Any]
) -> Table:
    """The run in one glance, before its first step.

    Args:
        start: the `start` event.
        resolved: what the settings came to on this machine.
        description: what `reporting.run_description.describe_run` returned.
    """
    rows = {
        "model": _model(config, description["model"]),
        "trained": _trained(config, description["model"]),
        "layout": _layout(env, resolved, description["devices"]),
        "compute": _compute(config, resolved),
        "optimizer": _optimizer(config),
        "devices": "; ".join(_device(group) for group in description["devices"]),
        "data": f"{config.train_config.dataset}: {_data(config, resolved, description['data'])}",
        "steps": _steps(config, start, resolved, env.world_size),
        "checkpoints": _checkpoints(config, resolved),
    }
    return table_of(rows)


def table_of(rows: dict[str, str]) -> Table:
    """Subjects and what there is to say of them."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for subject, text in rows.items():
        table.add_row(subject, text)
    return table


def _model(config: RunConfig, model: dict[str, Any]) -> str:
    by_dtype = model["num_parameters_by_dtype"]
    count = f"{model['num_parameters']:,}"
    dtypes = ", ".join(dtype if len(by_dtype) == 1 else f"{n:,} in {dtype}" for dtype, n in by_dtype.items())
    random = ", random weights" if config.train_config.random_weights else ""
    return f"{config.train_config.model_name} ({model['architecture']}{random}), {count} parameters ({dtypes})"


def _trained(config: RunConfig, model: dict[str, Any]) -> str:
    trained, total = model["num_trainable_parameters"], model["num_parameters"]
    if trained == total:
        return "all parameters"
    what = f"{trained:,} parameters, {100 * trained / total:.3g} %"
    if config.train_config.from_peft_checkpoint:
        return f"{what}: the adapter of {config.train_config.from_peft_checkpoint}"
    return f"{what}: {_adapter(config)}" if config.train_config.use_peft else what


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
    return f"{resolved['sharding_strategy']}: {over}, on {hosts} host(s)"


def _compute(config: RunConfig, resolved: dict[str, Any]) -> str:
    quantized = config.quantization_config
    apart = f" (quantized layers {quantized.compute_dtype})" if quantized.compute_dtype else ""
    return (
        f"{resolved['precision']}{apart}, activation checkpointing {resolved['activation_checkpointing']}, "
        f"{'compiled layers' if config.train_config.compile else 'not compiled'}"
    )


def _optimizer(config: RunConfig) -> str:
    train = config.train_config
    schedule = f"{train.scheduler} (gamma {train.gamma:g})" if train.scheduler == "step" else train.scheduler
    warmup = f" after {train.warmup_steps} steps of warm-up" if train.warmup_steps else ""
    clips = f"clipping at {train.gradient_clipping_threshold:g}" if train.gradient_clipping else "no clipping"
    decays = "" if train.decay_norms_and_biases else " (not of norms and biases)"
    return (
        f"{_name(config.fsdp_config)}, lr {train.lr:g} {schedule}{warmup}, "
        f"weight decay {train.weight_decay:g}{decays}, {clips}"
    )


def _name(fsdp: FsdpConfig) -> str:
    if fsdp.optimizer != "anyprecision":
        return fsdp.optimizer
    kahan = ", Kahan summation" if fsdp.use_kahan_summation else ""
    return f"anyprecision (momentum {fsdp.momentum_dtype}, variance {fsdp.variance_dtype}{kahan})"


def _device(group: dict[str, Any]) -> str:
    ranks = len(group["ranks"])
    held = f"host memory {_range(group['host_rss_gib'])} GiB per rank"
    if "allocated_gib" not in group:
        return f"{group['device']} on {group['host']}, {group['memory_gib']:g} GiB; after loading {held}"
    allocated = _range(group["allocated_gib"])
    return (
        f"{ranks} x {group['device']} on {group['host']}, {group['memory_gib']:g} GiB each; "
        f"after loading {allocated} GiB, {held}"
    )


def _data(config: RunConfig, resolved: dict[str, Any], data: dict[str, Any]) -> str:
    def split(name: str, part: dict[str, Any]) -> str:
        return f"{name} {part['num_samples']:,} samples, {part['num_tokens']:,} tokens, {part['num_rows']:,} rows"

    train = "train streamed" if data["train"].get("streamed") else split("train", data["train"])
    strategy, length = config.train_config.batching_strategy, resolved["context_length"]
    validation = split("validation", data["validation"]) if data["validation"] else "no validation"
    return f"{train}; {validation} ({strategy}, rows of at most {length} tokens)"


def _steps(config: RunConfig, start: dict[str, Any], resolved: dict[str, Any], world_size: int) -> str:
    epoch = "passes over the stream are said as they end" if config.streams else f"{start['steps_per_epoch']} per epoch"
    return (
        f"{start['num_steps']} ({epoch}) of {resolved['global_batch_size']} rows "
        f"= {config.train_config.batch_size_training} per micro-batch x {resolved['gradient_accumulation_steps']} "
        f"x {world_size} ranks"
    )


def _checkpoints(config: RunConfig, resolved: dict[str, Any]) -> str:
    train = config.train_config
    times = {
        "at each epoch's end": train.save_every_steps is None,
        f"every {train.save_every_steps} steps": bool(train.save_every_steps),
        f"every {train.save_every_minutes:g} minutes": bool(train.save_every_minutes),
        "at the best evaluation": train.keep_best,
    }
    when = [text for text, holds in times.items() if holds]
    if not when:
        return "none, but where the run is asked to stop"
    size = readable(resolved["checkpoint_bytes"])
    return f"{', '.join(when)}; the last {resolved['keep_last']} are kept, about {size} each"


def start_warnings(train: TrainConfig, start: dict[str, Any]) -> list[str]:
    """What to think about before the run is waited for."""
    lines = []
    if start["num_train_rows"] is not None and start["num_train_rows"] < start["world_size"]:
        lines.append(
            f"warning: {start['num_train_rows']} training row(s) for {start['world_size']} ranks: "
            "some ranks have nothing to do"
        )
    if not train.save_model:
        lines.append("save_model is False: the trained weights will not be kept")
    return lines


def print_for_people(*parts: Any, console: Console | None = None) -> None:
    """Tables and lines on the terminal, or, for a log file, plain and LOG_WIDTH wide."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def end_summary(events: Iterable[dict[str, Any]], folder: Path, *, device_type: str) -> list[Any]:
    """The results in one glance: what held the memory at each phase, losses, speed, time, and where the weights are.

    Args:
        events: all of the run's, as read from metrics.jsonl.
    """
    of: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of.setdefault(event["event"], []).append(event)
    parts: list[Any] = []
    if memory := of.get("memory"):
        parts += [_memory_table(memory, device_type), _peaks(memory)]
    if train := of.get("train"):
        steady = sorted(event["tokens_per_second"] for event in train[len(train) // 4 :])
        parts.append(
            f"train loss {_loss(train[0])} -> {_loss(train[-1])} over {len(train)} steps, "
            f"median {steady[len(steady) // 2]:,.0f} tokens/s"
        )
    if evals := of.get("eval"):
        finite = [event for event in evals if event["loss"] is not None]
        best = min(finite, key=lambda event: event["loss"], default=evals[-1])
        parts.append(
            f"eval loss {_loss(evals[0])} (step {evals[0]['step']}) -> {_loss(evals[-1])} "
            f"(step {evals[-1]['step']}), best {_loss(best)} (step {best['step']})"
        )
    for end in of.get("end", []):
        in_steps = sum(event["step_seconds"] for event in of.get("train", []))
        parts.append(f"time {clock(end['seconds'])}, of it {clock(in_steps)} in training steps")
    saved = read_run_yaml(folder).get("saved")
    parts.append(f"weights {folder / saved['folder']} (of step {saved['step']})" if saved else "weights not saved")
    return parts


def _memory_table(memory: list[dict[str, Any]], device_type: str) -> Table:
    last = max(event["step"] for event in memory)
    num_ranks = len({event["rank"] for event in memory})
    of = "resident memory" if device_type == "cpu" else "allocated memory"
    table = Table(title=f"{of} at step {last}, GiB, the fullest of {num_ranks} rank(s)", title_justify="left")
    columns = ("params", "grads", "optimizer", "activations", "other", "allocated", "peak_allocated")
    for heading in ("phase", *columns):
        table.add_column(heading.replace("_allocated", ""), justify="left" if heading == "phase" else "right")
    for phase in dict.fromkeys(event["phase"] for event in memory):
        of_phase = [e for e in memory if e["step"] == last and e["phase"] == phase]
        fullest = max(of_phase, key=lambda event: event["allocated_gib"])
        table.add_row(phase, *(f"{fullest[f'{name}_gib']:.3f}" for name in columns))
    return table


def _peaks(memory: list[dict[str, Any]]) -> str:
    peaks: dict[int, float] = {}
    for event in memory:
        peaks[event["rank"]] = max(event["peak_allocated_gib"], peaks.get(event["rank"], 0.0))
    return f"peak memory {_range(peaks.values(), '.3f')} GiB over {len(peaks)} rank(s)"


def _range(values: Iterable[float], form: str = "g") -> str:
    """ "3.9 to 4.1", or "4.1" where there is no spread to show."""
    values = list(values)
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _loss(event: dict[str, Any]) -> str:
    return "not finite" if event["loss"] is None else f"{event['loss']:.4f}"
