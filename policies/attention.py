"""Attention: documents of a packed row must not see each other, and some models cannot keep them apart."""

from __future__ import annotations

import torch
from torch import nn

from configs.errors import ConfigError
from policies.sharding import reshard
from utils.labels import IGNORE_INDEX, learned_positions

PROBE_LENGTH = 24


@torch.no_grad()
def check_packing_isolates(model: nn.Module, vocab_size: int, device: torch.device) -> None:
    """Pack two documents into a row, change the first, and refuse if that changes the loss of the second.

    Position ids that restart tell transformers where documents begin, but a few models (OPT, Falcon, BLOOM and MPT in
    transformers 5.23) do not hand them to the attention mask, and leak without an error. Every rank must call this.

    Raises:
        ConfigError: where packing would leak.
    """
    generator = torch.Generator().manual_seed(0)
    first, other, second = torch.randint(0, vocab_size, (3, PROBE_LENGTH), generator=generator)
    labels = torch.cat([torch.full_like(first, IGNORE_INDEX), second])[None]
    labels[0, PROBE_LENGTH] = IGNORE_INDEX  # a first token follows nothing
    training = model.training
    model.eval()
    # Eager: compiled layers would specialise for the shape of the probe, and for two shapes turn to dynamic ones.
    with torch.compiler.set_stance("force_eager"):
        losses = [
            model(
                input_ids=torch.cat([document, second])[None].to(device),
                attention_mask=None,
                position_ids=torch.arange(PROBE_LENGTH).repeat(1, 2).to(device),
                labels=labels.to(device),
                label_positions=learned_positions(labels).to(device),
                use_cache=False,
            ).item()
            for document in (first, other)
        ]
    model.train(training)
    reshard(model)
    if abs(losses[0] - losses[1]) > 1e-6 * abs(losses[0]):
        raise ConfigError(
            "--batching_strategy: with this model the documents of a packed row would see each other; "
            "give --batching_strategy padding"
        )
