"""What --float8 changes in a plan: the rate of products, and the bytes of stored and gathered weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.planned_times import plan_model
from benchmarks.runs.shapes import SHAPES
from planning.cost.counted_work import counted_work
from planning.cost.kernel_rates import kernel_rates
from planning.cost.step_work import micro_batch_work
from planning.cost.traffic import find_traffic
from planning.machines.hardware import parse_hardware
from planning.memory.row_lengths import RowLengths
from planning.memory.run_memory import plan_memory
from planning.model.planned_model import PlannedModel
from utils.units import GIB

ROWS = RowLengths(2, (64,), (64,))
LLAMA = SHAPES["llama8b"] | {"num_hidden_layers": 2, "vocab_size": 1024}
MATRICES = 2 * 4096 * 4096 + 3 * 4096 * 14336  # of a layer, without those of keys and values, which are too small
IN_FLOAT8 = 2 * MATRICES  # of both layers
FLAGS = "--batching_strategy padding --context_length 64 --activation_checkpointing off"


@pytest.fixture(autouse=True)
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)


def planned(folder: Path, hardware: str, *flags: str) -> PlannedModel:
    (folder / "model").mkdir(exist_ok=True)
    return plan_model(folder / "model", LLAMA, parse_hardware(hardware), [*FLAGS.split(), *flags])


@pytest.mark.parametrize(("flags", "passes"), [("--pure_bf16 True", 3), ("--use_peft --pure_bf16 False", 2)])
def test_products_of_large_layers_take_the_float8_rate(flags: str, passes: int, tmp_path: Path) -> None:
    plan = planned(tmp_path, "H200", *flags.split(), "--float8", "tensorwise")
    card = parse_hardware("H200").card
    counted = counted_work(plan, card, 2, (64,), ROWS)
    for work in (counted.work, micro_batch_work(plan, counted.counts)):
        # Under LoRA nothing below the first layer's first product needs its gradient, which the formulas do not know.
        assert work.float8_flops == pytest.approx(2 * passes * IN_FLOAT8 * 2 * 64, rel=0.03)
    rates = kernel_rates(card, "bf16", in_float8=True)
    assert rates is not None
    assert rates.float8_flops == pytest.approx(2 * rates.matrix_flops, rel=1e-3)
    assert rates.notes == ("time: no float8 rate of H200 was measured; the share of its peak in bf16 is taken",)


def test_a_stored_base_holds_one_byte_per_weight(tmp_path: Path) -> None:
    card = parse_hardware("H200").card
    loaded = [
        plan_memory(planned(tmp_path, "H200", "--use_peft", "--pure_bf16", "False", *flags), card, ROWS).phases["load"]
        for flags in ([], ["--float8", "rowwise"])
    ]
    scales = 2 * (2 * 4096 + 2 * 14336 + 4096) * 4
    assert (loaded[0].params - loaded[1].params) * GIB == pytest.approx(IN_FLOAT8 - scales, abs=1)


def test_trained_weights_are_gathered_in_float8(tmp_path: Path) -> None:
    flags = ["--enable_fsdp", "--pure_bf16", "True"]
    plans = [planned(tmp_path, "4xH200", *flags, *more) for more in ([], ["--float8", "tensorwise"])]
    traffic = [find_traffic(plan) for plan in plans]
    assert traffic[0].units_bytes - traffic[1].units_bytes == IN_FLOAT8
    assert traffic[0].gradient_bytes == traffic[1].gradient_bytes
    card = parse_hardware("H200").card
    backward = [plan_memory(plan, card, ROWS).phases["backward"] for plan in plans]
    assert backward[1].total < backward[0].total
    rowwise = planned(tmp_path, "4xH200", *flags, "--float8", "rowwise")
    assert find_traffic(rowwise) == traffic[0]
