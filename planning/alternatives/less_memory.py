"""Changes of a run's flags that need less memory in the phase where it ran out, the cheapest first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from checkpointing.comparison import MAY_CHANGE
from configs.changed_flags import changed_flags
from configs.flags import parse_flags
from configs.run import SETTINGS, RunConfig
from planning.alternatives.failed_run import OF_STEPS, Plans, Predicted, excess_gib
from planning.memory.memory_plan import verdict_in_room
from policies.activations.checkpointing import Checkpointing, mode_of_flags, with_default_mode
from policies.optimizers.kind import kind_of
from utils.errors import ConfigError

NUM_SHOWN = 3
PATIENCE_SECONDS = 15.0  # for all plans; each takes seconds, and torchrun gives a rank 30 s to end

TILE = 8192
"""Tokens of the tiles that are offered: smaller ones would save nothing, since a layer's attention holds more."""

_OF_MODEL = ("load", *OF_STEPS, "optimizer_step", "evaluation", "generation", "saving")


@dataclass(frozen=True)
class Change:
    """Flags, or variables of the environment, that need less memory."""

    what: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    keeps_result: bool = True  # whether the run may go on with it from a checkpoint
    saves_gib: float | None = None  # in the phase where memory ran out, or of reserved memory; None: not predicted
    peak_gib: float | None = None  # of the whole run
    host_gib: float | None = None  # host memory of each rank
    fits: bool | None = None
    is_tight: bool = False  # it fits, but a plan may be wrong by more than what stays free
    slower: float | None = None  # seconds per step, as a multiple of those before

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"flags": list(self.flags)}


