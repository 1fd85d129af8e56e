"""A model built and given its weights as a run does it, in this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.flags import parse_flags
from data.processors.tokenizer_loading import num_rows_needed
from policies.loading import build_model, grow_embeddings, load_model_config
from policies.weights.materialise import Weights, find_weights, materialise
from ranks.environment import Environment
from ranks.process_group import start_process_group, stop_process_group
from tasks.causal_lm import CausalLM

TASK = CausalLM()
CPU = torch.device("cpu")


@contextmanager
def single_process() -> Iterator[Environment]:
    env = Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, launched=False)
    start_process_group(env)
    try:
        yield env
    finally:
        stop_process_group()


def load(
    folder: Path, *flags: str, dtype: torch.dtype = torch.float32, tokenizer: Any = None
) -> tuple[Any, Weights, list[str]]:
    """The model with its weights, where they came from, and what was said about its embeddings."""
    config = parse_flags(["--model_name", str(folder), *flags])
    notes: list[str] = []
    with single_process() as env:
        train = config.train_config
        model = build_model(train, load_model_config(train), TASK.AUTO_MODEL, dtype)
        if tokenizer is not None:
            notes = grow_embeddings(model, num_rows_needed(tokenizer), use_peft=config.train_config.use_peft)
        num_rows = 0 if tokenizer is None else num_rows_needed(tokenizer)
        weights = find_weights(train, model, TASK.AUTO_MODEL, dtype, env, num_rows=num_rows)
        materialise(model, model, weights, parameter_device=CPU, compute_device=CPU)
    return model, weights, notes


def load_model(folder: Path, *flags: str, dtype: torch.dtype = torch.float32) -> Any:
    return load(folder, *flags, dtype=dtype)[0]
