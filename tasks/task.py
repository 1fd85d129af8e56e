"""The base class of tasks: a task is what differs between kinds of models.

Each task is a class in a file of this folder, and everything else gets it, or a part of it, as an argument.
`tasks/finding.py` lists them, and finds the one that a model is for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from configs.run import RunConfig
from configs.training import TrainConfig
from data.batches.packing import Offsets
from data.batches.padding import PaddedWidth
from data.batches.step_loader import Unreadable
from data.images.vision_features import FeatureStore
from data.pipeline import RunData
from data.processors.tokenizer_loading import load_tokenizer
from data.sequences.reading import Reading
from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from tasks.flops import Cost, Flops, UnknownFlops, flops_per_token
from tasks.generation import AnswerSettings, GeneratedAnswer, GeneratingModel, GenerationSettings, PromptedAnswer
from tasks.micro_batch import Batch, BatchShape
from tasks.task_loss import TaskLoss
from utils.errors import ConfigError


@dataclass(frozen=True)
class BatchForm:
    """How the rows of a batch are laid out.

    Attributes:
        vocab_size: rows of the model's embedding; ids of padding must be below.
        widths: how wide the inputs, and labels that are apart from them, are padded.
        packing: rows hold several sequences; only if the task PACKS.
        offsets: which rows need `cu_seqlens` (`policies.attention.choice`).
        num_rows: batches are filled up to this many rows, for layers compiled for one shape; 0: they are not.
        vision_features: of images, which are then not decoded; only if the task READS_IMAGES.
    """

    vocab_size: int
    widths: Sequence[PaddedWidth]
    packing: bool
    offsets: Offsets
    num_rows: int = 0
    vision_features: FeatureStore | None = None


class Task(TaskLoss[Batch]):
    """One kind of models and their loss. Its collator makes a `Batch`, and its loss takes it.

    A new task overrides the abstract methods, and those whose defaults do not fit. A `processor` is what
    `load_processor` returned; a `model_config` is the model's, as transformers read it.
    """

    NAME: ClassVar[str]
    """Its value of --task."""

    AUTO_MODEL: ClassVar[Any]  # no type: its `_model_mapping`, which is needed, is private
    """The transformers class that builds and reads such models, such as AutoModelForCausalLM."""

    LENGTHS: ClassVar[Mapping[str, int]]
    """The fields of TrainConfig that limit the inputs, and then labels that are apart from them, with defaults."""

    PEFT_TYPE: ClassVar[str | None] = None
    """The `task_type` of peft's configs; None if peft has no such task."""

    HEAD: ClassVar[Literal["tokens", "texts"]] = "tokens"
    """What the model's head computes: logits of tokens, or scores of whole texts. Trials ask only tasks that predict
    tokens whether a token sees what it is to predict: attention both ways is right for whole texts."""

    LEARNS: ClassVar[Literal["tokens", "labels", "pairs"]] = "tokens"
    """What examples say: tokens to predict, labels of whole texts, or which of two texts is better."""

    READS_IMAGES: ClassVar[bool] = False
    """Whether an example has an image."""

    PACKS: ClassVar[bool] = False
    """Whether several sequences may share a row; `packs` says so of one model."""

    COMPUTES_TRAINED_HEAD_TWICE: ClassVar[bool] = False
    """Whether training computes a head that trains twice, and in fp16 any: its loss is known of all label tokens alone
    (`policies.loss.objectives`)."""

    OWN_SETTINGS: ClassVar[tuple[str, ...]] = ()
    """The fields of TrainConfig that only tasks which list them take."""

    @property
    def needs_reference(self) -> bool:
        """Whether a pass over all training rows before the first step computes what its loss compares with."""
        return False

    # Which models and settings it takes

    def fits(self, model_config: PreTrainedConfig) -> bool:
        """Whether the model with this config can be of this task: whether AUTO_MODEL has a class for it."""
        return type(model_config) in self.AUTO_MODEL._model_mapping

    def for_run(self, config: RunConfig) -> Task[Any]:
        """The task with those of a run's settings that its loss depends on. By default there are none."""
        return self

    def is_made_for(self, model_config: PreTrainedConfig) -> bool:
        """Whether a model with this config is of this task if --task is not given. By default all are that fit."""
        return self.fits(model_config)

    def packs(self, model_config: PreTrainedConfig) -> bool:
        """Whether several sequences may share a row of a model with this config."""
        return self.PACKS

    def check_config(self, model_config: PreTrainedConfig, model_name: str) -> None:
        """Called before anything is built.

        Raises:
            ConfigError: if this config is of no such model. By default every one is.
        """

    def check_settings(self, config: RunConfig) -> None:
        """
        Raises:
            ConfigError: for a setting that this task does not take, apart from OWN_SETTINGS of others. By default it
                takes all.
        """

    def check_model(self, model: PreTrainedModel, model_name: str) -> list[str]:
        """Check a model without weights, and change settings that would change its loss.

        Returns:
            Lines to print about changes.

        Raises:
            ConfigError: if the loss cannot be computed here.
        """
        return []

    # From examples to batches

    def load_processor(self, train_config: TrainConfig) -> Any:
        """The tokenizer, or a processor that has one, which turns examples into model inputs."""
        return load_tokenizer(train_config)

    @abstractmethod
    def make_reading(
        self, processor: Any, model_config: PreTrainedConfig, train_config: TrainConfig, lengths: Sequence[int]
    ) -> Reading:
        """How examples become sequences.

        Args:
            lengths: the resolved value of each name in LENGTHS, in tokens.
        """

    def with_data(
        self,
        model_config: PreTrainedConfig,
        train_config: TrainConfig,
        processor: Any,
        data: RunData,
        datasets: Sequence[str],
    ) -> tuple[Task, PreTrainedConfig, RunData]:
        """The task, the model's config and the data, once these are read: classes, say, are known from then on.

        Args:
            datasets: the names of the mixed datasets, for messages.

        Raises:
            ConfigError: for data that it cannot learn.
        """
        return self, model_config, data

    def config_values(self, model_config: PreTrainedConfig) -> dict[str, Any]:
        """Values of the model's config.json that an adapter's base does not have, and the adapter needs."""
        return {}

    @abstractmethod
    def make_collator(
        self,
        processor: Any,
        model_config: PreTrainedConfig,
        form: BatchForm,
    ) -> Callable[[list[Any]], Batch | Unreadable]:
        """The function that makes a batch of rows. It runs in the loader's processes, so it can be pickled."""

    # The model

    @abstractmethod
    def backbone(self, model: PreTrainedModel) -> list[nn.Module]:
        """The submodules that hold the layers, in the order in which they run; the head turns the output of the last
        one into logits."""

    @abstractmethod
    def compute_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [1, tokens, vocab] by the model's own code, while the backbone returns `hidden` [1, tokens, size].

        The loss calls this for a few tokens at a time, so logits of a whole batch never exist at once.
        """

    def inputs_of(self, processor: Any, model_config: PreTrainedConfig, ids: torch.Tensor) -> dict[str, Any]:
        """The arguments of a forward pass over these token ids, int64 [batch, seq], whatever they mean.

        If READS_IMAGES, over an image and those of the first row.
        """
        return {"input_ids": ids, "use_cache": False}

    def shortened(self, sequence: TokenSequence, num_tokens: int, num_labels: int) -> TokenSequence:
        """A part of a sequence with so many tokens and labels at most, for trials of the loss.

        By default the tokens up to the last label, since labels stand at the places of their tokens.
        """
        places = np.flatnonzero(sequence.labels != IGNORE_INDEX)[-num_labels:]
        part = slice(max(0, int(places[-1]) + 1 - num_tokens), int(places[-1]) + 1)
        labels = np.where(np.arange(len(sequence.labels)) < places[0], IGNORE_INDEX, sequence.labels)
        shorter = sequence._replace(input_ids=sequence.input_ids[part], labels=labels[part].astype(np.int32))
        return shorter.with_columns({name: values[part] for name, values in sequence.of_tokens.items()})

    # Plans

    def make_flops(self, model: nn.Module, cost: Cost = flops_per_token) -> Flops:
        """Counts the model FLOPs of a step of this model. By default nobody knows them: they are NaN."""
        return UnknownFlops()

    def meta_batch(self, model_config: PreTrainedConfig, train_config: TrainConfig, shape: BatchShape) -> Batch:
        """A batch without values, on the meta device, with the shapes of a run's own: memory is planned with it.

        Raises:
            ConfigError: by default: no plan can be made.
        """
        raise ConfigError(f"--dry_run: plans are not made for --task {self.NAME}; train a few steps to see its memory")

    # Answers

    @abstractmethod
    def prompted_answer(self, sequence: TokenSequence) -> PromptedAnswer:
        """A sequence's prompt, and the reference that generated text is compared with."""

    @abstractmethod
    def generate(
        self,
        model: GeneratingModel,
        processor: Any,
        prompt: str,
        settings: AnswerSettings,
    ) -> GeneratedAnswer:
        """The model's answer to a prompt. The model is one process's, not sharded.

        Raises:
            ConfigError: if the model has no positions for prompt and answer.
        """

    @abstractmethod
    def generate_batch(
        self,
        model: GeneratingModel,
        processor: Any,
        sequences: Sequence[Any],
        settings: GenerationSettings,
        *,
        in_step: bool,
    ) -> list[str]:
        """The text that the model generates for each sequence's prompt, on the device where it computes.

        Args:
            in_step: call the model as often as every other rank does (`policies.generating`).
        """
