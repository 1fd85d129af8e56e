"""The trial of packed rows before the first step: of random text, or of samples of the run with images.

`policies.attention.packing_leaks` says what is tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch

from data.batches.padding import EXACT
from data.batches.step_loader import Unreadable
from data.images.caption_rows import Picture
from data.images.opening import ImageSource, open_image
from data.images.samples import ImageSamples
from data.images.sequences import CaptionedImage, ImageSequences
from data.sequences.tokenized import Sequences
from data.tokens.labels import IGNORE_INDEX
from data.tokens.spans import BadExample
from policies.attention.packing_leaks import (
    NUM_TRIES,
    TriedRow,
    check_packing_isolates,
    check_row_isolates,
    check_same_alone,
)
from policies.attention.shared_prompts import check_shared_prompts
from policies.building import BuiltModel
from policies.quantization.float8 import computed_in_bf16
from preparation.trial_rows import NUM_LOOKED_AT, tolerance_of_losses
from ranks.environment import Environment
from resolving.inputs import Inputs
from resolving.shared_prompts import shares_prompts
from tasks.task import BatchForm


def check_packing(built: BuiltModel, inputs: Inputs, env: Environment) -> None:
    """Refuse packed rows if one sample would see another. Every rank must call this.

    Raises:
        ConfigError: on every rank.
    """
    with computed_in_bf16(built.model):  # in float8 the scale of activations is that of all documents
        if isinstance(inputs.data.train, (ImageSequences, ImageSamples)):
            _check_images(built, inputs, images_to_try(inputs.data.train), env)
            return

        def losses(rows: list[list[Any]]) -> torch.Tensor:
            return _losses(built, inputs, env, _collated(built, inputs, rows))

        check_packing_isolates(
            built.model,
            losses,
            vocab_size=inputs.vocab_size,
            row_length=inputs.resolved.context_length,
            device_type=env.device.type,
        )
        if shares_prompts(inputs.resolved.task):
            check_shared_prompts(
                built.model,
                losses,
                vocab_size=inputs.vocab_size,
                row_length=inputs.resolved.context_length,
                tolerance=tolerance_of_losses(inputs.resolved, env),
            )


def _check_images(built: BuiltModel, inputs: Inputs, row: TriedRow, env: Environment) -> None:
    if isinstance(_collated(built, inputs, [[row.first[0], row.second, row.third[0]]]), Unreadable):
        return  # training meets it, too, and names its row

    def losses(rows: list[list[Any]], *, packing: bool = True) -> torch.Tensor:
        return _losses(built, inputs, env, _collated(built, inputs, rows, packing=packing))

    check_row_isolates(built.model, losses, row)
    tolerance = tolerance_of_losses(inputs.resolved, env)
    check_same_alone(built.model, losses, lambda rows: losses(rows, packing=False), row, tolerance=tolerance)


def _collated(built: BuiltModel, inputs: Inputs, rows: list[list[Any]], *, packing: bool = True) -> Any:
    # Not as compiled layers get them: rows of the trial may be longer than those of the data.
    widths = [EXACT] if inputs.resolved.task.READS_IMAGES else inputs.resolved.widths
    form = BatchForm(inputs.vocab_size, widths, packing, built.empty.offsets)
    return inputs.resolved.task.make_collator(inputs.processor, built.empty.model.config, form)(rows)


def _losses(built: BuiltModel, inputs: Inputs, env: Environment, batch: Any) -> torch.Tensor:
    return inputs.resolved.task.token_losses(built.model, batch.to(env.device))


@dataclass(frozen=True)
class _InvertedPictures:
    """Images of captions in their opposite colors: of the same size, so of as many tokens."""

    pictures: Any

    def open(self, place: int) -> Picture:
        picture = self.pictures.open(place)
        return Picture(_inverted(picture.image), picture.prompt)


@dataclass(frozen=True)
class _InvertedImages:
    """The same of a conversation's images."""

    store: Any

    def sources(self, key: int) -> list[ImageSource]:
        return [_as_bytes(_inverted(open_image(source))) for source in self.store.sources(key)]

    def describe(self, key: int, error: BadExample) -> str:
        text: str = self.store.describe(key, error)
        return text


def _inverted(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.invert(image)


def _as_bytes(image: Any) -> bytes:
    written = BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def images_to_try(sequences: Sequences) -> TriedRow:
    """The three shortest of the first samples, with images if there are any; two get other images and answers."""
    looked_at = np.arange(min(NUM_LOOKED_AT, len(sequences)))
    if isinstance(sequences, ImageSamples) and (with_images := sequences.num_images[looked_at] > 0).any():
        looked_at = looked_at[with_images]
    shortest = looked_at[np.argsort(sequences.lengths[looked_at], kind="stable")]
    first, second, third = (sequences[int(index)] for index in np.resize(shortest, 3))
    learned = [sequences[int(index)].labels for index in shortest]
    pool = np.setdiff1d(np.concatenate(learned), [IGNORE_INDEX])
    return TriedRow(_with_others(first, pool), second, _with_others(third, pool))


def _with_others(sample: Any, pool: np.ndarray) -> list[Any]:
    """The sample, and others with inverted images and other learned tokens; all without labels."""
    unlearned = sample._replace(labels=np.full_like(sample.labels, IGNORE_INDEX))
    is_learned = sample.labels != IGNORE_INDEX
    # Of a conversation other tokens may stand for images, or say whose turn it is.
    places = np.searchsorted(pool, sample.input_ids[is_learned])
    found = [unlearned]
    for number in range(1, NUM_TRIES + 1):
        ids = sample.input_ids.copy()
        ids[is_learned] = pool[(places + number) % len(pool)]
        if isinstance(sample, CaptionedImage):
            found.append(unlearned._replace(input_ids=ids, pictures=_InvertedPictures(sample.pictures)))
        else:
            found.append(unlearned._replace(input_ids=ids, store=sample.store and _InvertedImages(sample.store)))
    return found
