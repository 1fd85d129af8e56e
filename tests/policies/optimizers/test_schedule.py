"""The learning rate of every step against its closed form, and to the bit against transformers' schedules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from torch import nn
from transformers import get_scheduler

from configs.flags import parse_flags
from policies.optimizers.build import build_optimizer
from policies.optimizers.schedule import build_scheduler, lr_factor

LR, STEPS_PER_EPOCH, NUM_STEPS = 0.02, 7, 21


def rates(*flags: str) -> list[float]:
    """The rate that each step uses."""
    config = parse_flags(["--model_name", "m", "--lr", str(LR), *flags])
    optimizer = build_optimizer(nn.Linear(2, 2), config.train_config, config.fsdp_config)
    scheduler = build_scheduler(optimizer, config.train_config, steps_per_epoch=STEPS_PER_EPOCH, num_steps=NUM_STEPS)
    found = []
    for _ in range(NUM_STEPS):
        found.append(scheduler.get_last_lr()[0])
        assert optimizer.param_groups[0]["lr"] == found[-1]
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 5, 10])
def test_step_multiplies_by_gamma_once_per_epoch(warmup: int) -> None:
    wanted = [
        LR * (min(1, step / warmup) if warmup else 1) * 0.5 ** (step // STEPS_PER_EPOCH) for step in range(NUM_STEPS)
    ]
    assert rates("--gamma", "0.5", "--warmup_steps", str(warmup)) == pytest.approx(wanted)


def test_the_default_is_step_with_gamma_085_and_no_warmup() -> None:
    assert rates() == pytest.approx([LR * 0.85 ** (step // STEPS_PER_EPOCH) for step in range(NUM_STEPS)])


@pytest.mark.parametrize("warmup", [0, 5])
def test_constant_stays_at_its_highest(warmup: int) -> None:
    wanted = [LR * (min(1, step / warmup) if warmup else 1) for step in range(NUM_STEPS)]
    assert rates("--scheduler", "constant", "--warmup_steps", str(warmup)) == pytest.approx(wanted)


@pytest.mark.parametrize("warmup", [0, 5])
def test_linear_falls_straight_to_zero_at_the_end(warmup: int) -> None:
    wanted = [
        LR * (step / warmup if step < warmup else (NUM_STEPS - step) / (NUM_STEPS - warmup))
        for step in range(NUM_STEPS)
    ]
    assert rates("--scheduler", "linear", "--warmup_steps", str(warmup)) == pytest.approx(wanted)


@pytest.mark.parametrize("warmup", [0, 5])
def test_cosine_falls_along_half_a_wave_to_zero_at_the_end(warmup: int) -> None:
    wanted = [
        LR * (step / warmup if step < warmup else (1 + math.cos(math.pi * (step - warmup) / (NUM_STEPS - warmup))) / 2)
        for step in range(NUM_STEPS)
    ]
    assert rates("--scheduler", "cosine", "--warmup_steps", str(warmup)) == pytest.approx(wanted)


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_what_falls_to_zero_falls_to_min_lr_instead(scheduler: str, warmup: int) -> None:
    least, given = 0.25 * LR, ("--scheduler", scheduler, "--warmup_steps", str(warmup))
    wanted = [rate if step < warmup else least + (LR - least) * rate / LR for step, rate in enumerate(rates(*given))]
    assert rates(*given, "--min_lr", str(least)) == pytest.approx(wanted)


def test_steps_end_at_min_lr_and_warm_up_begins_at_zero() -> None:
    wanted = [LR * min(1, step / 2) * max(0.3, 0.5 ** (step // STEPS_PER_EPOCH)) for step in range(NUM_STEPS)]
    assert rates("--gamma", "0.5", "--warmup_steps", "2", "--min_lr", str(0.3 * LR)) == pytest.approx(wanted)


@pytest.mark.parametrize("scheduler", ["step", "linear", "cosine", "constant"])
def test_a_ratio_of_warm_up_is_its_share_of_all_steps_rounded_up(scheduler: str) -> None:
    steps = math.ceil(0.3 * NUM_STEPS)
    given = ("--scheduler", scheduler)
    assert rates(*given, "--warmup_ratio", "0.3") == rates(*given, "--warmup_steps", str(steps))


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine"])
def test_rates_are_transformers_to_the_bit_over_whole_runs_and_beyond(scheduler: str) -> None:
    for num_steps in (1, 2, 7, 1000, 4937):
        for warmup in {0, 1, num_steps // 3, num_steps, num_steps + 5}:
            given = ["--scheduler", scheduler, "--lr", "3.7e-4", "--warmup_steps", str(warmup)]
            train = parse_flags(["--model_name", "m", *given]).train_config
            optimizer = build_optimizer(nn.Linear(2, 2), train, parse_flags(["--model_name", "m"]).fsdp_config)
            name = "constant_with_warmup" if scheduler == "constant" else scheduler
            theirs = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps)
            (factor,) = theirs.lr_lambdas  # type: ignore[attr-defined]
            for step in range(num_steps + 3):
                assert lr_factor(step, train, steps_per_epoch=9, num_steps=num_steps) == factor(step), (step, warmup)
                if scheduler != "constant" and step >= warmup:
                    floored = replace(train, min_lr=1.1e-5)
                    lowest = 1.1e-5 / 3.7e-4
                    wanted = lowest + (1 - lowest) * factor(step)
                    assert lr_factor(step, floored, steps_per_epoch=9, num_steps=num_steps) == wanted
