"""Log-probabilities of the answers by the model before training, which --loss_type dpo compares with.

They are computed once, before the first step, by the model as the run begins: a new adapter changes nothing yet, so
that is the frozen base, and no second model is in memory. They are kept beside the tokens, by model and pairs, and in
every checkpoint: a resumed run trains on those that it began with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from checkpointing.finding import Checkpoint
from data.batches.layout import BatchLayout
from data.batches.rows import Rows, make_rows
from data.batches.step_loader import StepLoader
from data.cache_folder import cache_folder
from data.pipeline import RunData
from data.sequences.pairs import AnswerPairs
from policies.adapters.folder import find_saved_adapter
from policies.building import BuiltModel
from policies.sharding import reshard
from policies.weights.fingerprint import fingerprint_files
from policies.weights.stored import weight_files
from preparation.batch_forms import collator_of_run
from ranks.collectives import gather_to_all, on_rank_zero
from ranks.environment import Environment, print_rank_zero
from resolving.inputs import Inputs
from resolving.resolved import Resolved
from supervision.watchdog import Watchdog
from tasks.preference import Preference
from utils.atomic_write import write_atomically
from utils.errors import ConfigError
from utils.progress import phase, progress_bar
from utils.small_files import read_bytes
from utils.wording import plural

REFERENCE = "reference.safetensors"
"""The file of a checkpoint: fp32 [pairs, 2] for each split, by the digest of its pairs."""

_MOST_BYTES = 2**32
_VERSION = 1  # of how they are computed


def with_reference(
    built: BuiltModel, inputs: Inputs, checkpoint: Checkpoint | None, env: Environment, watchdog: Watchdog
) -> Inputs:
    """The inputs with the reference of every pair, if the loss needs one. Every rank must call this.

    Args:
        built: with the weights that the run begins with.
        checkpoint: the one that the run goes on from, which holds the scores.

    Raises:
        ConfigError: on every rank, if those of the checkpoint are not of these pairs.
    """
    task, data = inputs.resolved.task, inputs.data
    if not (isinstance(task, Preference) and task.needs_reference):
        return inputs
    assert isinstance(data.train, AnswerPairs)
    assert data.train_rows is not None  # a stream is refused
    stored = None if checkpoint is None else _of_checkpoint(checkpoint)
    score = partial(_scores, built=built, inputs=inputs, stored=stored, env=env, watchdog=watchdog)
    train = replace(data.train, reference=score(data.train, np.ones(len(data.train), dtype=bool)))
    data = replace(data, train=train, train_rows=_rows_of(train, data.train_rows))
    if isinstance(data.evaluation, AnswerPairs) and data.eval_rows is not None:
        rows = data.eval_rows
        is_read = np.zeros(len(data.evaluation), dtype=bool)
        is_read[rows.indices[: rows.offsets[-1]]] = True
        evaluation = replace(data.evaluation, reference=score(data.evaluation, is_read))
        data = replace(data, evaluation=evaluation, eval_rows=_rows_of(evaluation, rows))
    return replace(inputs, data=data)


def reference_files(data: RunData) -> dict[str, bytes]:
    """The file for checkpoints; none if the run has no reference."""
    splits = [split for split in (data.train, data.evaluation) if isinstance(split, AnswerPairs)]
    scores = {_digest(split): split.reference for split in splits if split.reference is not None}
    return {REFERENCE: save(scores)} if scores else {}


def _rows_of(pairs: AnswerPairs, rows: Rows) -> Rows:
    return Rows(pairs, rows.indices, rows.offsets, packed=rows.packed)


def _scores(
    pairs: AnswerPairs,
    is_read: np.ndarray,
    *,
    built: BuiltModel,
    inputs: Inputs,
    stored: Mapping[str, np.ndarray] | None,
    env: Environment,
    watchdog: Watchdog,
) -> np.ndarray:
    """The reference of pairs, fp32 [pairs, 2]: from the checkpoint, from the cache, or computed.

    Args:
        is_read: bool [pairs], those that the run reads; of others it may be NaN.
        stored: that of a checkpoint, by digest; None: the run starts afresh.
    """
    digest = _digest(pairs)
    if stored is not None:
        if (found := _whole(stored.get(digest), is_read)) is None:
            raise ConfigError(
                f"--resume: the checkpoint holds no reference log-probabilities ({REFERENCE}) of these pairs, and its "
                "weights are no more those before training; give the data, the template and the lengths of its run, or "
                "--overwrite to start afresh"
            )
        return found
    file = cache_folder() / "finetuning-reference" / f"{_key(inputs.resolved, digest)}.safetensors"
    kept = on_rank_zero(lambda: _kept(file))
    if (found := _whole(kept.get(digest), is_read)) is not None:
        print_rank_zero(env, f"reference: log-probabilities of {plural(len(pairs), 'pair')} from {file}")
        return found
    scores = _compute(pairs, np.flatnonzero(is_read), built=built, inputs=inputs, env=env, watchdog=watchdog)
    on_rank_zero(lambda: _keep(file, {digest: scores}))
    return scores


def _compute(
    pairs: AnswerPairs, indices: np.ndarray, *, built: BuiltModel, inputs: Inputs, env: Environment, watchdog: Watchdog
) -> np.ndarray:
    """The log-probabilities of both answers of these pairs, by this model as it is: fp32 [pairs, 2], NaN for others."""
    resolved, train = inputs.resolved, inputs.resolved.config.train_config
    batches = resolved.batches
    row_length = resolved.began_with.packed_length or resolved.context_length
    rows = make_rows(pairs, batching_strategy=train.batching_strategy, context_length=row_length, indices=indices)
    loader = StepLoader(
        rows,
        BatchLayout(batches.rows_per_micro_batch, 1, batches.data_parallel_size),
        rank=env.rank,
        seed=None,
        collate=collator_of_run(inputs, built.empty)(batches.rows_per_micro_batch),
    )
    with phase(f"computing log-probabilities of {plural(len(indices), 'pair')} before training"):
        bar = progress_bar("reference", watchdog.each(loader.epoch(0), 0, "preparing"), total=len(loader))
        found = dict(_answer_scores(built, resolved.task, bar, env.device))
    scores = np.full((len(pairs), 2), np.nan, dtype=np.float32)
    places = {int(row): index for index, row in enumerate(pairs.source_rows)}
    for of_rank in gather_to_all(found):
        for row, both in of_rank.items():
            scores[places[row]] = both
    return scores


@torch.no_grad()
def _answer_scores(
    built: BuiltModel, task: Any, steps: Iterable[list[Any]], device: torch.device
) -> Iterator[tuple[int, np.ndarray]]:
    """The source row of each pair of this rank, and its answers' log-probabilities."""
    model = built.model
    training = model.training
    model.eval()
    computed = []
    for (batch,) in steps:
        # Read at the end: the device never waits for the host. An empty batch is computed, too, as in `evaluate`.
        computed.append((batch.source_rows[::2], task.answer_scores(model, batch.to(device))))
    model.train(training)
    reshard(model)
    for source_rows, scores in computed:
        yield from zip(source_rows, scores.cpu().numpy(), strict=True)


