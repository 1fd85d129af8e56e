"""The length of the longest row, within the positions that the model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from configs.peft import PrefixConfig
from configs.training import TrainConfig
from policies.adapters.folder import num_virtual_tokens
from tasks.generation import decoder_positions
from utils.errors import ConfigError
from utils.positions import positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def resolve_lengths(
    train: TrainConfig, prefix_config: PrefixConfig, model_config: PreTrainedConfig, defaults: Mapping[str, int]
) -> tuple[tuple[int, ...], list[str]]:
    """Tokens of the longest row, and of the longest target if targets are apart; and lines to print.

    A default shrinks to the positions that the model has.

    Args:
        defaults: of the settings that the task has for them (`tasks.task.Task.LENGTHS`).

    Raises:
        ConfigError: if a length was asked for that the model does not have.
    """
    prefix = num_virtual_tokens(train, prefix_config)
    positions = positions_of(model_config.get_text_config())
    lengths, notes = [], []
    for name, default in defaults.items():
        asked = getattr(train, name)
        length = asked or default
        if positions is not None and length + prefix > positions:
            length, note = _all_positions(name, asked, positions, prefix)
            notes.append(note)
        lengths.append(length)
    return tuple(lengths), notes


def _all_positions(name: str, asked: int | None, positions: int, prefix: int) -> tuple[int, str]:
    if prefix >= positions:
        raise ConfigError(
            f"--num_virtual_tokens: a prefix of {prefix} leaves no room in the {positions} positions of this model; "
            "give fewer"
        )
    positions -= prefix
    taken = f", less the prefix's {prefix}" if prefix else ""
    if asked is not None:
        raise ConfigError(
            f"--{name}: {asked} is more than the {positions} positions of this model "
            f"(max_position_embeddings{taken}); give at most {positions}"
        )
    return positions, f"{name}: {positions}, all that this model has positions for{taken}"


def num_positions(train: TrainConfig, prefix_config: PrefixConfig, model_config: PreTrainedConfig) -> int | None:
    """Tokens that the model's decoder has positions for, less a prefix; None if it has no limit."""
    positions = decoder_positions(model_config)
    return None if positions is None else positions - num_virtual_tokens(train, prefix_config)
