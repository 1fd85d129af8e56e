"""What a plan chose to recompute is in checkpoints, with its tiles, and is read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.earlier_choice import FIELD, TILES, earlier_choice, kept_values
from checkpointing.finding import Checkpoint
from checkpointing.state_json import MAY_BE_MISSING, WHOLE
from configs.flags import parse_flags
from policies.activations.checkpointing import Checkpointing


@pytest.mark.parametrize("choice", [Checkpointing("off", "full", 3), Checkpointing("full", tile_tokens=8192)])
def test_a_choice_is_read_as_it_was_kept(choice: Checkpointing, tmp_path: Path) -> None:
    config = parse_flags(["--model_name", "M"])
    kept = kept_values(choice, "H100")
    assert kept is not None
    assert kept.keys() == WHOLE[FIELD,]
    assert MAY_BE_MISSING[TILES,].holds(choice.tile_tokens)
    values = {"settings": config.to_dict(), "world_size": 2, FIELD: kept, TILES: choice.tile_tokens}
    found = earlier_choice(Checkpoint(tmp_path, values), config, 2)
    assert found == (choice, "H100", None)
    del values[TILES]  # as earlier versions wrote it
    found = earlier_choice(Checkpoint(tmp_path, values), config, 2)
    assert found is not None
    assert found.checkpointing == Checkpointing(choice.mode, choice.first, choice.num_first)
