"""The data of a run: both splits through the recipe, as rows, as loaders."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.run import RunConfig
from utils.data_files import has_validation
from utils.dataloader import BatchLayout, Rows, StepLoader, make_rows
from utils.distributed import gather_to_all
from utils.environment import Environment
from utils.examples import Examples, check_token_ids, load_examples
from utils.recipes import find_recipe


@dataclass(frozen=True)
class RunData:
    """Samples, and the rows they were packed or padded into. The evaluation parts are None without validation."""

    train: Examples
    evaluation: Examples | None
    train_rows: Rows
    eval_rows: Rows | None
    notes: tuple[str, ...]  # what was kept and what was left out

    def check_same_on_all_ranks(self) -> None:
        """Every rank must have read the same data, or ranks would train on overlapping rows.

        Raises:
            ConfigError: on every rank, where they differ.
        """
        fingerprint = zlib.crc32(self.train.labels.tobytes(), zlib.crc32(self.train.input_ids.tobytes()))
        if self.evaluation is not None:
            fingerprint = zlib.crc32(self.evaluation.input_ids.tobytes(), fingerprint)
        if len(set(gather_to_all(fingerprint))) > 1:
            raise ConfigError(
                "--dataset: the ranks did not read the same data; a recipe must return the same rows in every process "
                "(seed its random choices, sort what it lists)"
            )


def load_data(config: RunConfig, tokenizer: Any, *, vocab_size: int, context_length: int) -> RunData:
    """Read, tokenise and check both splits, and place them into rows.

    Raises:
        ConfigError: where a split cannot be trained on.
    """
    train_config = config.train_config
    recipe, dataset_config, split_names = find_recipe(config)
    notes: list[str] = []

    def load(split: str) -> Examples:
        examples = load_examples(
            recipe,
            dataset_config,
            tokenizer,
            split_names[split],
            split_slice=train_config.split_slice,
            context_length=context_length,
            truncation=train_config.truncation,
        )
        check_token_ids(examples, vocab_size, split)
        notes.extend(examples.describe(split))
        return examples

    train = load("train")
    validates = train_config.run_validation
    name = train_config.dataset
    if validates and not _has_validation(name, dataset_config) and not config.was_given("train_config.run_validation"):
        validates = False
        notes.append(
            f"validation: none, since {dataset_config.data_path} holds training rows alone; "
            f"--{name}.validation_fraction 0.05 keeps some of them for it"
        )
    evaluation = load("validation") if validates else None
    strategy = train_config.batching_strategy
    train_rows = make_rows(train, batching_strategy=strategy, context_length=context_length)
    eval_rows = None
    if evaluation is not None:
        eval_rows = make_rows(evaluation, batching_strategy=strategy, context_length=context_length)
        if train_config.max_eval_step:
            eval_rows = eval_rows.first(train_config.max_eval_step * train_config.val_batch_size)
    return RunData(train, evaluation, train_rows, eval_rows, tuple(notes))


def _has_validation(name: str, dataset_config: Any) -> bool:
    """Whether there may be a validation split; of a user's own recipe, its function knows."""
    return name == "custom_dataset" or has_validation(name, dataset_config)


def make_loaders(
    data: RunData, config: RunConfig, layout: BatchLayout, env: Environment, collate: Callable[..., Any]
) -> tuple[StepLoader, StepLoader | None]:
    """The training loader, shuffled by seed and epoch, and the validation loader, in the same order every time."""
    options: dict[str, Any] = {
        "rank": env.rank,
        "collate": collate,
        "num_workers": config.train_config.num_workers_dataloader,
        "pin_memory": env.device.type == "cuda",
    }
    train_loader = StepLoader(data.train_rows, layout, seed=config.train_config.seed, **options)
    if data.eval_rows is None:
        return train_loader, None
    eval_layout = BatchLayout(config.train_config.val_batch_size, 1, env.world_size)
    return train_loader, StepLoader(data.eval_rows, eval_layout, seed=None, **options)
