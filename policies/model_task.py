"""The interface of a task that policies use."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel


class ModelTask(Protocol):
    """The part of `tasks.task.Task` that concerns the model."""

    @property
    def AUTO_MODEL(self) -> Any: ...
    @property
    def PEFT_TYPE(self) -> str | None: ...
    @property
    def PACKS(self) -> bool: ...
    @property
    def READS_IMAGES(self) -> bool: ...
    def check_model(self, model: PreTrainedModel, model_name: str) -> list[str]: ...
    def backbone(self, model: PreTrainedModel) -> list[nn.Module]: ...
    def compute_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor: ...
