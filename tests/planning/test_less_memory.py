"""What is suggested if memory runs out: flags that hold, the cheapest first, as predicted if they are predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from configs.changed_flags import changed_flags
from configs.flags import parse_flags
from configs.run import RunConfig
from planning.alternatives.failed_run import Plans
from planning.alternatives.less_memory import Change, cheapest, device_changes, host_changes
from planning.out_of_memory.failure_scene import PHASES
from policies.activations.checkpointing import Checkpointing
from utils.memory_errors import EXPANDABLE_SEGMENTS

MODEL = ["--model_name", "M"]


@dataclass(frozen=True)
class Plan:
    peak_gib: float
    seconds_per_step: float
    num_tokens: float = 1000.0

    def phase_gib(self, phase: str) -> float:
        return self.peak_gib


def plan(config: RunConfig) -> Plan:
    """20 GiB that rows, checkpointing and the optimizer's home share out."""
    train, fsdp = config.train_config, config.fsdp_config
    recomputes = {"full": 1.0, "selective": 2.0}.get(train.activation_checkpointing or "off", 3.0)
    states = 0.0 if fsdp.optimizer_cpu_offload else 8.0
    seconds = 1.0 + 0.3 * (3.0 - recomputes) + (0.5 if fsdp.optimizer_cpu_offload else 0.0)
    rows = train.batch_size_training
    return Plan(rows * recomputes + states, seconds + 0.1 / rows, 1000.0 * rows)


PLANS = Plans(plan, needed_gib=17.0, room_gib=16.0)


def test_flags_take_the_place_of_what_sets_the_same() -> None:
    argv = ["--model_name", "M", "--noenable_fsdp", "--train_config.batch_size_training=8", "--use-peft", "--lr", "1"]
    changed = changed_flags(argv, ["--batch_size_training", "1", "--enable_fsdp", "True"], without=["--use_peft"])
    assert changed == ["--model_name", "M", "--lr", "1", "--batch_size_training", "1", "--enable_fsdp", "True"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--enable_fsdp", "--batch_size_training", "6"],
        ["--batch_size_training", "1", "--gradient_accumulation_steps", "2"],
        ["--use_peft", "--quantization", "4bit", "--global_batch_size", "8"],
        ["--enable_fsdp", "--hsdp", "--fsdp_cpu_offload", "--pure_bf16", "--optimizer", "SGD"],
        ["--eval_generate", "--num_beams", "4", "--val_batch_size", "8", "--loss_chunk_size", "0"],
    ],
)
def test_every_suggestion_is_a_command_that_is_not_refused(phase: str, given: list[str]) -> None:
    argv = [*MODEL, *given]
    config = parse_flags(argv)
    for change in [*cheapest(device_changes(config, phase, 4), argv, phase, None), *host_changes(config, is_cpu=False)]:
        after = parse_flags(changed_flags(argv, change.flags))
        assert after.to_dict() != config.to_dict()
        before_rows, after_rows = (
            c.train_config.batch_size_training
            * c.train_config.gradient_accumulation_steps
            / c.fsdp_config.context_parallel_size
            for c in (config, after)
        )
        assert after_rows == before_rows or config.train_config.global_batch_size


def test_ranks_share_a_row_that_is_too_long_for_one() -> None:
    config = parse_flags([*MODEL, "--batch_size_training", "1", "--gradient_accumulation_steps", "3"])
    flags = [change.flags for change in device_changes(config, "backward", 4)]
    assert ("--context_parallel_size", "2", "--gradient_accumulation_steps", "6") in flags
    assert ("--context_parallel_size", "4", "--gradient_accumulation_steps", "12") in flags
    assert not any("8" in flag for flag in flags)
    alone = [change.flags for change in device_changes(config, "backward", 1)]
    assert not any("--context_parallel_size" in flag for flag in alone)


def test_shorter_rows_can_be_shared_by_as_many_ranks() -> None:
    config = parse_flags([*MODEL, "--context_length", "4100", "--context_parallel_size", "4"])
    assert ("--context_length", "2048") in [change.flags for change in device_changes(config, "backward", 4)]


def test_mlps_of_long_rows_are_offered_in_tiles_if_they_are_in_none_as_small() -> None:
    def offered(*given: str, chosen: Checkpointing | None = None) -> bool:
        config = parse_flags([*MODEL, "--batch_size_training", "1", *given])
        changes = device_changes(config, "backward", 1, checkpointing=chosen)
        return ("--tile_tokens", "8192") in [change.flags for change in changes]

    long = ("--context_length", "32768")
    assert offered(*long)
    assert offered(*long, chosen=Checkpointing("full", tile_tokens=16384))
    assert not offered(*long, chosen=Checkpointing("full", tile_tokens=8192))
    assert not offered(*long, "--tile_tokens", "4096")
    assert not offered("--context_length", "8192")


