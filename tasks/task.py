"""What a task is, and which one a model is for.

A task is what differs between kinds of models. Each is a module of this folder with the names of `Task`; everything
else gets the task, or a part of it, as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from data.causal_sequences import Truncation
from data.counts import BatchCounts
from data.packing import Offsets
from data.padding import PaddedWidth
from data.sequences import Sequences, TokenSequence
from tasks import causal_lm
from tasks.flops import StepFlops
from tasks.generation import GenerationSettings, PromptedAnswer
from utils.distributed import sum_on_host


class MicroBatch(Protocol):
    """One rank's share of one forward pass. Counts are Python numbers, known without asking the device."""

    @property
    def num_tokens(self) -> int:
        """Input tokens, without padding."""

    @property
    def num_label_tokens(self) -> int: ...
    @property
    def num_attended_pairs(self) -> int:
        """(query, key) pairs that attention visits."""

    @property
    def source_rows(self) -> tuple[int, ...]:
        """Rows of the data that the batch was made from (`data.mixing.global_row`)."""

    def to(self, device: torch.device) -> Any: ...


class Task(Protocol):
    """The names that a module of this folder has."""

    @property
    def AUTO_MODEL(self) -> Any:
        """The transformers class that builds and reads such models."""

    @property
    def PEFT_TYPE(self) -> str:
        """The `task_type` of peft's configs."""

    def check_config(self, model_config: Any, model_name: str) -> None:
        """Raise ConfigError if this config is of no such model, before anything is built."""

    def check_model(self, model: Any, model_name: str) -> None:
        """Raise ConfigError if the loss of this model cannot be computed here."""

    def loss_notes(self, model_config: Any) -> list[str]:
        """Lines to print about what the loss leaves out."""

    def backbone(self, model: Any) -> nn.Module:
        """The submodule whose output the head turns into logits."""

    def load_processor(self, train_config: Any) -> Any:
        """What turns examples into model inputs: a tokenizer, or a processor that has one."""

    def build_sequences(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        name: str,
        context_length: int,
        truncation: Truncation = "right",
        first_row: int = 0,
        is_part: bool = False,
    ) -> Sequences:
        """Check and cut the tokenised rows of a dataset (`data.causal_sequences`)."""

    def make_collator(
        self, processor: Any, vocab_size: int, width: PaddedWidth, *, packing: bool, offsets: Offsets
    ) -> Callable[[list[Any]], Any]:
        """The function that makes a MicroBatch of rows."""

    def summed_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The sum of the loss over the batch's label tokens, fp32 scalar."""

    def make_flops(self, model: Any) -> StepFlops:
        """Counts the model FLOPs of a step of this model."""

    def generate(
        self,
        model: Any,
        processor: Any,
        prompt: str,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        add_bos: bool = True,
        more_end_ids: Sequence[int] = (),
    ) -> str:
        """The model's answer to a prompt."""

    def prompted_answer(self, sequence: TokenSequence) -> PromptedAnswer:
        """What generation at evaluation makes of a sequence: its prompt, and the answer to compare with."""

    def generate_batch(
        self,
        model: Any,
        processor: Any,
        sequences: Sequence[TokenSequence],
        settings: GenerationSettings,
        *,
        in_step: bool,
    ) -> list[str]:
        """The text that the model generates for each sequence's prompt, on the device where it computes.

        Args:
            in_step: call the model as often as every other rank does (`policies.generating`).
        """


def find_task(model_config: Any) -> Task:
    """The task of the model with this config."""
    return causal_lm


def count_globally(micro_batches: Sequence[MicroBatch]) -> BatchCounts:
    """The counts of the step's global batch. Every rank must call this; it does not touch the device."""
    fields = BatchCounts._fields
    return BatchCounts(*map(int, sum_on_host(*(sum(getattr(b, field) for b in micro_batches) for field in fields))))
