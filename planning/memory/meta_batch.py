"""Micro-batches without values, on the meta device, with the shapes of a run's own."""

from __future__ import annotations

from typing import Any

import torch

from resolving.resolved import Resolved
from tasks import causal_lm, image_text, seq2seq_lm
from tasks.causal_batches import CausalMicroBatch
from tasks.image_batches import ImageTextMicroBatch
from tasks.seq2seq_batches import Seq2SeqMicroBatch
from utils.errors import ConfigError


def meta_batch(
    resolved: Resolved, rows: int, widths: tuple[int, ...], *, label_share: float, packed: bool, by_offsets: bool
) -> Any:
    """A micro-batch of the run's task (`tasks.task.MicroBatch`).

    Args:
        widths: tokens of a row, and of a target if targets are apart.
        label_share: of the tokens, those that a loss is computed for.
        by_offsets: the model takes no mask (`policies.attention.choice`).

    Raises:
        ConfigError: for a model of images whose inputs are not known here.
    """
    match resolved.task.NAME:
        case causal_lm.NAME:
            return _causal(rows, widths[0], label_share, packed=packed, by_offsets=by_offsets)
        case seq2seq_lm.NAME:
            return _seq2seq(rows, *widths)
        case image_text.NAME:
            return _image_text(resolved, rows, widths[0])
    raise AssertionError(resolved.task.NAME)


def num_image_tokens(model_config: Any) -> int:
    """The positions that an image takes in the text.

    Raises:
        ConfigError: if a config does not say so, as with models that cut images into tiles.
    """
    queries = getattr(model_config, "num_query_tokens", None)
    if isinstance(queries, int):  # BLIP-2 and InstructBLIP
        return queries
    vision = model_config.vision_config
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int) and hasattr(model_config, "vision_feature_layer"):  # LLaVA
        return (size // patch) ** 2 + (getattr(model_config, "vision_feature_select_strategy", "") == "full")
    raise ConfigError(
        f"--dry_run: how many tokens an image becomes in a {model_config.model_type} model is not known before one is "
        "read; plans are made for BLIP-2 and LLaVA models, and for text"
    )


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _causal(rows: int, width: int, label_share: float, *, packed: bool, by_offsets: bool) -> CausalMicroBatch:
    num_labels = max(1, round(label_share * rows * (width - 1)))
    mask = None if packed or by_offsets else _ids(rows, width)
    if packed and not by_offsets:  # the mask that transformers makes of restarting position ids
        mask = torch.empty(rows, 1, width, width, dtype=torch.bool, device="meta")
    return CausalMicroBatch(
        input_ids=_ids(rows, width),
        labels=_ids(rows, width),
        position_ids=_ids(rows, width) if packed else None,
        target_positions=_ids(num_labels),
        targets=_ids(num_labels),
        attention_mask=mask,
        num_tokens=rows * width,
        num_label_tokens=num_labels,
        num_attended_pairs=0,
        source_rows=(),
    )


def _seq2seq(rows: int, width: int, target_width: int) -> Seq2SeqMicroBatch:
    num_labels = rows * target_width
    return Seq2SeqMicroBatch(
        input_ids=_ids(rows, width),
        attention_mask=_ids(rows, width),
        decoder_input_ids=_ids(rows, target_width),
        labels=_ids(rows, target_width),
        target_positions=_ids(num_labels),
        targets=_ids(num_labels),
        num_tokens=rows * (width + target_width),
        num_label_tokens=num_labels,
        num_attended_pairs=0,
        source_rows=(),
        num_decoder_tokens=0,
        num_decoder_pairs=0,
        num_cross_pairs=0,
    )


def _image_text(resolved: Resolved, rows: int, text: int) -> ImageTextMicroBatch:
    """An image per row, and behind it the caption; a decoder of its own writes the caption."""
    config = resolved.model_config
    vision, apart = config.vision_config, getattr(config.get_text_config(), "is_encoder_decoder", False)
    caption = min(text, resolved.config.train_config.max_text_length)
    width = num_image_tokens(config) + (2 if apart else caption)
    pixels = torch.empty(rows, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size, device="meta")
    inputs = {"pixel_values": pixels, "input_ids": _ids(rows, width), "attention_mask": _ids(rows, width)}
    if apart:
        inputs["decoder_input_ids"] = _ids(rows, caption)
    num_labels = rows * caption
    return ImageTextMicroBatch(
        inputs=inputs,
        target_positions=_ids(num_labels),
        targets=_ids(num_labels),
        num_tokens=rows * width,
        num_label_tokens=num_labels,
        num_attended_pairs=0,
        source_rows=(),
    )
