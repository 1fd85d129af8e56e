"""What a run leaves when it ends."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import finetuning
from policies import sharding
from tests.helpers.processes import ProcessGroup
from tests.helpers.resuming import flags_of


def num_left(argv: Sequence[str]) -> int:
    """How many wrapped models are alive when the process group is destroyed; 9 if there were none."""
    models: list[weakref.ref[Any]] = []
    left: list[int] = []

    class Noted(DistributedDataParallel):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            models.append(weakref.ref(self))

    def destroy() -> None:
        left.append(sum(model() is not None for model in models))
        own_destroy()

    own_destroy, dist.destroy_process_group = dist.destroy_process_group, destroy
    sharding.DistributedDataParallel = Noted
    status = finetuning.main(argv, ends_process=True)
    return left[0] if status == 0 and models else 9


def test_the_wrapped_model_is_gone_before_its_process_group(
    process_group: ProcessGroup, tiny_model: Path, tmp_path: Path
) -> None:
    process_group.train(partial(num_left, flags_of(tiny_model, tmp_path / "run", "--max_train_step", "2")), 2)
