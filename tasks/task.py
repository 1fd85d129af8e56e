"""What a task is, and which one a model is for.

A task is what differs between kinds of models. Each is a module of this folder with the names of `Task`; everything
else gets the task, or a part of it, as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from configs.run import RunConfig
from configs.training import TrainConfig
from data.batches.counts import BatchCounts
from data.batches.packing import Offsets
from data.batches.padding import PaddedWidth
from data.sequences.reading import Reading
from data.sequences.tokenized import TokenSequence
from ranks.collectives import sum_on_host
from tasks import causal_lm, image_text, seq2seq_lm
from tasks.flops import Cost, flops_per_token
from tasks.generation import GenerationSettings, PromptedAnswer
from utils.errors import ConfigError


class MicroBatch(Protocol):
    """One rank's share of one forward pass. Counts are Python numbers, known without asking the device."""

    @property
    def num_tokens(self) -> int:
        """Input tokens, without padding."""

    @property
    def num_label_tokens(self) -> int: ...
    @property
    def num_attended_pairs(self) -> int:
        """(query, key) pairs that attention visits; see `data.batches.counts.BatchCounts`, also for the next three."""

    @property
    def num_decoder_tokens(self) -> int: ...
    @property
    def num_decoder_pairs(self) -> int: ...
    @property
    def num_cross_pairs(self) -> int: ...

    @property
    def source_rows(self) -> tuple[int, ...]:
        """Rows of the data that the batch was made from (`data.batches.mixing.global_row`)."""

    def to(self, device: torch.device) -> Any: ...


class Flops(Protocol):
    """Counts the model FLOPs of steps."""

    def count(self, counts: BatchCounts) -> float:
        """FLOPs of forward and backward over a global batch."""


class Task(Protocol):
    """The names that a module of this folder has."""

    @property
    def NAME(self) -> str:
        """Its value of --task."""

    @property
    def AUTO_MODEL(self) -> Any:
        """The transformers class that builds and reads such models."""

    @property
    def PEFT_TYPE(self) -> str | None:
        """The `task_type` of peft's configs; None if peft has no such task."""

    @property
    def READS_IMAGES(self) -> bool:
        """Whether an example has an image."""

    @property
    def PACKS(self) -> bool:
        """Whether several sequences may share a row."""

    @property
    def OWN_SETTINGS(self) -> tuple[str, ...]:
        """The fields of TrainConfig that only tasks which list them take."""

    @property
    def LENGTHS(self) -> Mapping[str, int]:
        """The fields of TrainConfig that limit the inputs, and then labels that are apart from them, with defaults."""

    def fits(self, model_config: Any) -> bool:
        """Whether the model with this config can be of this task."""

    def check_config(self, model_config: Any, model_name: str) -> None:
        """Raise ConfigError if this config is of no such model, before anything is built."""

    def check_settings(self, config: RunConfig) -> None:
        """Raise ConfigError for a setting that this task does not take, apart from OWN_SETTINGS of others."""

    def check_model(self, model: Any, model_name: str) -> list[str]:
        """Lines to print on what was changed of a model without weights; raise ConfigError if its loss cannot be
        computed here."""

    def loss_notes(self, model_config: Any) -> list[str]:
        """Lines to print about what the loss leaves out."""

    def stacks(self, model: Any) -> list[nn.Module]:
        """The submodules that hold the layers, in the order in which they run; the head turns the output of the last
        one into logits."""

    def compute_logits(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The logits, by the model's own code, while the last stack returns `hidden` ([1, tokens, hidden_size])."""

    def inputs_of(self, processor: Any, model_config: Any, ids: torch.Tensor) -> dict[str, Any]:
        """The arguments of a forward pass over these token ids, int64 [batch, seq], whatever they mean.

        If READS_IMAGES, over an image and those of the first row.
        """

    def load_processor(self, train_config: Any) -> Any:
        """What turns examples into model inputs: a tokenizer, or a processor that has one."""

    def make_reading(
        self, processor: Any, model_config: Any, train_config: TrainConfig, lengths: Sequence[int]
    ) -> Reading:
        """How examples become sequences.

        Args:
            lengths: what each name in LENGTHS comes to, in tokens.
        """

    def make_collator(
        self,
        processor: Any,
        model_config: Any,
        *,
        vocab_size: int,
        widths: Sequence[PaddedWidth],
        packing: bool,
        offsets: Offsets,
        num_rows: int = 0,
    ) -> Callable[[list[Any]], Any]:
        """The function that makes a MicroBatch of rows.

        Args:
            widths: how wide the inputs, and labels that are apart from them, are padded.
            num_rows: batches are filled up to so many rows, as layers that are compiled for them ask; 0: they are not.
        """

    def summed_loss(self, model: nn.Module, batch: Any, loss_grad: float | None = None) -> torch.Tensor:
        """The sum of the loss over the batch's label tokens, fp32 scalar.

        Args:
            loss_grad: the gradient of the loss that `backward` will bring (`policies.loss.summed_loss`).
        """

    def make_flops(self, model: Any, cost: Cost = flops_per_token) -> Flops:
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
        image: Path | None = None,
    ) -> str:
        """The model's answer to a prompt; `image` is given if READS_IMAGES, and only then."""

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


