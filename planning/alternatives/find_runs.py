"""--find: a table of runs of one model on the given hardware: which fit, how fast they are, what they cost."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from rich.table import Table

from configs.changed_flags import changed_flags
from configs.planning import PlanningConfig
from configs.run import RunConfig
from planning.alternatives.less_memory import Change, needed_flags, parsed_with
from planning.alternatives.what_fits import Predict
from planning.machines.hardware import Hardware
from planning.planned_run import Plan
from utils.errors import ConfigError
from utils.progress import phase_begins, progress_bar

MICRO_BATCHES = (1, 2, 4, 8, 16)

_METHODS = {
    "full": ("--use_peft", "False", "--quantization", "False"),
    "lora": ("--use_peft", "True", "--quantization", "False"),
    "qlora": ("--use_peft", "True", "--quantization", "4bit"),
}
_PRECISIONS = {
    "fp32": ("--mixed_precision", "False", "--pure_bf16", "False"),
    "mixed": ("--pure_bf16", "False"),
    "bf16-true": ("--pure_bf16", "True"),
}
_OF_PLANS = tuple(f"--{field.name}" for field in fields(PlanningConfig))
_OPTIMIZERS = ("AdamW", "AdamW8bit", "anyprecision", "SGD")


@dataclass(frozen=True)
class FoundRun:
    """A run that the configs accept, and its plan."""

    method: str
    optimizer: str
    flags: tuple[str, ...]  # they replace those of the command line
    plan: Plan

    @property
    def fits(self) -> bool:
        return self.plan.memory.verdict != "does_not_fit"

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all cards together."""
        time = self.plan.time
        return None if time is None else time.tokens_per_second_per_device * self.plan.env.world_size

    @property
    def price(self) -> float | None:
        """The price of a million tokens, on all nodes."""
        return None if self.plan.time is None else self.plan.time.price_per_million_tokens


def find_runs(argv: Sequence[str], config: RunConfig, hardware: Hardware, predict: Predict) -> list[FoundRun]:
    """Plan every combination of method, precision, optimizer, strategy and micro-batch that the configs accept.

    The flags' other settings hold in all of them. The rows of an optimizer step stay, if the micro-batch divides them.
    Micro-batches above the first that does not fit are left out: they would not, either.

    Raises:
        ConfigError: if nothing could be planned, with the reason of the flags as they are.
    """
    found: list[FoundRun] = []
    for nodes in sorted({1, hardware.nodes}):
        on = replace(hardware, nodes=nodes)
        runs = list(_runs(on))
        phase_begins(f"planning {len(runs)} kinds of runs on {on.name}")
        for method, optimizer, flags in progress_bar(f"planning {on.name}", runs):
            found += _micro_batches(argv, config, on, method, optimizer, flags, predict)
    if not found:
        # Raises the reason why even the flags as they are cannot be planned.
        predict(config)
        raise ConfigError("--find: no combination of method, precision, optimizer and strategy holds with these flags")
    return found


def find_table(found: Sequence[FoundRun]) -> Table:
    """The runs for people, in their order."""
    several = len({one.plan.hardware.nodes for one in found}) > 1
    names = ["method", "precision", "optimizer", "strategy", "micro-batch", "fits", "peak GiB", "tokens/s"]
    names += [*(["nodes"] if several else []), "per million tokens"]
    table = Table(box=None, pad_edge=False)
    for name in names:
        # A narrow terminal breaks the last name, and no row.
        table.add_column(name, justify="right" if name in names[6:] else "left", no_wrap=name != names[-1])
    for one in found:
        plan = one.plan
        batches, policies = plan.resolved.batches, plan.resolved.policies
        table.add_row(
            one.method,
            policies.precision.name,
            one.optimizer,
            policies.layout.strategy,
            f"{batches.rows_per_micro_batch} x {batches.gradient_accumulation_steps}",
            {"fits": "yes", "tight": "tight", "does_not_fit": "no"}[plan.memory.verdict],
            f"{plan.memory.peak_gib:.1f}",
            "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
            *([str(plan.hardware.nodes)] if several else []),
            "" if one.price is None else f"{one.price:.3f}",
        )
    return table


def sorted_runs(found: Sequence[FoundRun], sort: Literal["time", "price"]) -> list[FoundRun]:
    """The runs sorted: those that fit first, the fastest or the cheapest before others."""

    def order(one: FoundRun) -> tuple[bool, float, float]:
        slowness = 0.0 if one.tokens_per_second is None else 1 / one.tokens_per_second
        return not one.fits, one.price or 0.0 if sort == "price" else slowness, slowness

    return sorted(found, key=order)


def command_of(one: FoundRun, argv: Sequence[str]) -> str:
    """The command that starts the run on each of its nodes."""
    flags = changed_flags(changed_flags(argv, needed_flags(argv, one.flags)), (), without=_OF_PLANS)
    hardware = one.plan.hardware
    if one.plan.env.world_size == 1:
        return shlex.join(["python", "finetuning.py", *flags])
    nodes = [] if hardware.nodes == 1 else ["--nnodes", str(hardware.nodes), "--rdzv_backend", "c10d"]
    nodes += [] if hardware.nodes == 1 else ["--rdzv_id", "1", "--rdzv_endpoint", "HOST:29500"]
    return shlex.join(["torchrun", *nodes, "--nproc_per_node", str(hardware.cards_per_node), "finetuning.py", *flags])


def _runs(hardware: Hardware) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Method, optimizer, and the flags of a run without its micro-batch. Some will be refused."""
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", *(["HYBRID_SHARD"] if hardware.nodes > 1 else []), "NO_SHARD"]
    layouts: list[tuple[str, ...]] = [("--enable_fsdp", "True", "--sharding_strategy", name) for name in strategies]
    if hardware.world_size == 1:
        layouts = [("--enable_fsdp", "False")]
    for method, of_method in _METHODS.items():
        for precision, of_precision in _PRECISIONS.items():
            for optimizer in _OPTIMIZERS:
                if optimizer == "anyprecision" and precision != "bf16-true":
                    continue  # its states in bf16 are for weights in bf16
                if method != "full" and (optimizer != "AdamW" or precision == "bf16-true"):
                    continue  # an adapter has few states, and is kept in fp32 on a base in bf16
                if method == "qlora" and precision == "fp32":
                    continue
                for layout in layouts:
                    nodes = ("--nodes", str(hardware.nodes))
                    yield method, optimizer, (*of_method, *of_precision, "--optimizer", optimizer, *layout, *nodes)


def _micro_batches(
    argv: Sequence[str],
    config: RunConfig,
    hardware: Hardware,
    method: str,
    optimizer: str,
    flags: tuple[str, ...],
    predict: Predict,
) -> Iterator[FoundRun]:
    train = config.train_config
    rows_per_rank = train.batch_size_training * train.gradient_accumulation_steps
    if train.global_batch_size is not None:
        data_parallel_size = max(1, hardware.world_size // config.fsdp_config.context_parallel_size)
        rows_per_rank = max(1, train.global_batch_size // data_parallel_size)
    for rows in MICRO_BATCHES:
        of_batch: tuple[str, ...] = ("--batch_size_training", str(rows))
        if train.global_batch_size is None:
            of_batch += ("--gradient_accumulation_steps", str(max(1, rows_per_rank // rows)))
        changed = parsed_with(argv, Change("", (*flags, *of_batch)))
        if changed is None:
            continue
        try:
            one = FoundRun(method, optimizer, (*flags, *of_batch), predict(changed))
        except ConfigError:
            continue
        yield one
        if not one.fits:
            return
