"""The trial of a run's compiled layers before its first step: one of each kind, on a batch of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from policies.compilation.layer_calls import LayerCall, calls_of, one_of_each_kind
from policies.compilation.layers import EagerFallback
from policies.compilation.proof import difference_compiled, num_compiled_again, run_both_ways
from policies.sharding import end_backward, reshard
from utils.errors import in_one_line
from utils.memory_errors import what_ran_out
from utils.seeding import rng_state, set_rng_state


def what_fails_compiled(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    run: Callable[[], Any],
    fallback: EagerFallback,
    dtype: torch.dtype,
    *,
    compares: bool = True,
    on_any: Callable[[bool], bool] = lambda found: found,
) -> str | None:
    """Why the layers of this model are not to be compiled, as a clause about the first that fails; None if none does.

    Nothing of the trial is left but compiled code. Every rank must call this.

    Args:
        model: whole; layers are set to be compiled, and nothing has been trained.
        layers: by their names, in their order in the model.
        run: a forward pass of the model over a batch.
        fallback: calls the layers.
        dtype: that products are computed in.
        compares: False: only try whether they compile.
        on_any: as of `policies.compilation.proof.difference_compiled`.
    """
    state, training = rng_state(), model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    try:
        with fallback.trying() as failures:
            for call in calls_of(one_of_each_kind(layers), run):
                had_failed = bool(failures)
                reason = _failure(model, call, dtype if compares else None, on_any)
                if failures and not had_failed:
                    failures[0] = f"{call} does not compile ({failures[0]})"
                elif reason and not failures:
                    failures.append(reason)
            return failures[0] if failures else None
    except Exception as error:
        if what_ran_out(error):
            return None  # the first step runs out, too, and reports what it held
        raise
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        model.train(training)
        reshard(model)
        set_rng_state(state)


def _failure(
    model: nn.Module, call: LayerCall, dtype: torch.dtype | None, on_any: Callable[[bool], bool]
) -> str | None:
    """What is wrong with a layer that compiles, as a clause; None for `dtype`: it is not compared."""
    try:
        if dtype is None:
            run_both_ways(call)
            return None
        difference, num_again = difference_compiled(call, dtype, on_any), num_compiled_again(call)
    except Exception as error:
        if what_ran_out(error):
            raise
        end_backward(model)
        return f"{call} could not be tried ({type(error).__name__}: {in_one_line(error)})"
    if difference is None and num_again:
        difference = "is compiled again for other tokens of the same number"
    return difference and f"{call} {difference}"