def _digest(pairs: AnswerPairs) -> str:
    """A digest of the pairs' tokens, labels and where each begins: it differs by data, template and cutting."""
    digest = hashlib.sha256(str(len(pairs)).encode())
    for array in (*pairs.content, pairs.offsets):
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


def _key(resolved: Resolved, digest: str) -> str:
    """A digest of all that the scores depend on: pairs, weights, adapter, precision, and our code's version."""
    config = resolved.config
    train = config.train_config
    weights = f"random {train.seed}" if train.random_weights else fingerprint_files(weight_files(train.model_name))
    adapter = train.from_peft_checkpoint and fingerprint_files(
        [path for path in find_saved_adapter(train.from_peft_checkpoint).iterdir() if path.is_file()]
    )
    parts = [_VERSION, digest, weights, adapter, resolved.model_config.to_dict(), dict(resolved.rope)]
    parts += [resolved.policies.precision.name, train.float8, config.to_dict()["quantization_config"]]
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()[:32]


def _whole(scores: np.ndarray | None, is_read: np.ndarray) -> np.ndarray | None:
    """The scores, if there is one of every pair that the run reads."""
    if scores is None or scores.shape != (len(is_read), 2) or not np.isfinite(scores[is_read]).all():
        return None
    return scores


def _kept(file: Path) -> dict[str, np.ndarray]:
    """What the cache holds; nothing if it cannot be read: it is computed again then."""
    with suppress(OSError, ValueError, SafetensorError):
        return dict(load(read_bytes(file, most_bytes=_MOST_BYTES)))
    return {}


def _keep(file: Path, scores: dict[str, np.ndarray]) -> None:
    """Write them into the cache, unless the disk does not take them: the run has them, and its checkpoints will."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, save(scores))


def _of_checkpoint(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return on_rank_zero(lambda: _kept(checkpoint.folder / REFERENCE))
