"""Workarounds for other libraries."""

from __future__ import annotations

import torch
from transformers import initialization

from utils.compat import no_draws_on_meta


def test_transformers_initializes_what_has_values_and_leaves_meta_tensors_alone() -> None:
    before = dict(initialization.TORCH_INIT_FUNCTIONS)
    empty = torch.empty(3, device="meta")
    with no_draws_on_meta():
        assert initialization.normal_(empty, std=2.0) is empty
        assert empty._version == 0, "no operator has run"
        drawn = initialization.normal_(torch.zeros(3), mean=5.0, std=0.1)
        assert ((drawn > 4) & (drawn < 6)).all()
    assert before == initialization.TORCH_INIT_FUNCTIONS