TASKS: tuple[Task, ...] = (image_text, seq2seq_lm, causal_lm)
"""The first that fits a model's config is its task: transformers' mapping of causal models names BART and some
models of images, too."""


def find_task(model_config: Any, asked: str | None = None) -> Task:
    """The task of the model with this config.

    Args:
        asked: --task, if it was given.

    Raises:
        ConfigError: if the model cannot be of the task that was asked for.
    """
    if asked is None:
        return next((task for task in TASKS if task.fits(model_config)), causal_lm)
    task = next(task for task in TASKS if asked == task.NAME)
    if not task.fits(model_config):
        fitting = [task.NAME for task in TASKS if task.fits(model_config)]
        remedy = f"give --task {' or '.join(fitting)}, or leave it out" if fitting else "give another model"
        raise ConfigError(
            f"--task: transformers has no {task.AUTO_MODEL.__name__} of {model_config.model_type} models; {remedy}"
        )
    return task


def settings_of_task(config: RunConfig, task: Task) -> RunConfig:
    """The settings with those defaults adapted that depend on the task; a note is left for each.

    Raises:
        ConfigError: for a setting that was given and that the task does not take.
    """
    others = {name: other for other in TASKS for name in other.OWN_SETTINGS if name not in task.OWN_SETTINGS}
    for name, other in others.items():
        if config.was_given(f"train_config.{name}"):
            instead = [f"--{own}" for own in task.LENGTHS] if name in other.LENGTHS else []
            remedy = f"give {' and '.join(instead)} instead" if instead else "leave it out"
            raise ConfigError(f"--{name}: this is a model for --task {task.NAME}, which does not take it; {remedy}")
    task.check_settings(config)
    train = config.train_config
    if "caption_dataset" in train.datasets and not task.READS_IMAGES:
        raise ConfigError(
            f"--dataset: caption_dataset is for models of image and text, and this is one for --task {task.NAME}; give "
            "another dataset, or another model"
        )
    if train.batching_strategy == "padding" or task.PACKS:
        return config
    if config.was_given("train_config.batching_strategy"):
        raise ConfigError(
            f"--batching_strategy: {train.batching_strategy} is for causal language models, and this one is for --task "
            f"{task.NAME}; give padding, or leave it out"
        )
    note = f"--batching_strategy is padding with --task {task.NAME}"
    return replace(config, train_config=replace(train, batching_strategy="padding"), notes=(*config.notes, note))


def count_globally(micro_batches: Sequence[MicroBatch]) -> BatchCounts:
    """The counts of the step's global batch. Every rank must call this; it does not touch the device."""
    fields = BatchCounts._fields
    return BatchCounts(*map(int, sum_on_host(*(sum(getattr(b, field) for b in micro_batches) for field in fields))))
