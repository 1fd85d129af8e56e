"""The checkpoint that a run resumes from: checked before weights are read, loaded once the model is built."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from checkpointing.comparison import check_place, check_same, trains_on
from checkpointing.finding import Checkpoint, open_checkpoint
from checkpointing.resume import load_checkpoint
from checkpointing.train_state import TrainState
from configs.run import RunConfig
from data.streaming.loader import StreamLoader
from preparation.building import TrainingParts
from ranks.collectives import on_rank_zero
from ranks.environment import Environment, print_rank_zero
from resolving.inputs import Inputs
from run_folder.checkpoint_folder import COMPLETE
from run_folder.run_folder import RunFolder
from utils.wording import plural


def find_checkpoint(folder: RunFolder, inputs: Inputs, env: Environment) -> Checkpoint | None:
    """The first undamaged checkpoint of the run; None if it starts afresh. Every rank must call this.

    Raises:
        ConfigError: on every rank, if all are damaged, or if going on from this one would change the result.
    """
    checkpoint = open_checkpoint(folder.checkpoints, env, every_file=True)
    taken, step = (checkpoint.folder, checkpoint.step) if checkpoint else (None, 0)
    if incomplete := on_rank_zero(partial(folder.incomplete_after, taken, step)):
        names = ", ".join(map(str, incomplete))
        why = f"not written to the end, or without {COMPLETE}"
        print_rank_zero(env, f"resume: incomplete checkpoints are passed over ({why}): {names}")
    if checkpoint is not None:
        steps_per_epoch = inputs.data.steps_per_epoch(inputs.resolved.batches)
        changes = check_same(checkpoint, inputs.resolved.config, inputs.identity(), num_steps=inputs.num_steps)
        print_rank_zero(env, *changes)
        check_place(checkpoint, num_steps=inputs.num_steps, steps_per_epoch=steps_per_epoch)
        if not trains_on(checkpoint, inputs.num_steps):
            flag = _flag_of_length(inputs)
            print_rank_zero(
                env,
                f"resume: nothing is trained: the run has made {plural(checkpoint.step, 'step')} and is to make "
                f"{inputs.num_steps}; to go on, give more {flag}",
            )
    return checkpoint


def _flag_of_length(inputs: Inputs) -> str:
    """The flag that ends the run where it ends."""
    train = inputs.resolved.config.train_config
    return "--max_train_step" if train.max_train_step == inputs.num_steps else "--num_epochs"


def load_state(
    checkpoint: Checkpoint | None,
    parts: TrainingParts,
    model_identity: Mapping[str, Any],
    config: RunConfig,
    env: Environment,
) -> TrainState:
    """Load the checkpoint, if there is one, and return how far the run has come. Every rank must call this.

    Args:
        checkpoint: None: the run starts afresh.
        model_identity: facts that the checkpoint's model and this one must have in common.

    Raises:
        ConfigError: on every rank, if the checkpoint is not of this model or cannot be loaded.
    """
    if checkpoint is None:
        return TrainState()
    print_rank_zero(env, *check_same(checkpoint, config, model_identity))
    offload = config.fsdp_config.optimizer_cpu_offload
    seed = config.train_config.seed
    state = load_checkpoint(checkpoint, parts.trainable, env, seed=seed, optimizer_cpu_offload=offload)
    if isinstance(parts.loaders.train, StreamLoader):
        state.stay_in_first_epoch()
        parts.loaders.train.state = checkpoint.stream_state()
    return state
