"""What a person sees of a run at its start and at its end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.run import RunConfig
from utils.environment import Environment


def start_summary(config: RunConfig, env: Environment, facts: dict[str, Any], resolved: dict[str, Any]) -> list[str]:
    """The run in a few lines, before its first step.

    Args:
        facts: the `start` event. resolved: what the settings came to on this machine.
    """
    train = config.train_config
    lines = [
        f"model: {train.model_name}, {facts['num_parameters']:,} parameters, "
        f"{facts['num_trainable_parameters']:,} trained",
        f"layout: {resolved['sharding_strategy']} over {env.world_size} process(es) on {env.device.type}, "
        f"{resolved['precision']}, activation checkpointing {resolved['activation_checkpointing']}",
        f"steps: {facts['num_steps']} ({facts['steps_per_epoch']} per epoch) of {resolved['global_batch_size']} rows "
        f"= {train.batch_size_training} per micro-batch x {resolved['gradient_accumulation_steps']} x "
        f"{env.world_size} ranks",
    ]
    if facts["num_train_rows"] < env.world_size:
        lines.append(
            f"warning: {facts['num_train_rows']} training row(s) for {env.world_size} ranks: "
            "some ranks have nothing to do"
        )
    if not train.save_model:
        lines.append("save_model is False: the trained weights will not be kept")
    return lines


def print_end_table(
    events: Iterable[dict[str, Any]], *, world_size: int, device_type: str, console: Console | None = None
) -> None:
    """The run in one glance: what held the memory at each phase of the last observed step, and the results."""
    events = list(events)
    memory = [event for event in events if event["event"] == "memory"]
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = 110  # a log file has no width of its own
    if memory:
        last = max(event["step"] for event in memory)
        of = "resident memory" if device_type == "cpu" else "allocated memory"
        table = Table(title=f"{of} at step {last}, GiB, the fullest of {world_size} rank(s)", title_justify="left")
        columns = ("params", "grads", "optimizer", "activations", "other", "allocated", "peak_allocated")
        for heading in ("phase", *columns):
            table.add_column(heading.replace("_allocated", ""), justify="left" if heading == "phase" else "right")
        for phase in dict.fromkeys(event["phase"] for event in memory):
            of_phase = [e for e in memory if e["step"] == last and e["phase"] == phase]
            fullest = max(of_phase, key=lambda event: event["allocated_gib"])
            table.add_row(phase, *(f"{fullest[f'{name}_gib']:.3f}" for name in columns))
        console.print(table)
    train = [event for event in events if event["event"] == "train"]
    evals = [event for event in events if event["event"] == "eval"]
    if train:
        steady = sorted(event["tokens_per_second"] for event in train[len(train) // 4 :])
        console.print(
            f"train loss {train[0]['loss']:.4f} -> {train[-1]['loss']:.4f} over {len(train)} steps, "
            f"median {steady[len(steady) // 2]:,.0f} tokens/s"
        )
    if evals:
        best = min(evals, key=lambda event: event["loss"])
        console.print(
            f"eval loss {evals[0]['loss']:.4f} (step {evals[0]['step']}) -> {evals[-1]['loss']:.4f} "
            f"(step {evals[-1]['step']}), best {best['loss']:.4f} (step {best['step']})"
        )
