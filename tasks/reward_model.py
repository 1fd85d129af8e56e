"""Reward models: one score of a text, higher for the better answer. `tasks.task.Task` says what each method is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from configs.preference import REWARD_MODEL
from configs.training import TrainConfig
from data.pipeline import RunData
from data.sequences.pairs import AnswerPair, build_pairs
from data.sequences.reading import Reading
from data.tokens.encoding import ONE_TEXT
from tasks.labels import Labels
from tasks.micro_batch import BatchShape
from tasks.pair_batches import shape_of_pairs, texts_of
from tasks.task import BatchForm, Task
from tasks.text_batches import TextCollator, TextMicroBatch
from tasks.text_classification import TextClassification


@dataclass(frozen=True, kw_only=True)
class RewardMicroBatch(TextMicroBatch):
    """A TextMicroBatch whose texts are pairs: the chosen answer's, then the rejected one's."""

    @property
    def num_loss_terms(self) -> int:
        """The loss is a mean over pairs."""
        return self.num_samples // 2


@dataclass(frozen=True)
class RewardCollator:
    """Makes a RewardMicroBatch of rows of pairs. Under padding each of a pair's two texts has a row to itself."""

    collate: TextCollator
    packing: bool

    def __call__(self, rows: list[list[AnswerPair]]) -> RewardMicroBatch:
        parted = [[text for pair in row for text in texts_of(pair)] for row in rows]
        batch = self.collate(parted if self.packing else [[text] for row in parted for text in row])
        return RewardMicroBatch(**{field.name: getattr(batch, field.name) for field in fields(batch)})


@dataclass(frozen=True)
class RewardModel(TextClassification):
    """Models that score texts, learned from pairs of a chosen and a rejected answer."""

    NAME: ClassVar[str] = REWARD_MODEL
    MEAN_OVER: ClassVar[str] = "pairs"
    LEARNS: ClassVar[Any] = "pairs"
    OWN_SETTINGS: ClassVar[tuple[str, ...]] = ("context_length",)
    EVAL_FIGURES: ClassVar[Mapping[str, bool]] = {"accuracy": True, "margin": True}

    def is_made_for(self, model_config: PreTrainedConfig) -> bool:
        """Never: a classifier's config does not say that its one score is a reward."""
        return False

    def make_reading(
        self, processor: Any, model_config: PreTrainedConfig, train_config: TrainConfig, lengths: Sequence[int]
    ) -> Reading:
        return Reading(ONE_TEXT, build_pairs)

    def with_data(
        self,
        model_config: PreTrainedConfig,
        train_config: TrainConfig,
        processor: Any,
        data: RunData,
        datasets: Sequence[str],
    ) -> tuple[Task, PreTrainedConfig, RunData]:
        """The model has one output, which transformers gives as it is."""
        Labels("regression", ()).write(model_config)
        model_config.get_text_config().pad_token_id = processor.pad_token_id
        return self, model_config, data

    def make_collator(self, processor: Any, model_config: PreTrainedConfig, form: BatchForm) -> Any:
        if not form.packing:
            form = BatchForm(form.vocab_size, form.widths, form.packing, form.offsets, 2 * form.num_rows)
        return RewardCollator(super().make_collator(processor, model_config, form), form.packing)

    def shortened(self, sequence: Any, num_tokens: int, num_labels: int) -> Any:
        """A pair of which both texts are cut to so many tokens."""
        chosen, rejected = (text.input_ids[:num_tokens] for text in texts_of(sequence))
        ids = np.concatenate([chosen, rejected])
        return sequence._replace(input_ids=ids, labels=ids, num_chosen=len(chosen))

    def summed_loss(self, model: nn.Module, batch: TextMicroBatch, loss_grad: float | None = None) -> torch.Tensor:
        """The sum over pairs of -log sigmoid(chosen - rejected) (Bradley and Terry, 1952; Ouyang et al., "Training
        language models to follow instructions", 2022, equation 1)."""
        scores = self.scores(model, batch)
        return -F.logsigmoid(_margins(scores, batch)).sum() + 0.0 * scores.sum()

    def eval_sums(self, model: nn.Module, batch: TextMicroBatch) -> torch.Tensor:
        margins = _margins(self.scores(model, batch), batch)
        parts = (-F.logsigmoid(margins), margins > 0, margins)
        return torch.stack([part.double().sum() for part in parts])

    def eval_figures(self, sums: Sequence[float], num_loss_terms: int) -> dict[str, float]:
        if not num_loss_terms:
            return {}
        return {name: total / num_loss_terms for name, total in zip(self.EVAL_FIGURES, sums, strict=True)}

    def meta_batch(
        self, model_config: PreTrainedConfig, train_config: TrainConfig, shape: BatchShape
    ) -> RewardMicroBatch:
        shape = shape_of_pairs(shape)
        batch = super().meta_batch(model_config, train_config, shape)
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return RewardMicroBatch(**{**values, "num_samples": shape.rows // 2 * 2})


def _margins(scores: torch.Tensor, batch: TextMicroBatch) -> torch.Tensor:
    """By how much the chosen answer's score is the higher one, fp32 [pairs]."""
    of_pairs = scores[: batch.num_samples, 0].view(-1, 2)
    return of_pairs[:, 0] - of_pairs[:, 1]
