"""The checkpointing of activations that a run's plan chose, kept in its checkpoints: a resumed run takes it again.

Recomputed layers round as others do, but compiled ones may not: two compiled graphs of one layer can differ in the last
bit. With the same choice, a run that was killed and resumed has the numbers of one that was not.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

from checkpointing.comparison import LAYOUT
from checkpointing.finding import Checkpoint
from configs.names import flag
from configs.run import RunConfig
from policies.activations.checkpointing import Checkpointing

FIELD, TILES = "activation_checkpointing", "tile_tokens"  # of state.json


class EarlierChoice(NamedTuple):
    """The choice in the checkpoint that a run goes on from."""

    checkpointing: Checkpointing
    card: str  # the name of the devices that it was made for
    obstacle: str | None  # why it does not hold for this run's ranks or settings, as a clause


def kept_values(checkpointing: Checkpointing, card: str | None) -> dict[str, Any] | None:
    """The entry of state.json, without the tiles.

    Args:
        card: the name of this run's devices; None if it could not be planned. Then the flags decided.
    """
    if card is None:
        return None
    kept = {name: value for name, value in asdict(checkpointing).items() if name != TILES}
    return {**kept, "card": card}


def earlier_choice(checkpoint: Checkpoint | None, config: RunConfig, world_size: int) -> EarlierChoice | None:
    """The choice in a checkpoint; None if it has none, as those of earlier versions.

    Args:
        config: resolved settings of this run.
    """
    values = None if checkpoint is None else checkpoint.values.get(FIELD)
    if checkpoint is None or values is None:
        return None
    there, now = checkpoint.values["settings"], config.to_dict()
    obstacle = None
    if checkpoint.values["world_size"] != world_size:
        obstacle = f"it was made for {checkpoint.values['world_size']} ranks"
    else:
        for name in sorted(LAYOUT):
            section, field = name.split(".")
            if there.get(section, {}).get(field) != now[section][field]:
                obstacle = f"it was made with another {flag(name)}"
                break
    tile_tokens = checkpoint.values.get(TILES, 0)  # earlier versions had none
    checkpointing = Checkpointing(values["mode"], values["first"], values["num_first"], tile_tokens)
    return EarlierChoice(checkpointing, values["card"], obstacle)
