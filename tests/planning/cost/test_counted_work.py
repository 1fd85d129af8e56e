"""What is counted on meta tensors is what a real step computes, and, of a model of text, what the formulas say."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from transformers import MistralConfig

from benchmarks.planned_times import plan_model
from benchmarks.runs.shapes import SHAPES
from configs.flags import parse_flags
from data.batches.counts import BatchCounts, ImageTokens
from planning.cost.counted_work import counted_work
from planning.cost.row_counts import attended_share
from planning.cost.step_work import micro_batch_work
from planning.machines.hardware import parse_hardware
from planning.machines.planned_environment import planned_environment
from planning.memory.meta_batch import meta_batch
from planning.memory.meta_pass import pass_on_meta
from planning.memory.row_lengths import RowLengths
from planning.model.planned_model import PlannedModel, build_planned_model
from planning.planned_run import plan_of
from resolving.resolved import resolve
from tasks.image_flops import ImageFlops
from tasks.image_meta_batch import num_image_tokens
from tasks.micro_batch import BatchShape
from tests.helpers.image_models import MODELS
from tests.helpers.pairwise import select_product
from utils.model_parts import vision_part

H200 = parse_hardware("H200", price_per_hour=3.0)
ROWS = RowLengths(2, (24,), (24,))
OF_ATTENTION = ("aten.bmm", "aten.baddbmm", "scaled_dot_product")


@pytest.mark.parametrize(
    "flags",
    ["--activation_checkpointing off", "--activation_checkpointing full", "--use_peft", "--use_fast_kernels False"],
)
@pytest.mark.parametrize("trains", [True, False])
def test_the_counts_of_a_llama_are_those_of_the_formulas(flags: str, trains: bool, tmp_path: Path) -> None:
    given = "--pure_bf16 False --batching_strategy padding --context_length 64 --compile False"
    planned = plan_model(tmp_path, SHAPES["tiny"], H200, [*flags.split(), *given.split()])
    counts, counted = counted_work(planned, H200.card, 2, (64,), ROWS, trains=trains)
    # With a mask, kernels compute all pairs of a row.
    num_pairs = 64 * 64 if "fast_kernels" in flags else 64 * 65 // 2
    formulas = micro_batch_work(planned, counts._replace(num_attended_pairs=2 * num_pairs), trains=trains)
    assert counts.num_tokens == 2 * 64
    # Of an adapter, the first layer's input needs no gradient.
    exact = 0.03 if "peft" in flags else 1e-6
    assert counted.matrix_flops == pytest.approx(formulas.matrix_flops, rel=exact)
    assert counted.attention_flops == pytest.approx(formulas.attention_flops, rel=1e-6)
    assert counted.moved_bytes == pytest.approx(formulas.moved_bytes, rel=exact)
    assert counted.launch_seconds == pytest.approx(formulas.launch_seconds, rel=0.1)


@pytest.mark.parametrize(("adapter", "num_more"), [("", 1), (" --use_peft", 0)])
def test_losses_of_pairs_compute_a_head_that_trains_once_more(adapter: str, num_more: int, tmp_path: Path) -> None:
    given = f"--pure_bf16 False --batching_strategy padding --context_length 64 --compile False{adapter}"
    pairs = " --dataset preference_dataset --preference_dataset.data_path x --loss_type simpo"
    of_pairs = plan_model(tmp_path, SHAPES["tiny"], H200, (given + pairs).split())
    counts, counted = counted_work(of_pairs, H200.card, 2, (64,), ROWS)
    exact = 0.03 if adapter else 1e-6  # of an adapter, the first layer's input needs no gradient
    assert counted.matrix_flops == pytest.approx(micro_batch_work(of_pairs, counts).matrix_flops, rel=exact)
    of_tokens = plan_model(tmp_path, SHAPES["tiny"], H200, [*given.split(), "--activation_checkpointing", "off"])
    more = micro_batch_work(of_pairs, counts).matrix_flops - micro_batch_work(of_tokens, counts).matrix_flops
    of_head = 2 * 64 * of_tokens.num_embeddings * counts.num_label_tokens
    assert more == pytest.approx(num_more * of_head, rel=1e-6)


@pytest.mark.parametrize(("flags", "share"), [("", 36 / 136 + 8 * 8 / 136), ("--use_fast_kernels False", 1.0)])
def test_kernels_with_windows_compute_what_the_window_leaves(flags: str, share: float, tmp_path: Path) -> None:
    """A window of 8 in rows of 16; masks leave the work as it is."""
    attention = []
    for window in (8, None):
        config = MistralConfig(**SHAPES["tiny"], sliding_window=window, architectures=["MistralForCausalLM"])
        config.save_pretrained(tmp_path)
        words = f"--random_weights --pure_bf16 --batching_strategy padding --context_length 16 {flags}"
        parsed = parse_flags(["--model_name", str(tmp_path), *words.split()])
        env = planned_environment(H200, parsed.train_config)
        planned = build_planned_model(resolve(parsed, env), env)
        attention.append(micro_batch_work(planned, BatchCounts(32, 32, 2 * 136)).attention_flops)
    assert attention[0] / attention[1] == pytest.approx(share)


def planned_image_model(name: str, folder: Path, *flags: str, dataset: str = "caption_dataset") -> PlannedModel:
    MODELS[name]()[0].save_pretrained(folder)
    config = parse_flags(["--model_name", str(folder), "--dataset", dataset, "--mixed_precision", "0", *flags])
    env = planned_environment(H200, config.train_config)
    return build_planned_model(resolve(config, env), env)


def flops_of_a_real_step(planned: PlannedModel) -> int:
    """FLOPs of products with weights, as torch counts them on this CPU."""
    resolved, model = planned.resolved, planned.adapted.model.to_empty(device="cpu").train()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()
    batch = meta_batch(resolved, BatchShape(2, ROWS.widest))

    def real(value: Any) -> Any:
        ones = lambda t: torch.ones(t.shape, dtype=t.dtype) if t.is_meta else t  # noqa: E731
        return tree_map_only(torch.Tensor, ones, value)

    batch = replace(batch, **{field.name: real(getattr(batch, field.name)) for field in fields(batch)})
    image_id = getattr(resolved.model_config, "image_token_id", None) or resolved.model_config.image_token_index
    if (grids := batch.inputs.get("image_grid_thw")) is not None:
        num_features = int(grids.prod(-1).sum()) // resolved.model_config.vision_config.spatial_merge_size**2
        batch.inputs["input_ids"].flatten()[:num_features] = image_id
    else:
        batch.inputs["input_ids"][:, : num_image_tokens(resolved.model_config)] = image_id
    with FlopCounterMode(display=False) as counter:
        resolved.task.summed_loss(model, batch).backward()
    found = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in found.items() if not any(name in str(op) for name in OF_ATTENTION))


@pytest.mark.parametrize(
    ("name", "flags"),
    select_product(
        ["blip2_opt", "blip2_t5", "llava", "gemma3", "qwen2_5_vl"],
        ["--freeze_vision", "--freeze_language_model", "--use_peft"],
    ),
)
def test_as_much_is_counted_as_a_real_step_of_an_image_model_computes(name: str, flags: str, tmp_path: Path) -> None:
    planned = planned_image_model(name, tmp_path, flags)
    _, work = counted_work(planned, H200.card, 2, ROWS.widest, ROWS)
    assert work.matrix_flops == flops_of_a_real_step(planned)
    assert work.attention_flops > 0


def test_a_frozen_tower_costs_a_forward_pass(tmp_path: Path) -> None:
    def work(*flags: str) -> Any:
        planned = planned_image_model("llava", tmp_path, "--activation_checkpointing", "off", *flags)
        return counted_work(planned, H200.card, 2, ROWS.widest, ROWS)[1]

    whole, frozen = work(), work("--freeze_vision")
    for part in ("matrix_flops", "attention_flops", "moved_bytes", "weight_bytes", "launch_seconds"):
        assert getattr(frozen, part) < getattr(whole, part)


def test_packed_pictures_attend_inside_images_and_documents(tmp_path: Path) -> None:
    flags = "--batching_strategy packing --context_length 64 --activation_checkpointing off --pure_bf16"
    planned = planned_image_model("qwen2_vl", tmp_path, *flags.split(), dataset="chat_dataset")
    images = ImageTokens(0.5, of_each=32, typical=8)
    rows = RowLengths(1, (64,), (64,), images=images, packed=True)
    _, work = counted_work(planned, H200.card, 1, (64,), rows, attended_share=0.25)
    formula = ImageFlops(planned.adapted.model)
    of_images = 4 * (4 * images.typical) ** 2 * formula.per_patch_pair
    assert of_images > 0
    expected = of_images + 0.25 * 64 * 65 / 2 * formula.text.per_pair
    assert work.attention_flops == pytest.approx(expected, rel=1e-6)
    with pass_on_meta(planned, H200.card, 1, (64,), rows, trains=True) as (batch, _):  # for memory: the largest image
        assert batch.num_image_features == 32
        inputs: Any = planned.resolved.task.model_inputs(batch)
        assert len(inputs["image_grid_thw"]) == 1


@pytest.mark.parametrize("packed", [True, False])
def test_the_share_of_pairs_is_that_of_packed_documents(packed: bool) -> None:
    rows = RowLengths(2, (8,), (8,), packed=packed)
    counts = np.array([[8, 8, 36, 0, 0, 0], [8, 8, 2 * 10, 0, 0, 0]])  # one document of 8 tokens, two of 4
    assert attended_share(counts, rows) == (28 / 36 if packed else 1.0)
    assert attended_share(None, rows) == 1.0


def test_kept_features_save_what_the_tower_computes(tmp_path: Path) -> None:
    flags = ["--freeze_vision", "--activation_checkpointing", "off"]
    whole, kept = (
        planned_image_model("llava", tmp_path, *flags, *more, dataset="chat_dataset")
        for more in ([], ["--cache_vision_features"])
    )
    works = [counted_work(planned, H200.card, 2, ROWS.widest, ROWS)[1] for planned in (whole, kept)]
    batch: Any = meta_batch(whole.resolved, BatchShape(2, ROWS.widest))
    (tower,) = vision_part(whole.adapted.base)
    for tensor in (*tower.to_empty(device="cpu").parameters(), *tower.buffers()):
        tensor.detach().zero_()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(torch.ones(batch.inputs["pixel_values"].shape))
    found = counter.get_flop_counts()["Global"]
    of_tower = sum(flops for op, flops in found.items() if not any(name in str(op) for name in OF_ATTENTION))
    assert works[0].matrix_flops - works[1].matrix_flops == of_tower
    assert works[1].attention_flops < works[0].attention_flops


def test_the_plan_of_an_image_model_has_a_time_and_a_price(tmp_path: Path) -> None:
    MODELS["blip2_t5"]()[0].save_pretrained(tmp_path)
    argv = ["--model_name", str(tmp_path), "--dataset", "caption_dataset", "--use_peft", "--max_train_step", "10"]
    plan = plan_of(parse_flags(argv), H200)
    assert plan.time is not None
    assert plan.time.seconds_per_run == pytest.approx(10 * plan.time.seconds_per_step)
    assert plan.time.price == pytest.approx(3.0 * (plan.time.seconds_per_run or 0) / 3600)
    assert plan.time.tokens_per_second_per_device > 0
    assert not any("time:" in note for note in plan.notes)
