"""How long rows may be: the positions that the model has, or gets by --rope_scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from configs.peft import PrefixConfig
from configs.training import TrainConfig
from policies.adapters.folder import num_virtual_tokens, saved_rope
from policies.config_overrides import ROPE_FILE, override
from policies.rope_scaling import check_can_scale, describe, factor_for, kind_to_give, scaled_values
from tasks.generation import decoder_positions
from utils.errors import ConfigError
from utils.positions import positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def scale_positions(
    train: TrainConfig, prefix_config: PrefixConfig, model_config: PreTrainedConfig, defaults: Mapping[str, int]
) -> tuple[dict[str, Any], list[str]]:
    """Stretch the positions in the model's config, as --rope_scaling or the adapter that is trained on says.

    Args:
        defaults: as of `resolve_lengths`.

    Returns:
        The values of config.json that differ now, and lines to print.

    Raises:
        ConfigError: if this model's positions cannot be stretched, or the adapter was trained with others.
    """
    of_adapter = saved_rope(train.from_peft_checkpoint) if train.from_peft_checkpoint else {}
    values, text = of_adapter, model_config.get_text_config()
    if train.rope_scaling is not None:
        values = _asked_values(
            train, model_config, _longest(train, defaults) + num_virtual_tokens(train, prefix_config)
        )
    if of_adapter and values != of_adapter:
        raise ConfigError(
            "--rope_scaling: the adapter in --from_peft_checkpoint was trained with other positions "
            f"({ROPE_FILE} in its folder); leave --rope_scaling and its flags out"
        )
    if not values:
        unneeded = (
            f"rope_scaling: rows of {_longest(train, defaults):,} tokens need none, so positions stay as they are"
        )
        return {}, [unneeded] if train.rope_scaling is not None else []
    before = positions_of(text)
    override(model_config, values)
    scaled = f"rope: {describe(text)}, {positions_of(text):,} positions instead of {before:,}"
    return values, [scaled if train.rope_scaling is not None else f"{scaled}, as the adapter was trained"]


def _asked_values(train: TrainConfig, model_config: PreTrainedConfig, longest: int) -> dict[str, Any]:
    """What the flags ask for; nothing if they leave the factor open and rows have positions without one."""
    assert train.rope_scaling is not None
    check_can_scale(model_config, train.rope_scaling, train.rope_original_positions)
    positions = train.rope_original_positions or positions_of(model_config.get_text_config())
    assert positions is not None  # else it cannot be scaled
    factor = train.rope_factor or factor_for(positions, longest)
    if factor <= 1:
        return {}
    return scaled_values(model_config, train.rope_scaling, factor, train.rope_original_positions)


def _longest(train: TrainConfig, defaults: Mapping[str, int]) -> int:
    return max(getattr(train, name) or default for name, default in defaults.items())


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
            remedy = _longer_rows(train, model_config, length + prefix)
            length, note = _all_positions(name, asked, positions, prefix, remedy)
            notes.append(note)
        lengths.append(length)
    return tuple(lengths), notes


def _longer_rows(train: TrainConfig, model_config: PreTrainedConfig, wanted: int) -> str:
    """The flags that would give a row its positions, as a clause; empty if none would."""
    text = model_config.get_text_config()
    kind, positions = kind_to_give(text), positions_of(text)
    if kind is None or positions is None or (train.from_peft_checkpoint and saved_rope(train.from_peft_checkpoint)):
        return ""
    if train.rope_factor is not None:  # positions are those with it
        factor = math.ceil(train.rope_factor * wanted / positions)
        return f", or --rope_factor {factor}"
    return f", or --rope_scaling {kind} --rope_factor {factor_for(positions, wanted)}"


def _all_positions(name: str, asked: int | None, positions: int, prefix: int, remedy: str) -> tuple[int, str]:
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
            f"(max_position_embeddings{taken}); give at most {positions}{remedy}"
        )
    return positions, f"{name}: {positions}, all that this model has positions for{taken}"


def num_positions(train: TrainConfig, prefix_config: PrefixConfig, model_config: PreTrainedConfig) -> int | None:
    """Tokens that the model's decoder has positions for, less a prefix; None if it has no limit."""
    positions = decoder_positions(model_config)
    return None if positions is None else positions - num_virtual_tokens(train, prefix_config)