def device_changes(
    config: RunConfig,
    phase: str,
    world_size: int,
    *,
    is_cpu: bool = False,
    checkpointing: Checkpointing | None = None,
) -> Iterator[Change]:
    """Changes that may help if the device's memory ran out, the cheapest first. Some flags may conflict with others.

    Args:
        is_cpu: the device is the host itself, to which nothing can be moved.
        checkpointing: of the run's layers; None: as the flags say.
    """
    config = with_default_mode(config, "cpu" if is_cpu else "cuda")
    train, fsdp = config.train_config, config.fsdp_config
    recomputes = _checkpointing_of(config) if checkpointing is None else checkpointing.strongest
    if phase == "generation" and train.num_beams > 1:
        yield Change("greedy instead of a beam search", ("--num_beams", "1"))
    if phase in ("evaluation", "generation") and train.val_batch_size > 1:
        yield Change("fewer rows at once in evaluations", ("--val_batch_size", "1"))
    if phase in (*OF_STEPS, "evaluation") and not 0 < train.loss_chunk_size <= 1024:  # 0: all tokens at once
        yield Change("logits of fewer tokens at a time", ("--loss_chunk_size", "1024"))
    if phase in OF_STEPS and train.batch_size_training > 1:
        for rows in _fewer_rows(train.batch_size_training):
            yield Change("fewer rows at once, as many per step", _smaller_micro_batch(config, rows))
    shards = train.enable_fsdp and fsdp.sharding_strategy != "NO_SHARD" and not (is_cpu or fsdp.fsdp_cpu_offload)
    if phase in _OF_MODEL and shards and train.use_peft and fsdp.num_replicated_layers != 0:
        yield Change("frozen weights of every layer sharded", ("--num_replicated_layers", "0"))
    is_auto = train.activation_checkpointing == "auto"
    spares = checkpointing is not None and len(checkpointing.modes) > 1 and recomputes == "full"
    every = ("--spare_layers", "False") if spares else ()
    if phase in OF_STEPS and spares and not is_auto:
        yield Change("activations of every layer recomputed", every)
    # Under `auto` layers have different modes, so even one mode for all may keep less.
    if phase in OF_STEPS and (recomputes != "full" or is_auto):
        if recomputes == "off" or (recomputes == "selective" and is_auto):
            yield Change("most activations recomputed", ("--activation_checkpointing", "selective"))
        yield Change("activations of whole layers recomputed", ("--activation_checkpointing", "full", *every))
    if phase in OF_STEPS and _tile_of(config, checkpointing) > TILE:
        yield Change("MLPs of long rows in tiles", ("--tile_tokens", str(TILE)))
    may_move = recomputes != "selective" or is_auto
    if phase in OF_STEPS and may_move and not (is_cpu or train.activation_offloading):
        offloaded = ("--activation_checkpointing", "full", "--activation_offloading", "True")
        yield Change("activations in host memory", offloaded)
    if phase in (*OF_STEPS, "evaluation") and train.batch_size_training == 1:
        for size in _larger_groups(fsdp.context_parallel_size, world_size):
            yield Change(f"each row shared by {size} ranks", _shared_rows(config, size))
    if phase in _OF_MODEL and world_size > 1 and not (train.enable_fsdp and fsdp.sharding_strategy == "FULL_SHARD"):
        # --hsdp stands for --sharding_strategy HYBRID_SHARD, and would contradict the flags below.
        short = ("--hsdp", "False") if config.was_given("fsdp_config.hsdp") else ()
        flags = ("--enable_fsdp", "True", *short, "--sharding_strategy", "FULL_SHARD")
        yield Change("everything sharded over all ranks", flags)
    if phase in (*OF_STEPS, "optimizer_step"):
        if not (is_cpu or fsdp.optimizer_cpu_offload or fsdp.fsdp_cpu_offload):
            yield Change("optimizer states in host memory", ("--optimizer_cpu_offload", "True"))
        if not kind_of(fsdp.optimizer).eight_bit:
            yield Change("optimizer states in 8 bits", ("--optimizer", "AdamW8bit"))
    if phase in _OF_MODEL and train.enable_fsdp and not (is_cpu or fsdp.fsdp_cpu_offload):
        flags = ("--fsdp_cpu_offload", "True", "--optimizer_cpu_offload", "False")
        yield Change("weights, gradients and states in host memory", flags)
    if phase in _OF_MODEL and not fsdp.pure_bf16 and not train.use_peft:
        yield Change("weights, gradients and states in bf16", ("--pure_bf16", "True"))
    if phase in _OF_MODEL and not train.use_peft:
        yield Change("an adapter trained instead of all weights", ("--use_peft", "True"))
    if phase in _OF_MODEL and config.quantization_config.quantization != "4bit":
        flags = ("--use_peft", "True", "--quantization", "4bit", "--pure_bf16", "False")
        yield Change("an adapter trained on a base in 4 bits", flags)
    length = train.context_length
    if phase in (*OF_STEPS, "evaluation", "generation") and length is not None and length > 1024:
        ranks = fsdp.context_parallel_size
        yield Change("shorter rows", ("--context_length", str(length // 2 // ranks * ranks)))


def _larger_groups(size: int, world_size: int) -> list[int]:
    """Numbers of ranks that could share rows, more than now."""
    return [number for number in (2, 4, 8) if number > size and number % size == 0 and world_size % number == 0]


def _shared_rows(config: RunConfig, size: int) -> tuple[str, ...]:
    """Flags with which so many ranks share rows; as many rows per step."""
    train, flags = config.train_config, ("--context_parallel_size", str(size))
    if train.global_batch_size is not None:
        return flags
    accumulation = train.gradient_accumulation_steps * size // config.fsdp_config.context_parallel_size
    return (*flags, "--gradient_accumulation_steps", str(accumulation))


def host_changes(config: RunConfig, *, is_cpu: bool) -> Iterator[Change]:
    """Changes that may help if host memory ran out, the cheapest first.

    Args:
        is_cpu: the device is the host itself: what is offloaded stays in the same memory.
    """
    train, fsdp = config.train_config, config.fsdp_config
    if train.num_workers_dataloader > 0:
        yield Change("no worker processes for the data", ("--num_workers_dataloader", "0"))
    if train.async_save or (train.async_save is None and not is_cpu):
        yield Change("checkpoints without a copy in host memory", ("--async_save", "False"))
    if fsdp.checkpoint_type == "FULL_STATE_DICT":
        yield Change("no whole model on rank 0 for a checkpoint", ("--checkpoint_type", "SHARDED_STATE_DICT"))
    if fsdp.optimizer_cpu_offload and not is_cpu:
        yield Change("optimizer states on the device", ("--optimizer_cpu_offload", "False"))
    if fsdp.fsdp_cpu_offload and not is_cpu:
        yield Change("weights, gradients and states on the device", ("--fsdp_cpu_offload", "False"))
    if train.use_peft is False:
        yield Change("an adapter trained instead of all weights", ("--use_peft", "True"))


def cheapest(changes: Iterable[Change], argv: Sequence[str], phase: str, plans: Plans | None) -> list[Change]:
    """The NUM_SHOWN cheapest of the changes that these flags allow.

    With plans, changes that save nothing are left out, and so are environment variables with which the run would not
    fit. Changes that fit come first: those with room to spare before tight ones, faster before slower ones. If none
    fits alone, they are combined until they do; if not even then, the smallest peak comes first. What the failed run
    needed more than was planned is added to the plans of changed ones (`excess_gib`). Changes that save less than was
    missing are only named together with others. Without plans the effect of environment variables is not
    known, so a change of flags comes first.

    Args:
        argv: the run's flags.
    """
    before = parse_flags(argv)
    possible = [
        (replace(change, keeps_result=keeps_result(before, config)), config)
        for change in changes
        if (config := parsed_with(argv, change)) is not None
        and (change.environment or config.to_dict() != before.to_dict())
    ]
    if plans is None:
        flags, variables = ([c for c, _ in possible if bool(c.environment) is of_both] for of_both in (False, True))
        return [*flags[:1], *variables, *flags[1:]][:NUM_SHOWN]
    planned, helpful = plans.predict(before), list[Change]()
    deadline = time.monotonic() + PATIENCE_SECONDS
    for change, config in possible:
        if sum(bool(found.fits and not found.is_tight) for found in helpful) == NUM_SHOWN or (
            helpful and time.monotonic() > deadline
        ):
            break
        with contextlib.suppress(ConfigError):  # this model cannot have it
            with_figures = _with_figures(change, argv, planned, config, phase, plans)
            saves = with_figures.saves_gib is not None and with_figures.saves_gib > 0
            if saves and (with_figures.fits or not change.environment):
                helpful.append(with_figures)
    together = Change("")
    for change in helpful if not any(change.fits for change in helpful) else ():
        more = joined(together, change)
        if (config := parsed_with(argv, more)) is not None:
            more = replace(more, keeps_result=keeps_result(before, config))
            with contextlib.suppress(ConfigError):
                together = _with_figures(more, argv, planned, config, phase, plans)
        if together.fits:
            break
    if together.flags and together.flags not in [change.flags for change in helpful]:
        helpful.append(together)
    helpful.sort(key=_nearness)
    alone = [c for c in helpful if c.fits or c.flags == together.flags or (c.saves_gib or 0.0) >= plans.missing_gib]
    return (alone or helpful)[:NUM_SHOWN]


def _nearness(change: Change) -> tuple[Any, ...]:
    """Sort key of changes: those that surely fit first, by cost; those that do not fit by their peak."""
    if not change.fits:
        return (True, change.peak_gib or 0.0)
    return (False, not change.keeps_result, change.is_tight, change.slower or 1.0)


def _with_figures(
    change: Change, argv: Sequence[str], before: Predicted, config: RunConfig, phase: str, plans: Plans
) -> Change:
    """The change with its figures, as planned, and without flags that it does not need."""
    after, slower = plans.predict(config), None
    if before.seconds_per_step and after.seconds_per_step:
        slower = after.seconds_per_step / before.seconds_per_step
    excess, unused = excess_gib(before, after, phase, plans)
    in_phase = after.phase_gib(phase) + excess
    peak_gib = max(after.peak_gib, in_phase)
    # By the plan, spared layers do not raise the peak. If it was wrong, it was about their activations, which are
    # recomputed now. Else what forward needed beyond its plan stays until backward.
    if phase in OF_STEPS and "--spare_layers" not in change.flags:
        peak_gib = max(peak_gib, *(after.phase_gib(step) + excess for step in OF_STEPS))
    saves = max(before.phase_gib(phase), plans.needed_gib) - in_phase + (change.saves_gib or 0.0)
    verdict = verdict_in_room(peak_gib, plans.room_gib if change.environment else plans.room_gib - unused)
    fits = verdict != "does_not_fit" and (bool(change.environment) or saves >= plans.missing_gib)
    return replace(
        change,
        flags=needed_flags(argv, change.flags),
        saves_gib=saves,
        peak_gib=peak_gib,
        fits=fits,
        is_tight=fits and verdict == "tight",
        slower=slower,
    )


def needed_flags(argv: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    """The flags of a change without those that say what holds anyway."""
    wanted, needed = parsed_with(argv, Change("", tuple(flags))), list(flags)
    for name in flags[::2]:
        others = [word for pair in zip(needed[::2], needed[1::2], strict=True) if pair[0] != name for word in pair]
        without = parsed_with(argv, Change("", tuple(others)))
        if wanted is not None and without is not None and without.to_dict() == wanted.to_dict():
            needed = others
    return tuple(needed)


def joined(first: Change, second: Change) -> Change:
    what = ", ".join(filter(None, (first.what, second.what)))
    return Change(what, tuple(changed_flags(first.flags, second.flags)))


def parsed_with(argv: Sequence[str], change: Change) -> RunConfig | None:
    """The settings with the change; None if they are refused."""
    try:
        return parse_flags(changed_flags(argv, change.flags))
    except ConfigError:
        return None


def keeps_result(before: RunConfig, after: RunConfig) -> bool:
    """Whether every setting that differs may change when a run goes on."""
    changed = (name for name in SETTINGS if before.value(name) != after.value(name))
    return all(name in MAY_CHANGE or name.startswith("planning_config.") for name in changed)


def _tile_of(config: RunConfig, checkpointing: Checkpointing | None) -> int:
    """The tokens of which MLPs hold the inner values at a time: of a tile, or those of a micro-batch."""
    train = config.train_config
    asked = train.tile_tokens if isinstance(train.tile_tokens, int) else 0
    tokens = asked if checkpointing is None else checkpointing.tile_tokens
    return tokens or train.batch_size_training * (train.context_length or 0)


def _checkpointing_of(config: RunConfig) -> str:
    quantized = bool(config.quantization_config.quantization)
    return mode_of_flags(config.train_config, config.fsdp_config, quantized=quantized)


def _fewer_rows(rows: int) -> list[int]:
    """The largest proper divisor of a micro-batch, and 1."""
    return sorted({max(other for other in range(1, rows) if rows % other == 0), 1}, reverse=True)


def _smaller_micro_batch(config: RunConfig, rows: int) -> tuple[str, ...]:
    """Flags for micro-batches of `rows` rows in the same global batch."""
    train = config.train_config
    if train.global_batch_size is not None:
        return ("--batch_size_training", str(rows))
    accumulation = train.gradient_accumulation_steps * train.batch_size_training // rows
    return ("--batch_size_training", str(rows), "--gradient_accumulation_steps", str(accumulation))
