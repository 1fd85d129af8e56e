"""Causal language models: model class, collation, summed loss, generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from data.labels import IGNORE_INDEX, learned_positions
from data.loader import Document
from data.packing import Offsets
from data.padding import EXACT, PaddedWidth
from utils.distributed import sum_on_host

AUTO_MODEL = AutoModelForCausalLM


@dataclass(frozen=True)
class MicroBatch:
    """One rank's share of one forward pass. Counts are Python numbers, known without asking the device."""

    input_ids: torch.Tensor  # int64 [batch, seq]
    labels: torch.Tensor  # int64 [batch, seq], not shifted, -100 = not learned
    position_ids: torch.Tensor  # int64 [batch, seq], restarting at 0 with every document
    label_positions: torch.Tensor  # int64 [n], where something is learned in the flattened [batch x seq]
    attention_mask: torch.Tensor | None  # int64 [batch, seq], 1 = token; None under packing
    num_tokens: int  # without padding
    num_label_tokens: int
    num_attended_pairs: int  # (query, key) pairs that causal attention inside documents visits
    source_rows: tuple[int, ...]  # rows of the data file
    document_offsets: torch.Tensor | None = None  # int32 [documents + 1] in the flattened [batch x seq]
    longest_document: int = 0  # tokens; 0 without offsets

    def to(self, device: torch.device) -> MicroBatch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """Called by the DataLoader."""
        return self._map(lambda tensor: tensor.pin_memory())

    def __getstate__(self) -> dict[str, Any]:
        """By value: a pipe takes a batch sooner than torch hands over a file descriptor for each of its tensors."""
        return {name: value.numpy() if torch.is_tensor(value) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {name: torch.from_numpy(value) for name, value in state.items() if isinstance(value, np.ndarray)}
        vars(self).update(state | tensors)

    def _map(self, function: Any) -> MicroBatch:
        return replace(
            self,
            input_ids=function(self.input_ids),
            labels=function(self.labels),
            position_ids=function(self.position_ids),
            label_positions=function(self.label_positions),
            attention_mask=None if self.attention_mask is None else function(self.attention_mask),
            document_offsets=None if self.document_offsets is None else function(self.document_offsets),
        )


@dataclass(frozen=True)
class Collator:
    """Rows of documents -> a MicroBatch, padded on the right to the width that its longest row asks for.

    Under packing the model gets position ids that restart with every document and no attention mask: that is how
    transformers knows the documents of a row apart (with a mask, or with a KV cache, attention would cross
    them). The padding at a row's end is one more document, of which nothing is learned. Under padding the
    mask says where the tokens are.
    """

    packing: bool
    padding_id: int
    width: PaddedWidth = EXACT
    offsets: Offsets = "none"  # bring `document_offsets` along, for attention that goes by them

    def __call__(self, rows: list[list[Document]]) -> MicroBatch:
        documents = [document for row in rows for document in row]
        lengths = np.array([len(ids) for ids, _, _ in documents], dtype=np.int64)
        # An empty micro-batch (fewer rows than ranks) becomes two tokens with nothing to learn.
        row_lengths = np.array([sum(len(ids) for ids, _, _ in row) for row in rows] or [0])
        shape = (len(row_lengths), max(2, int(self.width.of(row_lengths.max()))))
        places = np.arange(shape[1])
        is_token = places < row_lengths[:, None]
        input_ids = np.full(shape, self.padding_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        position_ids = places - self.packing * row_lengths[:, None]  # where padding is one more document, from 0 on
        if documents:
            starts = np.cumsum(lengths) - lengths
            targets = np.concatenate([targets for _, targets, _ in documents])
            targets[starts] = IGNORE_INDEX  # a first token follows nothing
            input_ids[is_token] = np.concatenate([ids for ids, _, _ in documents])
            labels[is_token] = targets
            position_ids[is_token] = np.arange(len(targets)) - np.repeat(starts, lengths)
        else:
            is_token[:] = True  # a row without any visible token would be all NaN in some attention kernels
        num_documents = (position_ids == 0).sum()  # what fills a row is one more
        needs_offsets = self.offsets == "all" or (self.offsets == "shared" and num_documents > shape[0])
        offsets = _document_offsets(position_ids) if needs_offsets else None
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(position_ids),
            label_positions=learned_positions(torch.from_numpy(labels)),
            attention_mask=None if self.packing else torch.from_numpy(is_token.astype(np.int64)),
            num_tokens=int(lengths.sum()),
            num_label_tokens=int((labels != IGNORE_INDEX).sum()),
            num_attended_pairs=int((lengths * (lengths + 1) // 2).sum()),
            source_rows=tuple(source for _, _, source in documents),
            document_offsets=None if offsets is None else torch.from_numpy(offsets),
            longest_document=0 if offsets is None else int(np.diff(offsets).max()),
        )


def _document_offsets(position_ids: np.ndarray) -> np.ndarray:
    """Where documents begin in the flattened [batch x seq], and where the last ends: int32 [documents + 1]."""
    return np.append(np.flatnonzero(position_ids == 0), position_ids.size).astype(np.int32)


class BatchCounts(NamedTuple):
    """What a global batch holds, all ranks and micro-batches together."""

    num_label_tokens: int
    num_tokens: int
    num_attended_pairs: int


def count_globally(micro_batches: Sequence[MicroBatch]) -> BatchCounts:
    """Every rank must call this; it does not touch the device."""
    fields = BatchCounts._fields
    return BatchCounts(*map(int, sum_on_host(*(sum(getattr(b, field) for b in micro_batches) for field in fields))))


def summed_loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Sum of next-token cross-entropy over the batch's label tokens, fp32 scalar (see `policies.loss`)."""
    offsets: dict[str, Any] = {}
    if batch.document_offsets is not None:
        offsets = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.document_offsets)
        offsets |= dict.fromkeys(("max_length_q", "max_length_k"), batch.longest_document)
    return model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        labels=batch.labels,
        label_positions=batch.label_positions,
        use_cache=False,
        **offsets,
    )


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    add_bos: bool = True,
    more_end_ids: Sequence[int] = (),
) -> str:
    """The model's answer to a prompt. The model is one process's, not sharded.

    Args:
        temperature: 0 takes the likeliest token each time; above, torch's random state decides.
        add_bos: put the tokenizer's first token before the prompt, as training does except under a chat template.
        more_end_ids: tokens that end the answer, beside the tokenizer's end token.
    """
    start = [] if tokenizer.bos_token_id is None or not add_bos else [tokenizer.bos_token_id]
    ids = torch.tensor([start + tokenizer.encode(prompt, add_special_tokens=False)], device=model.device)
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=[tokenizer.eos_token_id, *more_end_ids],
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
