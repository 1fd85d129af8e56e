"""The loss of a batch of three as a run computes it, next to transformers' own of one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.families.random_weights import make_random_model
from benchmarks.families.tiny_configs import VOCAB
from configs.flags import parse_flags
from data.batches.padding import PaddedWidth
from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from policies.attention.choice import (
    choose_attention,
    keep_documents_apart,
    rows_that_need_offsets,
)
from policies.attention.packing_leaks import check_packing_isolates
from policies.linear_attention.choice import use_offsets_in_states
from policies.loading import attention_settings
from policies.loss.label_leaks import find_label_leak
from policies.loss.summed_loss import use_summed_loss
from policies.mixed_precision import resolve_precision
from tasks.finding import TASKS, find_task
from tasks.task import BatchForm, Task
from utils.device import DeviceFacts
from utils.errors import ConfigError, in_one_line

LENGTHS, NUM_PROMPT = (11, 23, 17), 4  # tokens of each sample, and those of them without a loss
ROW_LENGTH = 64
TOLERANCE = 1e-5
SHIFTED_BY_CALLER = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
    *("trocr", "whisper", "xlm"),
)
"""Model types whose causal model's loss compares the logits of a position with the label of that position."""
CPU = DeviceFacts("cpu", 2**34, has_bf16=False)


class OwnLossError(Exception):
    """transformers itself cannot compute the loss of this family's model."""


@dataclass(frozen=True)
class Cell:
    """One batching of a family: what was measured, or why not. Labels in sight are a refusal, as they are in a run."""

    apart: float | None = None  # largest difference of a sample's mean loss, relative if the loss is above 1
    refused: str = ""  # the line of the refusal
    error: str = ""  # of our code

    @property
    def is_right(self) -> bool:
        return bool(self.refused) or (self.apart is not None and self.apart <= TOLERANCE)


def make_samples(*, apart: bool) -> list[TokenSequence]:
    """Random tokens.

    Args:
        apart: labels are a text of their own, as for an encoder-decoder.
    """
    generator = np.random.default_rng(0)
    samples = []
    for source, length in enumerate(LENGTHS):
        ids = generator.integers(3, VOCAB, length).astype(np.int32)
        labels = np.where(np.arange(length) < NUM_PROMPT, IGNORE_INDEX, ids).astype(np.int32)
        samples.append(TokenSequence(ids, ids[::-1][: length // 2].copy() if apart else labels, source))
    return samples


@torch.no_grad()
def own_losses(model: Any, samples: list[TokenSequence]) -> list[float]:
    """transformers' own loss of each sample alone.

    Raises:
        OwnLossError: with its error.
    """
    try:
        return [
            float(
                model(
                    input_ids=torch.from_numpy(sample.input_ids.astype(np.int64))[None],
                    labels=torch.from_numpy(_own_labels(model, sample.labels).astype(np.int64))[None],
                    use_cache=False,
                ).loss
            )
            for sample in samples
        ]
    except Exception as error:
        raise OwnLossError(f"{type(error).__name__}: {in_one_line(error)}") from error


def _own_labels(model: Any, labels: np.ndarray) -> np.ndarray:
    """The labels as this model's own loss takes them: the decoders of encoder-decoders, and XLM, do not shift them."""
    is_shifted_by_caller = not model.config.is_encoder_decoder and model.config.model_type in SHIFTED_BY_CALLER
    return np.append(labels[1:], np.int32(IGNORE_INDEX)) if is_shifted_by_caller else labels


def measure(family: str, config: Any, auto_model: Any, own: list[float], batching: str) -> Cell:
    """The losses of the run's own code for this batching, by the model's own weights, or its refusal."""
    try:
        return _measure(family, config, auto_model, own, batching)
    except ConfigError as error:
        return Cell(refused=str(error))
    except Exception as error:
        return Cell(error=f"{type(error).__name__}: {in_one_line(error)}")


def _measure(family: str, config: Any, auto_model: Any, own: list[float], batching: str) -> Cell:
    settings = parse_flags(["--model_name", family, "--batching_strategy", batching, "--mixed_precision", "False"])
    task: Task[Any] = next(task for task in TASKS if task.AUTO_MODEL is auto_model)
    find_task(config, task.NAME)  # as --task
    task.check_config(config, family)
    packing = batching == "packing"
    train = settings.train_config
    precision, _ = resolve_precision(train, settings.fsdp_config, CPU)
    if packing:
        keep_documents_apart(settings, config, precision, CPU)
    model = make_random_model(auto_model, config, **attention_settings(train, config))
    task.check_model(model, family)
    if task.PACKS:
        use_offsets_in_states(model, CPU, packed=packing)
        choose_attention(model, train, precision, CPU, ROW_LENGTH)
    use_summed_loss(model, task.backbone(model), 16, task.compute_logits)
    widths = (PaddedWidth(1, ROW_LENGTH),) * len(task.LENGTHS)
    offsets = rows_that_need_offsets(model, ROW_LENGTH, packed=packing) if task.PACKS else "none"
    form = BatchForm(VOCAB, widths, packing, offsets)
    collate = task.make_collator(SimpleNamespace(pad_token_id=0, eos_token_id=2), model.config, form)
    samples = make_samples(apart=not task.PACKS)
    if packing:
        _refuse_leaks(model, task, collate, [[samples[0]], [samples[1]]])  # before the trial of packing, as a run does
        check_packing_isolates(
            model, lambda rows: task.token_losses(model, collate(rows)), vocab_size=VOCAB, row_length=ROW_LENGTH
        )
    rows = [[samples[0], samples[1]], [samples[2]]] if packing else [[sample] for sample in samples]
    first_label = int(task.PACKS)  # labels of a causal model begin with a token that follows nothing
    counts = [int(np.sum(sample.labels[first_label:] != IGNORE_INDEX)) for sample in samples]
    return compare(model, task, collate, rows, counts, own, tried=[[samples[0]], [samples[1]]])


def compare(
    model: nn.Module,
    task: Task[Any],
    collate: Callable[[list[Any]], Any],
    rows: list[Any],
    num_labels: list[int],
    own: list[float],
    *,
    tried: list[Any],
) -> Cell:
    """The cell of a batch of these rows.

    Args:
        num_labels: of each sample, in the order of the rows.
        own: transformers' mean loss of each sample.
        tried: two rows of one sample for the trial of labels in sight, the shorter one first.

    Raises:
        ConfigError: if labels are in sight, as a run is refused.
    """
    _refuse_leaks(model, task, collate, tried)
    losses = task.token_losses(model, collate(rows)).double().split(num_labels)
    differences = [
        abs(float(ours.mean()) - theirs) / max(1.0, theirs) for ours, theirs in zip(losses, own, strict=True)
    ]
    return Cell(max(differences))


def _refuse_leaks(model: Any, task: Task[Any], collate: Any, tried: list[list[Any]]) -> None:
    """Refuse a model with labels in sight, as a run does."""
    leak = find_label_leak(model, task.token_losses, collate, tried, torch.device("cpu"), tolerance=1e-3)
    if leak is not None:
        raise ConfigError(f"--model_name: with {type(model).__name__} {leak}; give a model of another family")
