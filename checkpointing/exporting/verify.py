"""Whether an exported folder says what the checkpoint says: logits of both, and how far rounding may part them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch

from checkpointing.exporting.adapters import load_adapter_config, put_adapter
from checkpointing.exporting.blueprint import load_full, load_pretrained
from checkpointing.exporting.sources import Source
from utils.errors import ConfigError, TrainingError

# A rounded model differs from the exact one at random; its largest difference varies less than this between two draws.
_SPREAD = 4.0


class Difference(NamedTuple):
    """Of logits, over a batch of random tokens."""

    largest: float
    explained: float  # by rounding every weight to `dtype`
    dtype: torch.dtype
    largest_logit: float


def load_model(source: Source, dtype: torch.dtype = torch.float32) -> Any:
    """The model with the source's own tensors, an adapter unmerged, on the CPU, for inference.

    Raises:
        ConfigError: where it cannot be loaded.
    """
    if not source.is_adapter:
        return load_full(source, dtype)
    return put_adapter(load_pretrained(str(source.base), dtype), source, load_adapter_config(source))[0]


def check_logits(source: Source, folder: Path, *, merged: bool, dtype: torch.dtype) -> Difference:
    """Compare the logits of the exported folder, loaded as a user would, with those of `load_model`, both in fp32.

    How far rounding to `dtype` may part them is found by trying: the reference again, every weight off by as much as
    rounding may put it off, at random.

    Args:
        dtype: what weights were rounded to; fp32 where they were not.

    Raises:
        TrainingError: where they differ by more than that.
    """
    reference = load_model(source)
    num_rows = reference.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(num_rows, (2, 16), generator=generator)
    wanted = _logits(reference, ids)
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1)
            parameter.mul_(noise.mul_(torch.finfo(dtype).eps / 2).add_(1))
    explained = _SPREAD * (_logits(reference, ids) - wanted).abs().max().item()
    del reference
    try:
        if source.is_adapter and not merged:
            model: Any = peft.PeftModel.from_pretrained(load_pretrained(str(source.base), torch.float32), str(folder))
        else:
            model = load_pretrained(str(folder), torch.float32)
    except ConfigError as error:
        raise TrainingError(f"--verify: what was exported does not load: {error}") from error
    largest = (_logits(model.eval(), ids) - wanted).abs().max().item()
    found = Difference(largest, explained, dtype, wanted.abs().max().item())
    if not largest <= explained:  # NaN is no agreement either
        raise TrainingError(
            f"--verify: logits of the exported model differ by {largest:.3g} from the checkpoint's, and rounding to "
            f"{str(dtype).removeprefix('torch.')} explains {explained:.3g}; nothing was kept"
        )
    return found


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits.float()
