"""A pass of a planned model over a micro-batch on the meta device, prepared once for memory and for work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from planning.machines.cards import Card
from planning.memory.device_kernels import Capability, KernelsOfCard
from planning.memory.known_values import known_values
from planning.memory.meta_batch import meta_batch
from planning.memory.routed_evenly import routed_evenly
from planning.memory.row_lengths import RowLengths
from planning.model.planned_model import PlannedModel
from policies.attention.choice import goes_by_offsets
from policies.embedding_noise import EmbeddingNoise
from policies.vision_features import features_given
from tasks.micro_batch import BatchShape, MicroBatch

DEFAULT_CAPABILITY = (8, 0)
"""The capability of a card of which only the memory is known: all cards of the last five years have flash attention."""


def kernels_of(card: Card) -> Capability:
    """The capability that decides which kernels run on such a card; None: those of a CPU run."""
    return card.compute_capability or DEFAULT_CAPABILITY if card.is_gpu else None


@contextmanager
def pass_on_meta(
    planned: PlannedModel, card: Card, num_rows: int, widths: tuple[int, ...], rows: RowLengths, *, trains: bool
) -> Iterator[tuple[MicroBatch, Callable[[], torch.Tensor]]]:
    """A context with a micro-batch of this shape and a function that computes its loss, as on such a card.

    Args:
        rows: the run's: its share of label tokens, and whether rows are packed.
        trains: False: as in an evaluation.
    """
    resolved, model = planned.resolved, planned.adapted.model
    by_offsets = goes_by_offsets(planned.empty.attention)
    # Ranks that share rows have parts of them; the model's attention counts whole rows of its heads.
    widths = tuple(-(-width // resolved.policies.context.size) for width in widths)
    shape = BatchShape(num_rows, widths, rows.label_share, rows.images, rows.packed, by_offsets)
    batch = meta_batch(resolved, shape, teacher_size=rows.teacher_size if trains else 0)
    alpha, embedding = planned.config.train_config.neftune_noise_alpha, planned.adapted.base.get_input_embeddings()
    noise = EmbeddingNoise(embedding, alpha, seed=0, steps_taken=lambda: 0)
    has_mask = not rows.packed and not by_offsets
    model.train(trains)
    precision = resolved.policies.precision
    # Nothing compiles for the meta device. Saying so imports torch's compiler, which takes a second.
    train, inputs = resolved.config.train_config, resolved.task.model_inputs(batch)
    with (
        torch.compiler.set_stance("force_eager") if train.compile else nullcontext(),
        computed_in(model, precision.compute_dtype if precision.casts else None),
        buffers_on_meta(model),
        KernelsOfCard(kernels_of(card), answer=not has_mask),
        known_values(batch.num_image_features) if resolved.task.READS_IMAGES else nullcontext(),
        routed_evenly(model),
        features_given(planned.adapted.base, inputs) if train.cache_vision_features else nullcontext(),
    ):
        yield batch, lambda: noise.adding(resolved.task.summed_loss)(model, batch)


@contextmanager
def computed_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside this context floating parameters, on the meta device, have the dtype that gathering casts them to."""
    stored = {parameter: parameter.data for parameter in model.parameters()}
    try:
        for parameter, data in stored.items():
            if dtype is not None and data.is_floating_point():
                parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in stored.items():
            parameter.data = data


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Inside this context buffers are on the meta device, as parameters are, whether checkpoints hold them or not.

    Pegasus adds one to its logits, Falcon-H1 multiplies with one, GPT-Neo's is a mask.
    """
    real = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    try:
        for module, name, buffer in real:
            module._buffers[name] = buffer.to("meta")
        yield
    finally:
        for module, name, buffer in real:
            module._buffers[name] = buffer
