"""Whether an exported folder gives the checkpoint's logits, up to what rounding the weights explains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpointing.exporting.blueprint import load_full, load_pretrained
from checkpointing.exporting.model_source import ModelSource
from policies.experts.forward import compute_by_products
from utils.compat import import_bitsandbytes_without_inductor
from utils.errors import ConfigError, TrainingError

# The largest difference that random rounding makes varies by less than this factor between two draws.
_SPREAD = 4.0


class LogitDifference(NamedTuple):
    """How far logits differ over a batch of random tokens."""

    largest: float
    explained: float  # the largest difference that rounding every weight to `dtype` may make
    dtype: torch.dtype
    largest_logit: float


def load_model(
    source: ModelSource,
    auto_model: Any,
    dtype: torch.dtype = torch.float32,
    say: Callable[[str], object] = lambda line: None,
) -> Any:
    """The model with the source's own tensors, an adapter unmerged, on the CPU, for inference.

    Args:
        say: called with lines to print about its files.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    if not source.is_adapter:
        return load_full(source, auto_model, dtype, say)
    import_bitsandbytes_without_inductor()
    # Here, since peft takes seconds to import: a model without an adapter does not wait for it.
    from checkpointing.exporting.adapters import load_adapter_config, put_adapter
    from policies.adapters.expert_products import use_grouped_factors

    base = load_pretrained(str(source.base), auto_model, dtype, source.rope, source.new_parts)
    adapted, _ = put_adapter(base, source, load_adapter_config(source))
    # As in training: for each token peft would add products as large as all experts to their weights.
    compute_by_products(base)
    use_grouped_factors(base)
    return adapted


def check_logits(
    source: ModelSource,
    auto_model: Any,
    folder: Path,
    *,
    merged: bool,
    dtype: torch.dtype,
    inputs_of: Callable[[Any, torch.Tensor], dict[str, Any]],
) -> LogitDifference:
    """Compare the logits of the exported folder, loaded as a user would, with those of `load_model`, both in fp32.

    How far rounding may move them is measured: each weight of the reference is moved at random, by at most what
    rounding to `dtype` could.

    Args:
        dtype: the one that weights were rounded to; fp32 if they were not.
        inputs_of: the arguments of a forward pass, by the model's config and token ids (`tasks.task.Task.inputs_of`).

    Raises:
        TrainingError: if the logits differ by more than that.
    """
    reference = load_model(source, auto_model)
    num_rows = reference.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(num_rows, (2, 16), generator=generator)
    inputs = inputs_of(reference.config, ids)
    wanted = _logits(reference, inputs)
    with torch.no_grad():
        # Rounding moves a number by at most half of eps, relative to its size.
        for parameter in reference.parameters():
            noise = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1)
            parameter.mul_(noise.mul_(torch.finfo(dtype).eps / 2).add_(1))
    explained = _SPREAD * (_logits(reference, inputs) - wanted).abs().max().item()
    del reference
    try:
        if source.is_adapter and not merged:
            import peft

            from policies.adapters.new_tokens import make_room_for_tokens

            base = load_pretrained(str(source.base), auto_model, torch.float32, source.rope, source.new_parts)
            make_room_for_tokens(base, peft.PeftConfig.from_pretrained(str(folder)))
            model: Any = peft.PeftModel.from_pretrained(base, str(folder))
        else:
            model = load_pretrained(str(folder), auto_model, torch.float32)
    except ConfigError as error:
        raise TrainingError(f"--verify: what was exported does not load: {error}") from error
    largest = (_logits(model.eval(), inputs) - wanted).abs().max().item()
    found = LogitDifference(largest, explained, dtype, wanted.abs().max().item())
    if not largest <= explained:  # false for NaN too
        raise TrainingError(
            f"--verify: logits of the exported model differ by {largest:.3g} from the checkpoint's, and rounding to "
            f"{str(dtype).removeprefix('torch.')} explains {explained:.3g}; nothing was kept"
        )
    return found


@torch.no_grad()
def _logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).logits.float()
