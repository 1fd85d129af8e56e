"""The weights of a model that are multiplied in float8, and those that are gathered in it."""

from __future__ import annotations

from typing import NamedTuple

from policies.apply_policies import Adapted
from policies.quantization.float8 import float8_linears, gathers_float8
from policies.quantization.float8_linear import FrozenFloat8Linear
from resolving.resolved import Resolved


class Float8Weights(NamedTuple):
    """Ids of parameters."""

    computed: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()  # stored in another dtype, and rounded before they are gathered


def float8_weights(adapted: Adapted, resolved: Resolved) -> Float8Weights:
    """The float8 weights of a plan's model, whose trained layers are not converted, or of a run's, sharded or not."""
    float8 = resolved.policies.float8
    if float8 is None:
        return Float8Weights()
    if resolved.config.train_config.use_peft:
        stored = (m for m in adapted.model.modules() if isinstance(m, FrozenFloat8Linear))
        return Float8Weights(frozenset(id(linear.weight) for linear in stored))
    linears = float8_linears(adapted.base, float8)
    computed = frozenset(id(linear.weight) for linear in linears.values())
    return Float8Weights(computed, computed if gathers_float8(linears, float8) else frozenset())