def test_behind_auto_come_the_fixed_modes_that_recompute_more() -> None:
    config = parse_flags(MODEL)  # auto, the default on GPUs
    for recomputed, modes in (("off", ["selective", "full"]), ("selective", ["selective", "full"]), ("full", ["full"])):
        changes = device_changes(config, "backward", 1, checkpointing=Checkpointing(recomputed))
        flags = [change.flags for change in changes if change.flags[0] == "--activation_checkpointing"]
        offloaded = ("--activation_checkpointing", "full", "--activation_offloading", "True")
        assert flags == [*(("--activation_checkpointing", mode) for mode in modes), offloaded]


@pytest.mark.parametrize(("num_first", "is_named"), [(0, False), (3, True)])
def test_if_layers_were_spared_every_layer_can_be_computed_again(num_first: int, is_named: bool) -> None:
    config = parse_flags([*MODEL, "--activation_checkpointing", "full"])
    checkpointing = Checkpointing("off", "full", num_first) if num_first else Checkpointing("full")
    changes = list(device_changes(config, "forward", 1, checkpointing=checkpointing))
    assert (("--spare_layers", "False") in [change.flags for change in changes]) == is_named
    assert "--activation_checkpointing" not in {change.flags[0] for change in changes if len(change.flags) == 2}


def test_layers_that_were_spared_in_vain_are_among_the_remedies_although_the_planned_peak_stays() -> None:
    """20 GiB at the end of backward, whether layers are spared or not; in forward 16 with them were planned."""

    @dataclass(frozen=True)
    class Spared(Plan):
        forward_gib: float = 0.0

        def phase_gib(self, phase: str) -> float:
            return self.forward_gib if phase == "forward" else self.peak_gib

    def predict(config: RunConfig) -> Plan:
        return Spared(20.0, 1.0, 1.0, 16.0 if config.train_config.spare_layers else 10.0)

    argv = [*MODEL, "--activation_checkpointing", "full"]
    changes = device_changes(parse_flags(argv), "forward", 1, checkpointing=Checkpointing("off", "full", 3))
    found = cheapest(changes, argv, "forward", Plans(predict, needed_gib=22.5, room_gib=22.0))
    assert [(change.flags, change.saves_gib, change.fits) for change in found] == [
        (("--spare_layers", "False"), 6, True)
    ]


def test_behind_auto_whole_layers_are_recomputed_without_sparing_any() -> None:
    config = parse_flags([*MODEL, "--activation_checkpointing", "auto"])
    changes = device_changes(config, "forward", 1, checkpointing=Checkpointing("off", "full", 23))
    found = [change.flags for change in changes if "--activation_checkpointing" in change.flags]
    every = ("--activation_checkpointing", "full", "--spare_layers", "False")
    assert found == [every, ("--activation_checkpointing", "full", "--activation_offloading", "True")]


def test_what_fits_comes_first_and_of_that_what_is_soonest() -> None:
    argv = [*MODEL, "--batch_size_training", "4"]
    plans = replace(PLANS, room_gib=17.5)
    found = cheapest(device_changes(parse_flags(argv), "backward", 1), argv, "backward", plans)
    assert [change.flags[:2] for change in found] == [
        ("--batch_size_training", "2"),
        ("--batch_size_training", "1"),
        ("--activation_checkpointing", "selective"),
    ]
    assert [(change.saves_gib, change.peak_gib) for change in found] == [(6.0, 14.0), (9.0, 11.0), (4.0, 16.0)]
    assert all(change.fits and change.keeps_result for change in found)
    assert found[2].slower == pytest.approx(1.325 / 1.025)
    tight = cheapest(device_changes(parse_flags(argv), "backward", 1), argv, "backward", replace(PLANS, room_gib=14.5))
    assert all(change.fits and not change.is_tight for change in tight), "14 GiB of 14.5 only if nothing else is known"
    few = cheapest(
        list(device_changes(parse_flags(argv), "backward", 1))[:2], argv, "backward", replace(plans, room_gib=14.5)
    )
    assert [(change.peak_gib, change.is_tight) for change in few] == [(11.0, False), (14.0, True)]


def test_memory_in_pieces_is_the_remedy_only_if_the_whole_run_fits() -> None:
    """20 GiB were planned. Where 19 are to be had, the run would end a few tensors later with pieces that grow, too."""
    argv = [*MODEL, "--batch_size_training", "4"]
    pieces = Change("pieces", environment=EXPANDABLE_SEGMENTS, saves_gib=0.2)

    def found(plans: Plans | None) -> list[Change]:
        return cheapest([pieces, *device_changes(parse_flags(argv), "forward", 1)], argv, "forward", plans)

    first = found(replace(PLANS, room_gib=25.0))[0]
    assert (first.environment, first.saves_gib, first.peak_gib) == (EXPANDABLE_SEGMENTS, pytest.approx(0.2), 20.0)
    short = found(replace(PLANS, room_gib=19.0))
    assert all(change.fits and not change.environment for change in short)
    assert [bool(change.environment) for change in found(None)] == [False, True, False]
    never = found(replace(PLANS, room_gib=0.5))
    assert not any(change.fits or change.environment for change in never)
    assert never[0].peak_gib == min(change.peak_gib or 0.0 for change in never), "all of them together"


