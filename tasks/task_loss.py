"""The loss of a task: a sum over the terms of a batch, in training and of an evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic

import torch
from torch import nn

from data.batches.counts import LABEL_TOKENS
from data.sequences.token_columns import OF_TARGETS
from tasks.micro_batch import Batch


class TaskLoss(ABC, Generic[Batch]):
    """How a model's loss is computed and evaluated. By default it is the cross-entropy of label tokens."""

    MEAN_OVER: ClassVar[str] = LABEL_TOKENS
    """What the loss is a mean over, in the global batch: each is a term of `summed_loss`, and a batch has so many
    `num_loss_terms`. The metrics give their number as num_ and this. Only the loss of tokens has a perplexity."""

    EVAL_FIGURES: ClassVar[Mapping[str, bool]] = {"token_accuracy": True, "token_entropy": False}
    """The names of its own figures of an evaluation (`eval_figures`), and whether higher ones are better. By default
    the share of label tokens that the model holds most likely, and the mean entropy of its probabilities at them, in
    nats."""

    @abstractmethod
    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        """The arguments of the model's forward pass over a batch, without those of the loss."""

    def summed_loss(self, model: nn.Module, batch: Batch, loss_grad: float | None = None) -> torch.Tensor:
        """The sum of the loss over the batch's terms (MEAN_OVER), fp32 scalar; by default label tokens' cross-entropy.

        A batch of padding alone, as ranks without rows get it, has the sum 0, with zero gradients.

        Args:
            model: wrapped and sharded as the run has it; call it once.
            loss_grad: the gradient of the loss that `backward` will bring (`policies.loss.summed_loss`).
        """
        return self._loss(model, batch, loss_grad=loss_grad)

    def eval_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sums over a batch of the validation set, [1 + n] on the device: `summed_loss`, and n for `eval_figures`.

        They are added up over batches and ranks, so counts should be exact (fp64). Call the model once.
        """
        if type(self).summed_loss is not TaskLoss.summed_loss:  # another loss, which may be of no tokens
            return self.summed_loss(model, batch)[None]
        return self._loss(model, batch, reduction="figures")

    def eval_figures(self, sums: Sequence[float], num_loss_terms: int) -> dict[str, float]:
        """The task's own figures of an evaluation, named in EVAL_FIGURES, as far as they are defined.

        Args:
            sums: those n of `eval_sums`, over the whole validation set.
        """
        if not sums or not num_loss_terms:
            return {}
        return {name: value / num_loss_terms for name, value in zip(TaskLoss.EVAL_FIGURES, sums, strict=True)}

    @torch.no_grad()
    def token_losses(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The cross-entropy of each label token, fp32 [n], in the order of `batch.target_positions`."""
        return self._loss(model, batch, reduction="none")

    def _loss(self, model: nn.Module, batch: Batch, **given: Any) -> torch.Tensor:
        targets = {"targets": batch.targets, "target_positions": batch.target_positions}
        targets |= {name: value for name in OF_TARGETS if (value := getattr(batch, name)) is not None}
        # With a cache, attention would cross the sequences of a packed row.
        return model(**self.model_inputs(batch), **targets, use_cache=False, **given)
