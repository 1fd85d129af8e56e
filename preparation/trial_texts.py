"""The trial of a classifier on its own data, before the first step: a text's scores do not depend on others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from policies.building import BuiltModel
from policies.quantization.float8 import computed_in_bf16
from policies.sharding import reshard
from preparation.trial_rows import tolerance_of_losses, trial_length
from ranks.collectives import gather_to_all
from ranks.environment import Environment
from resolving.inputs import Inputs
from tasks.task import BatchForm, Task
from utils.errors import ConfigError

NUM_LOOKED_AT = 64  # texts, of which a short one and a long one are tried


@torch.no_grad()
def check_text_scores(built: BuiltModel, inputs: Inputs, env: Environment) -> None:
    """Refuse a model whose scores of two texts in a batch are not those of each alone. Every rank must call this.

    In a packed row a text is compared with itself in a padded one. A mask that is not what the collator expects, or a
    head that reads another position, would show here.

    Raises:
        ConfigError: on every rank.
    """
    task, model, resolved = inputs.resolved.task, built.model, inputs.resolved
    packing = resolved.config.train_config.batching_strategy == "packing"
    widths = tuple(replace(width, multiple_of=1) for width in resolved.widths)
    form = BatchForm(inputs.vocab_size, widths, packing, built.empty.offsets, 0)
    config = built.empty.model.config
    collate: Any = task.make_collator(inputs.processor, config, form)
    collate_alone: Any = task.make_collator(inputs.processor, config, replace(form, packing=False))
    texts = _texts_to_try(task, inputs, _most_tokens(inputs, env))
    training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"), computed_in_bf16(model):
            batches = [collate([texts] if packing else [[text] for text in texts])]
            batches += [collate_alone([[text]]) for text in texts]
            together, *alone = (task.token_losses(model, batch.to(env.device)).double().cpu() for batch in batches)
    finally:
        model.train(training)
        reshard(model)
    difference = float((together - torch.cat(alone)).abs().max())
    found = difference > tolerance_of_losses(resolved, env) * max(1.0, float(together.abs().max()))
    if any(gather_to_all(found)):
        remedy = "give --batching_strategy padding" if packing else "give a model of another family"
        raise ConfigError(
            f"--model_name: with {built.empty.architecture} scores depend on the texts next to a text (they differ "
            f"by {difference:.2g}), so it sees padding or other texts; {remedy}"
        )


def _most_tokens(inputs: Inputs, env: Environment) -> int:
    """The most tokens of a text of the trial: all of them, two of a pair, share a packed row of the run's length."""
    num_texts = 2 * len(inputs.data.train.text_lengths)
    return min(trial_length(env), inputs.resolved.widths[0].limit // num_texts)


def _texts_to_try(task: Task[Any], inputs: Inputs, num_tokens: int) -> list[Any]:
    """The shortest and the longest of the first texts, or pairs, both cut to so many tokens."""
    texts = inputs.data.train
    first = sorted(
        (texts[index] for index in range(min(NUM_LOOKED_AT, len(texts)))), key=lambda text: len(text.input_ids)
    )
    return [task.shortened(text, num_tokens, 1) for text in (first[0], first[-1])]
