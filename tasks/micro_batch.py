"""What every task's micro-batches have, their shape in a plan, and how tensors move to a device or another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch

from data.batches.counts import BatchCounts, ImageTokens
from ranks.collectives import sum_on_host
from tasks.sent_tensors import received, to_send


@dataclass(frozen=True)
class BatchShape:
    """What a plan knows of a micro-batch."""

    rows: int
    widths: tuple[int, ...]  # tokens of a row, and of a target if targets are apart
    label_share: float = 1.0  # of the tokens, those that a loss is computed for
    images: ImageTokens | None = None  # None: there are none, or the data is not at hand
    packed: bool = False  # several sequences share a row
    by_offsets: bool = False  # the model takes no mask (`policies.attention.choice`)

    @property
    def width(self) -> int:
        """Of a row that has no target apart from it."""
        (width,) = self.widths
        return width


class MicroBatch(Protocol):
    """One rank's share of one forward pass. Counts are Python numbers, known without asking the device."""

    @property
    def num_tokens(self) -> int:
        """Input tokens, without padding."""

    @property
    def num_loss_terms(self) -> int:
        """The terms of the batch's loss, which is a sum: see `Task.MEAN_OVER`. Those of all ranks and micro-batches
        divide it."""

    @property
    def num_label_tokens(self) -> int: ...
    @property
    def num_attended_pairs(self) -> int:
        """(query, key) pairs that attention visits; see `data.batches.counts.BatchCounts`, also for the others."""

    @property
    def num_decoder_tokens(self) -> int: ...
    @property
    def num_decoder_pairs(self) -> int: ...
    @property
    def num_cross_pairs(self) -> int: ...
    @property
    def num_image_features(self) -> int: ...
    @property
    def num_patches(self) -> int: ...
    @property
    def num_patch_pairs(self) -> int: ...
    @property
    def num_window_pairs(self) -> int: ...

    @property
    def source_rows(self) -> tuple[int, ...]:
        """The batch's examples, by their numbers in the data (`data.batches.mixing.global_row`)."""

    @property
    def targets(self) -> torch.Tensor:
        """int64 [n], the label tokens."""

    @property
    def target_positions(self) -> torch.Tensor:
        """int64 [n], the positions of the flattened [batch x seq] that predict them, in order."""

    @property
    def target_weights(self) -> torch.Tensor | None:
        """fp32 [n], what the loss of each label token is multiplied by in training; None: 1."""

    @property
    def teacher_ids(self) -> torch.Tensor | None:
        """int64 [n, k], the tokens that a teacher held most likely at each label token's place; None: no teacher."""

    @property
    def teacher_logprobs(self) -> torch.Tensor | None:
        """fp32 [n, k], the logarithms of their probabilities."""

    @property
    def text_ids(self) -> torch.Tensor:
        """int64 [batch, seq], what the decoder reads: each label token is the input at the position after its own."""

    @property
    def row_lengths(self) -> torch.Tensor | None:
        """int64 [batch], tokens of each row of `text_ids`, without the padding on its right; None: there is none, or
        nothing asks."""

    def with_text_ids(self, ids: torch.Tensor) -> Self: ...
    def to(self, device: torch.device) -> Self: ...


Batch = TypeVar("Batch", bound=MicroBatch)


class TensorBatch:
    """A frozen dataclass of tensors and numbers. Tensors named in ON_HOST stay in host memory."""

    ON_HOST: ClassVar[tuple[str, ...]] = ("labels",)

    # Of a model that is no encoder-decoder (see `data.batches.counts.BatchCounts`).
    num_decoder_tokens = 0
    num_decoder_pairs = 0
    num_cross_pairs = 0

    # Of a batch without images.
    num_image_features = 0
    num_patches = 0
    num_patch_pairs = 0
    num_window_pairs = 0

    # Asked for by mixtures of experts alone, and no encoder-decoder that trains is one.
    row_lengths: torch.Tensor | None = None

    # Of causal models alone.
    target_weights: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None

    num_label_tokens: int

    @property
    def num_loss_terms(self) -> int:
        """By default the loss is a mean over label tokens."""
        return self.num_label_tokens

    def to(self, device: torch.device) -> Self:
        # From pinned memory the copy is queued, and the host goes on.
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Called by the DataLoader."""
        return self._map(lambda tensor: tensor.pin_memory())

    def __getstate__(self) -> dict[str, Any]:
        return to_send(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # vars(): the dataclass is frozen.
        vars(self).update(received(state))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        moved = {name: function(tensor) for name, tensor in tensors.items() if name not in self.ON_HOST}
        return replace(self, **moved)  # type: ignore[type-var]


class HasOffsets(Protocol):
    """A micro-batch of rows that may be packed."""

    @property
    def cu_seqlens(self) -> torch.Tensor | None: ...
    @property
    def max_seqlen(self) -> int: ...


def offsets_of(batch: HasOffsets) -> dict[str, Any]:
    """A batch's offsets as transformers names them, for queries and keys apart; nothing without."""
    if batch.cu_seqlens is None:
        return {}
    offsets: dict[str, Any] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.cu_seqlens)
    return offsets | dict.fromkeys(("max_length_q", "max_length_k"), batch.max_seqlen)


def meta_ids(*shape: int) -> torch.Tensor:
    """Token ids without values, int64 on the meta device."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def count_globally(micro_batches: Sequence[MicroBatch]) -> BatchCounts:
    """The counts of the step's global batch. Every rank must call this; it does not touch the device."""
    fields = BatchCounts._fields
    return BatchCounts(*map(int, sum_on_host(*(sum(getattr(b, field) for b in micro_batches) for field in fields))))
