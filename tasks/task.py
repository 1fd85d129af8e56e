"""The base class of tasks: a task is what differs between kinds of models.

Each task is a class in a file of this folder, and everything else gets it, or a part of it, as an argument.
`tasks/finding.py` lists them, and finds the one that a model is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from configs.run import RunConfig
from configs.training import TrainConfig
from data.batches.counts import LABEL_TOKENS, BatchCounts
from data.batches.packing import Offsets
from data.batches.padding import PaddedWidth
from data.batches.step_loader import Unreadable
from data.images.vision_features import FeatureStore
from data.pipeline import RunData
from data.processors.tokenizer_loading import load_tokenizer
from data.sequences.reading import Reading
from data.sequences.token_columns import OF_TARGETS
from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from ranks.collectives import sum_on_host
from tasks.flops import Cost, Flops, UnknownFlops, flops_per_token
from tasks.generation import AnswerSettings, GeneratedAnswer, GeneratingModel, GenerationSettings, PromptedAnswer
from utils.errors import ConfigError


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


class Task(ABC, Generic[Batch]):
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

    MEAN_OVER: ClassVar[str] = LABEL_TOKENS
    """What the loss is a mean over, in the global batch: each is a term of `summed_loss`, and a batch has so many
    `num_loss_terms`. The metrics give their number as num_ and this. Only the loss of tokens has a perplexity."""

    EVAL_FIGURES: ClassVar[Mapping[str, bool]] = {"token_accuracy": True, "token_entropy": False}
    """The names of its own figures of an evaluation (`eval_figures`), and whether higher ones are better. By default
    the share of label tokens that the model holds most likely, and the mean entropy of its probabilities at them, in
    nats."""

    COMPUTES_HEAD_TWICE: ClassVar[bool] = False
    """Whether training computes the head twice: its loss is known of all label tokens alone
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

    # The model and its loss

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
        if type(self).summed_loss is not Task.summed_loss:  # another loss, which may be of no tokens
            return self.summed_loss(model, batch)[None]
        return self._loss(model, batch, reduction="figures")

    def eval_figures(self, sums: Sequence[float], num_loss_terms: int) -> dict[str, float]:
        """The task's own figures of an evaluation, named in EVAL_FIGURES, as far as they are defined.

        Args:
            sums: those n of `eval_sums`, over the whole validation set.
        """
        if not sums or not num_loss_terms:
            return {}
        return {name: value / num_loss_terms for name, value in zip(Task.EVAL_FIGURES, sums, strict=True)}

    @torch.no_grad()
    def token_losses(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The cross-entropy of each label token, fp32 [n], in the order of `batch.target_positions`."""
        return self._loss(model, batch, reduction="none")

    def _loss(self, model: nn.Module, batch: Batch, **given: Any) -> torch.Tensor:
        targets = {"targets": batch.targets, "target_positions": batch.target_positions}
        targets |= {name: value for name in OF_TARGETS if (value := getattr(batch, name)) is not None}
        # With a cache, attention would cross the sequences of a packed row.
        return model(**self.model_inputs(batch), **targets, use_cache=False, **given)

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

    def meta_batch(
        self,
        model_config: PreTrainedConfig,
        train_config: TrainConfig,
        rows: int,
        widths: Sequence[int],
        *,
        label_share: float,
        image_share: float | None = None,
        packed: bool,
        by_offsets: bool,
    ) -> Batch:
        """A batch without values, on the meta device, with the shapes of a run's own: memory is planned with it.

        Args:
            widths: tokens of a row, and of a target if targets are apart.
            label_share: fraction of the tokens that a loss is computed for.
            image_share: fraction that stands for images; None: the data is not at hand.
            by_offsets: the model takes no mask (`policies.attention.choice`).

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


def count_globally(micro_batches: Sequence[MicroBatch]) -> BatchCounts:
    """The counts of the step's global batch. Every rank must call this; it does not touch the device."""
    fields = BatchCounts._fields
    return BatchCounts(*map(int, sum_on_host(*(sum(getattr(b, field) for b in micro_batches) for field in fields))))
