"""Causal language models that learn which of two answers is preferred. `tasks.task.Task` says what methods are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from configs.preference import PREFERENCE, LossType
from configs.run import RunConfig
from configs.training import TrainConfig
from data.sequences.pairs import build_pairs
from data.sequences.reading import Reading
from data.sequences.tokenized import TokenSequence
from data.tokens.encoding import ONE_TEXT
from tasks.causal_batches import CausalMicroBatch, causal_meta_batch
from tasks.causal_lm import CausalLM
from tasks.generation import PromptedAnswer
from tasks.micro_batch import BatchShape, meta_ids
from tasks.pair_batches import PairCollator, PairMicroBatch, keys_of, shape_of_pairs, texts_of
from tasks.preference_losses import PreferenceLoss, Preferences
from tasks.task import BatchForm


@dataclass(frozen=True)
class Preference(CausalLM):
    """Causal language models that learn from pairs of answers; --loss_type says how."""

    NAME: ClassVar[str] = PREFERENCE
    MEAN_OVER: ClassVar[str] = "pairs"
    COMPUTES_TRAINED_HEAD_TWICE: ClassVar[bool] = True
    EVAL_FIGURES: ClassVar[Mapping[str, bool]] = {
        "reward_accuracy": True,
        "reward_margin": True,
        "chosen_reward": True,
        "rejected_reward": False,
    }

    loss: PreferenceLoss | None = None  # of the run; None: nothing is trained, as in tools
    shares_prompts: bool = False  # both answers of a pair read one prompt (`resolving.shared_prompts`)

    @property
    def needs_reference(self) -> bool:
        """Whether answers are compared with their log-probabilities before training."""
        return self.loss is not None and self.loss.needs_reference

    def for_run(self, config: RunConfig) -> Preference:
        loss_type = cast(LossType, config.train_config.loss_type)
        return Preference(PreferenceLoss(loss_type, config.preference_config))

    # From examples to batches

    def make_reading(
        self, processor: Any, model_config: PreTrainedConfig, train_config: TrainConfig, lengths: Sequence[int]
    ) -> Reading:
        return Reading(ONE_TEXT, partial(build_pairs, shares_prompts=self.shares_prompts))

    def make_collator(self, processor: Any, model_config: PreTrainedConfig, form: BatchForm) -> Any:
        if self.shares_prompts:
            form = replace(form, offsets="all")
        return PairCollator(super().make_collator(processor, model_config, form), self.shares_prompts)

    def model_inputs(self, batch: CausalMicroBatch) -> dict[str, Any]:
        return super().model_inputs(batch) | keys_of(_pairs(batch))

    def shortened(self, sequence: TokenSequence, num_tokens: int, num_labels: int) -> TokenSequence:
        """A part of the chosen answer's sequence, by itself."""
        return super().shortened(texts_of(sequence)[0], num_tokens, num_labels)

    # The loss

    def summed_loss(self, model: nn.Module, batch: CausalMicroBatch, loss_grad: float | None = None) -> torch.Tensor:
        """The sum of the pairs' losses, fp32 scalar. Args: as of `tasks.task.Task.summed_loss`."""
        return self._loss(model, batch, objective=partial(self._summed, _pairs(batch)), loss_grad=loss_grad)

    def eval_sums(self, model: nn.Module, batch: CausalMicroBatch) -> torch.Tensor:
        """The sum of the pairs' losses, the pairs whose chosen answer has the higher reward, and the sums of chosen and
        of rejected rewards: fp64 [4]."""
        return self._loss(model, batch, objective=partial(self._figures, _pairs(batch)))

    def eval_figures(self, sums: Sequence[float], num_loss_terms: int) -> dict[str, float]:
        correct, chosen, rejected = (total / max(1, num_loss_terms) for total in sums)
        figures = (correct, chosen - rejected, chosen, rejected)
        return dict(zip(self.EVAL_FIGURES, figures, strict=True))

    def answer_scores(self, model: nn.Module, batch: PairMicroBatch) -> torch.Tensor:
        """The log-probabilities of each pair's answers, fp32 [pairs, 2]."""
        return _scores(batch, self.token_losses(model, batch))

    def _summed(self, batch: PairMicroBatch, token_losses: torch.Tensor) -> torch.Tensor:
        return self._preferences(batch, token_losses).losses.sum()

    def _figures(self, batch: PairMicroBatch, token_losses: torch.Tensor) -> torch.Tensor:
        losses, rewards = self._preferences(batch, token_losses)
        is_right = rewards[:, 0] > rewards[:, 1]
        return torch.cat([losses.double().sum()[None], is_right.double().sum()[None], rewards.double().sum(0)])

    def _preferences(self, batch: PairMicroBatch, token_losses: torch.Tensor) -> Preferences:
        assert self.loss is not None, "the task of a run has a loss (for_run)"
        lengths = batch.answer_lengths[: 2 * batch.num_pairs].view(-1, 2)
        return self.loss.of(_scores(batch, token_losses), lengths, batch.reference)

    # Plans and answers

    def meta_batch(
        self, model_config: PreTrainedConfig, train_config: TrainConfig, shape: BatchShape
    ) -> PairMicroBatch:
        shape = shape_of_pairs(shape)
        batch, rows, width = causal_meta_batch(shape), shape.rows, shape.width
        shared: dict[str, Any] = {}
        if self.shares_prompts:  # what has no label is the pairs' prompts, or little else
            num_copies = int((1 - shape.label_share) * width)
            shared["key_places"] = meta_ids(rows * (width + num_copies))
            shared["key_copies"] = meta_ids(2, rows * width)
        return PairMicroBatch(
            **vars(batch),
            **shared,
            answers=meta_ids(batch.num_label_tokens),
            answer_lengths=torch.empty(2 * rows, device="meta"),
            reference=torch.empty(rows, 2, device="meta"),
        )

    def prompted_answer(self, sequence: TokenSequence) -> PromptedAnswer:
        """The chosen answer, and its prompt."""
        return super().prompted_answer(texts_of(sequence)[0])


def _pairs(batch: CausalMicroBatch) -> PairMicroBatch:
    assert isinstance(batch, PairMicroBatch)
    return batch


def _scores(batch: PairMicroBatch, token_losses: torch.Tensor) -> torch.Tensor:
    """The sums of each answer's tokens, fp32 [pairs, 2]. In fp64, where the order of terms does not show in fp32."""
    sums = token_losses.new_zeros(max(1, len(batch.answer_lengths)), dtype=torch.float64)
    sums = sums.index_add(0, batch.answers, -token_losses.double())
    return sums[: 2 * batch.num_pairs].view(-1, 2).float()