def test_a_run_that_needed_more_than_planned_is_believed_for_each_token() -> None:
    """20 GiB were planned for 4 rows, and 30 needed: 2.5 more for each row."""
    argv = [*MODEL, "--batch_size_training", "4"]
    found = cheapest(device_changes(parse_flags(argv), "backward", 1), argv, "backward", replace(PLANS, needed_gib=30))
    assert found[0].flags == ("--batch_size_training", "1", "--gradient_accumulation_steps", "4")
    assert (found[0].peak_gib, found[0].saves_gib) == (11.0 + 2.5, 30 - 13.5)
    assert [change.fits for change in found] == [True], "2 rows would need 14 + 5, and save less than is missing"
    whole = cheapest(device_changes(parse_flags(argv), "saving", 1), argv, "saving", replace(PLANS, needed_gib=30))
    assert not any(change.fits for change in whole), "other phases need as much more with any batch"


LONG = [*MODEL, "--batch_size_training", "1", "--context_length", "131072", "--use_peft", "--quantization", "4bit"]
LONG += ["--target_modules", "all-linear", "--activation_checkpointing", "full", "--activation_offloading"]


def long_row(config: RunConfig) -> Plan:
    """As planned for 8B: 51.6 GiB for 131,072 tokens, 5.6 of them weights, 0.31 the optimizer's states."""
    train, fsdp = config.train_config, config.fsdp_config
    tokens = float(train.context_length or 0) / fsdp.context_parallel_size
    states = 0.0 if fsdp.optimizer_cpu_offload else 0.31
    if fsdp.optimizer == "AdamW8bit":
        states = 0.08
    tiled = 0.6 if train.tile_tokens else 1.0
    return Plan(5.6 + states + tiled * 45.69 * tokens / 131072, 1.0, tokens)


def test_a_long_row_that_failed_is_not_said_to_fit_with_a_change_that_saves_less_than_was_missing() -> None:
    """69.8 GiB were allocated and 3.5 asked for, with 6.1 in pieces, on a card where torch may take 78.7."""
    plans = Plans(long_row, needed_gib=69.8 + 3.5, room_gib=78.7, unused_gib=6.1)
    assert plans.missing_gib == pytest.approx(0.7)
    changes = list(device_changes(parse_flags(LONG), "backward", 1))
    found = cheapest(changes, LONG, "backward", plans)
    assert found
    for change in found:
        assert change.fits, "with the 21.7 GiB that were not planned"
        assert (change.saves_gib or 0.0) > plans.missing_gib
    moved = [("--optimizer_cpu_offload", "True"), ("--optimizer", "AdamW8bit")]
    assert not set(moved) & {change.flags for change in found}
    halved = next(change for change in found if change.flags == ("--context_length", "65536"))
    assert halved.peak_gib == pytest.approx(5.6 + 0.31 + (45.69 + 21.7) / 2)
    little = [change for change in changes if change.flags in moved]
    (both,) = cheapest(little, LONG, "backward", plans)
    assert not both.fits, "what is left if there is nothing else"


def test_pieces_are_no_room_for_a_run_that_stays_as_large() -> None:
    plans = Plans(long_row, needed_gib=69.8 + 3.5, room_gib=84.5, unused_gib=12.0)
    pieces = Change("pieces", environment=EXPANDABLE_SEGMENTS, saves_gib=12.0)
    moved = Change("states", ("--optimizer_cpu_offload", "True"))
    found = cheapest([pieces, moved], LONG, "backward", plans)
    assert [(dict(change.environment), change.fits) for change in found] == [(EXPANDABLE_SEGMENTS, True)]


def test_changes_are_combined_if_none_fits_alone() -> None:
    argv = [*MODEL, "--batch_size_training", "10"]
    found = cheapest(device_changes(parse_flags(argv), "backward", 1), argv, "backward", PLANS)
    assert found[0].fits
    assert set(found[0].flags[::2]) == {"--batch_size_training", "--gradient_accumulation_steps"}
    argv = [*MODEL, "--batch_size_training", "17", "--global_batch_size", "17"]
    small = cheapest(
        device_changes(parse_flags(argv), "backward", 1),
        argv,
        "backward",
        replace(PLANS, room_gib=4.0),
    )
    assert small[0].fits
    assert small[0].flags == (
        *("--batch_size_training", "1", "--activation_checkpointing", "full"),
        *("--activation_offloading", "True", "--optimizer_cpu_offload", "True"),
    )


def test_a_change_of_the_result_is_said() -> None:
    found = list(cheapest(device_changes(parse_flags(MODEL), "optimizer_step", 1), MODEL, "optimizer_step", None))
    assert [(change.flags[0], change.keeps_result) for change in found] == [
        ("--optimizer_cpu_offload", True),
        ("--optimizer", False),
        ("--pure_bf16", False),
    ]
