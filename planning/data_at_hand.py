"""Reads the data of a planned run if it is at hand: rows then count with their real lengths."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import has_magic
from pathlib import Path

import datasets

from configs.datasets import CustomDataset, DataSource, split_paths
from configs.training import TrainConfig
from data.splits.data_path import HUB_NAME
from ranks.environment import Environment
from resolving.batches_and_steps import resolve_num_steps
from resolving.data_facts import DataFacts, facts_of_data
from resolving.inputs import read_data
from resolving.resolved import Resolved
from utils.errors import ConfigError

_SO_FULL = "rows count as long as they may be"


def data_at_hand(resolved: Resolved, env: Environment, *, is_here: bool) -> tuple[Resolved, DataFacts]:
    """The settings with batches that follow the data, and its facts, read and tokenized as the run would.

    No file is left.

    Data on the hub are not fetched and a dataset function is not called; then rows count as long as they may be, and a
    note says so.

    Args:
        env: of the planned ranks.
        is_here: the plan is for this machine, so missing files are refused as the run would refuse them.

    Raises:
        ConfigError: if the run would refuse its data.
    """
    config, task = resolved.config, resolved.task
    try:
        processor = None if _has_config_alone(config.train_config) else task.load_processor(config.train_config)
    except ConfigError:
        processor = None
    if processor is None:
        why = f"data: not read, since {config.train_config.model_name} has no tokenizer; {_SO_FULL}"
        return resolved, DataFacts(notes=(why,))
    missing = [reason for source in config.sources.values() if (reason := _not_at_hand(source, is_here=is_here))]
    if missing:
        why = f"data: not read, since {missing[0]}; {_SO_FULL}"
        return resolved, DataFacts.of_processor(processor, resolved, notes=(why,))
    with _tokens_kept_nowhere():
        chosen, data, _ = read_data(resolved, processor, env)
        # Called for its refusal alone: the profiler or the FLOP counter may ask for more steps than the run has.
        resolve_num_steps(config.train_config, config.tracking_config, data.steps_per_epoch(chosen.batches))
        notes = chosen.notes[len(resolved.notes) :]
        return chosen, replace(facts_of_data(data, processor, chosen), notes=notes)


def _has_config_alone(train: TrainConfig) -> bool:
    """Whether the model's folder has no file of a tokenizer. transformers takes seconds to see that."""
    folder = Path(train.model_name)
    if train.tokenizer_name or not folder.is_dir():
        return False
    # Weights and generation settings come without a tokenizer; any other file may be one's.
    names = {path.name for path in folder.iterdir() if "safetensors" not in path.name}
    return names <= {"config.json", "generation_config.json"}


def _not_at_hand(source: DataSource, *, is_here: bool) -> str | None:
    """Why this dataset is not read for a plan, as a clause; None if it is."""
    if isinstance(source, CustomDataset) and source.file is not None:
        return f"the function of {source.file} is not called for a plan"
    if source.data_path is None:
        return "they are on the hub"
    if source.streaming:
        return "they are streamed"
    gone = [part for part in split_paths(source.data_path) if not has_magic(part) and not Path(part).exists()]
    if any(map(HUB_NAME.fullmatch, gone)):
        return "they are on the hub"
    return f"{gone[0]} is not on this machine" if gone and not is_here else None


@contextmanager
def _tokens_kept_nowhere() -> Iterator[None]:
    """Inside this context tokens are cached in a folder that is deleted at its end: a plan leaves no files."""
    kept = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = kept
