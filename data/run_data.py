"""The data of a run: every dataset's splits through their recipes, as rows, as loaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from configs.run import RunConfig
from data.dataset_functions import find_recipe
from data.files import has_validation
from data.loader import BatchLayout, Rows, StepLoader, make_rows
from data.mixing import MixPart, join_examples, mix, mixed_documents
from data.sequences import Examples, check_token_ids, load_examples
from data.stream_loader import StreamLoader
from data.streaming import Stream, StreamSource, fingerprint
from utils.distributed import gather_to_all
from utils.environment import Environment
from utils.errors import ConfigError


@dataclass(frozen=True)
class RunData:
    """Samples, and the rows they were packed or padded into.

    The training parts are those of the whole set, or, for a stream, its first documents, and there are no rows yet.
    The evaluation parts are None without validation.
    """

    train: Examples
    evaluation: Examples | None
    train_rows: Rows | None
    eval_rows: Rows | None
    stream: Stream | None
    mix: tuple[MixPart, ...]  # what each dataset gives to an epoch; empty for one dataset, and for a stream
    documents: np.ndarray | None  # int64 [n]: the samples of an epoch, where datasets are mixed, some several times
    notes: tuple[str, ...]  # what was kept and what was left out

    def steps_per_epoch(self, layout: BatchLayout) -> int:
        """Optimizer steps of an epoch; a streamed run is one epoch."""
        if self.train_rows is None:
            assert self.stream is not None
            return self.stream.num_steps
        return layout.num_steps(len(self.train_rows))

    def fingerprint(self) -> int:
        """Of the training samples; of a stream, of its first ones."""
        return fingerprint([self.train])

    def check_same_on_all_ranks(self) -> None:
        """Every rank must have read the same data, or ranks would train on overlapping rows.

        Raises:
            ConfigError: on every rank, where they differ.
        """
        splits = [split for split in (self.train, self.evaluation) if split is not None]
        if len(set(gather_to_all(fingerprint(splits)))) > 1:
            raise ConfigError(
                "--dataset: the ranks did not read the same data; a recipe must return the same rows in every process "
                "(seed its random choices, sort what it lists)"
            )


def load_data(config: RunConfig, tokenizer: Any, *, vocab_size: int, context_length: int) -> RunData:
    """Read, tokenise and check both splits of every dataset, and place them into rows; of a stream, look at its start.

    Raises:
        ConfigError: where a split cannot be trained on.
    """
    train_config = config.train_config
    names, strategy = train_config.datasets, train_config.batching_strategy
    notes: list[str] = []

    def load(name: str, split: str) -> Examples:
        recipe, dataset_config, split_names = find_recipe(config, name)
        examples = load_examples(
            recipe,
            replace(dataset_config, streaming=False),
            tokenizer,
            split_names[split],
            split_slice=train_config.split_slice,
            context_length=context_length,
            truncation=train_config.truncation,
        )
        label = split if len(names) == 1 else f"{name}, {split}"
        check_token_ids(examples, vocab_size, label)
        notes.extend(examples.describe(label))
        return examples

    train_rows, stream, documents = None, None, None
    parts: list[MixPart] = []
    if config.streams:
        stream = _stream(config, tokenizer, vocab_size=vocab_size, context_length=context_length)
        heads = stream.head()
        train = join_examples(heads)
        notes.extend(stream.describe(heads))
    else:
        train_parts = [load(name, "train") for name in names]
        train = join_examples(train_parts)
        sizes = [len(part) for part in train_parts]
        del train_parts  # joined, they are there twice
        if len(names) > 1:
            parts = mix(names, sizes, train_config.dataset_weights)
            documents = mixed_documents(sizes, [part.num_samples for part in parts], train_config.seed)
            notes.append("mix: " + "; ".join(map(str, parts)))
        train_rows = make_rows(train, batching_strategy=strategy, context_length=context_length, documents=documents)
    validated = [name for name in names if _validates(config, name, notes)]
    evaluation = join_examples([load(name, "validation") for name in validated]) if validated else None
    eval_rows = None
    if evaluation is not None:
        eval_rows = make_rows(evaluation, batching_strategy=strategy, context_length=context_length)
        if train_config.max_eval_step:
            eval_rows = eval_rows.first(train_config.max_eval_step * train_config.val_batch_size)
    return RunData(train, evaluation, train_rows, eval_rows, stream, tuple(parts), documents, tuple(notes))


def _stream(config: RunConfig, tokenizer: Any, *, vocab_size: int, context_length: int) -> Stream:
    train_config = config.train_config
    sources = []
    for name in train_config.datasets:
        recipe, dataset_config, split_names = find_recipe(config, name)
        sources.append(
            StreamSource(
                dataset=name,
                recipe=recipe,
                dataset_config=dataset_config,
                tokenizer=tokenizer,
                split=split_names["train"],
                context_length=context_length,
                vocab_size=vocab_size,
                truncation=train_config.truncation,
                max_rows=int(train_config.split_slice) if train_config.split_slice else None,
            )
        )
    return Stream(
        sources=tuple(sources),
        weights=train_config.dataset_weights,
        seed=train_config.seed,
        shuffle_buffer_size=train_config.shuffle_buffer_size,
        packing=train_config.batching_strategy == "packing",
        context_length=context_length,
        num_steps=train_config.max_train_step,
    )


def _validates(config: RunConfig, name: str, notes: list[str]) -> bool:
    """Whether a dataset has a validation split to evaluate on; of a user's own recipe, its function knows."""
    if config.train_config.run_validation is False:
        return False
    dataset_config = getattr(config, name)
    if name == "custom_dataset" or config.train_config.run_validation:
        return True
    if has_validation(name, dataset_config):
        return True
    remedy = f"--{name}.validation_fraction 0.05 keeps some of them for it"
    if config.streams:
        remedy = "a folder with validation.* beside train.* has it"
    notes.append(f"validation: none, since {dataset_config.data_path} holds training rows alone; {remedy}")
    return False


def make_loaders(
    data: RunData,
    config: RunConfig,
    layout: BatchLayout,
    env: Environment,
    collate: Callable[..., Any],
    say: Callable[[str], None],
) -> tuple[StepLoader | StreamLoader, StepLoader | None]:
    """The training loader, shuffled by seed and epoch, and the validation loader, in the same order every time.

    Args:
        say: prints what a stream tells on its way.
    """
    options: dict[str, Any] = {
        "rank": env.rank,
        "collate": collate,
        "num_workers": config.train_config.num_workers_dataloader,
        "pin_memory": env.device.type == "cuda",
    }
    train_loader: StepLoader | StreamLoader
    if data.stream is not None:
        train_loader = StreamLoader(data.stream, layout, say=say, **options)
    else:
        assert data.train_rows is not None
        train_loader = StepLoader(data.train_rows, layout, seed=config.train_config.seed, **options)
    if data.eval_rows is None:
        return train_loader, None
    eval_layout = BatchLayout(config.train_config.val_batch_size, 1, env.world_size)
    return train_loader, StepLoader(data.eval_rows, eval_layout, seed=None, **options)
