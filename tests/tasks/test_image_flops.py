"""Model FLOPs of images, beside what torch counts of a real pass of the vision encoder and what follows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from data.batches.counts import BatchCounts
from data.processors.processor_loading import image_inputs, prompt_text
from tasks.flops import StepFlops
from tasks.image_counts import count_images
from tasks.image_flops import ImageFlops
from tests.helpers.image_models import MODELS, captioned

# CLIP's class token is not counted: one of 17 here, one of 577 in a real model.
FAMILIES = {"qwen2_vl": 1e-6, "qwen2_5_vl": 1e-6, "idefics3": 1e-6, "gemma3": 1e-6, "llava": 0.05}


def made(name: str, *, trained: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of which only parameters of this name are trained, and its inputs of an image.

    Its attention consists of plain products, which torch counts on a CPU, too.
    """
    config, processor = MODELS[name]()
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad = trained in parameter_name
    ((picture, _),) = captioned(1)
    return model, image_inputs(processor, picture.resize((64, 40)), prompt_text(processor, "what is it ?"))


def of_images(model: Any, inputs: dict[str, torch.Tensor]) -> float:
    """Ours, without the text's."""
    counts = count_images(inputs, model.config)._asdict()
    return ImageFlops(model).count(BatchCounts(0, 0, 0, **counts))


def counted(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """torch's, of the features of the image, and of their gradients."""
    names = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
    with FlopCounterMode(display=False) as counter:
        features = model.get_image_features(**{name: inputs[name] for name in names if name in inputs}).pooler_output
        features = torch.cat(list(features)) if isinstance(features, (list, tuple)) else features
        if features.requires_grad:
            features.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_frozen_vision_encoder_costs_what_torch_counts_of_its_forward_pass(name: str) -> None:
    model, inputs = made(name, trained="none")
    assert of_images(model, inputs) == pytest.approx(counted(model, inputs), rel=FAMILIES[name])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "idefics3", "gemma3"])
def test_a_trained_one_costs_what_torch_counts_of_both_passes(name: str) -> None:
    """All but the gradient of the pixels, and but for the first matrix, which asks for none: torch has neither."""
    model, inputs = made(name)
    counts = count_images(inputs, model.config)
    first = next(p for n, p in model.named_parameters() if "patch_embed" in n and p.dim() > 1)
    of_pixels = 2 * first.numel() * counts.num_patches
    assert of_images(model, inputs) - of_pixels == pytest.approx(counted(model, inputs), rel=1e-6)


def test_text_costs_as_much_as_without_images() -> None:
    model, _ = made("llava")
    counts = BatchCounts(30, 100, 900)
    text = StepFlops(model.model.language_model).count(counts._replace(num_label_tokens=0))
    assert ImageFlops(model).count(counts) == text + 30 * 6 * model.lm_head.weight.numel()
