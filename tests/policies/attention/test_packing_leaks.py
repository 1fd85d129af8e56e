"""The trial of packed rows, on losses made up so that the documents of a row leak in one way only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from policies.attention.packing_leaks import SMALL, check_packing_isolates
from utils.errors import ConfigError

Losses = Callable[[np.ndarray, int, int], float]
"""The loss of a token by the row's ids, where its document begins, and where it is."""


def check(loss_of: Losses, *, row_length: int = 4096, device_type: str = "cpu", weights: int = 1) -> None:
    def token_losses_of(rows: list[list[Any]]) -> torch.Tensor:
        (row,) = rows
        ids = np.concatenate([document.input_ids for document in row])
        start = len(row[0].input_ids)
        places = range(start + 1, start + len(row[1].input_ids))
        return torch.tensor([10 + loss_of(ids, start, place) for place in places], dtype=torch.float64)

    model = nn.Linear(weights, 1, bias=False, device="meta")
    check_packing_isolates(model, token_losses_of, vocab_size=100, row_length=row_length, device_type=device_type)


def from_window(ids: np.ndarray, start: int, place: int) -> float:
    """A window of 128 tokens that takes the place of the mask between documents."""
    return float(ids[max(0, place - 127) : start].sum()) * (place >= 128)


def from_state(ids: np.ndarray, start: int, place: int) -> float:
    """A state that ends with its document inside a chunk of 64 tokens, and is carried on from chunk to chunk."""
    chunk = place // 64 * 64
    return float(ids[:start].sum()) * (chunk > start)


def from_first_token(ids: np.ndarray, start: int, place: int) -> float:
    """A convolution over two tokens."""
    return 1e-3 * ids[start - 1] * (place == start + 1)


@pytest.mark.parametrize("leak", [from_window, from_state, from_first_token])
@pytest.mark.parametrize(("device_type", "weights"), [("cuda", SMALL + 1), ("cpu", SMALL)])
def test_leaks_through_windows_states_and_first_tokens_are_refused(
    leak: Losses, device_type: str, weights: int
) -> None:
    with pytest.raises(ConfigError, match="would see each other"):
        check(leak, device_type=device_type, weights=weights)


def test_a_large_model_on_a_cpu_and_short_rows_are_tried_on_fewer_tokens() -> None:
    lengths: list[int] = []

    def count(ids: np.ndarray, start: int, place: int) -> float:
        lengths.append(len(ids))
        return 0.0

    for options in ({"device_type": "cuda"}, {"weights": SMALL + 1}, {"row_length": 16}):
        check(count, **options)  # type: ignore[arg-type]
    assert list(dict.fromkeys(lengths)) == [400, 60, 16]


def test_rounding_that_later_documents_change_as_well_is_no_leak() -> None:
    def rounded_by_the_row(ids: np.ndarray, start: int, place: int) -> float:
        return 1e-2 * (ids.sum() % 17 / 17)

    check(rounded_by_the_row)


@pytest.mark.parametrize("row_length", [4, 5, 8])
def test_rows_of_a_few_tokens_are_tried_too(row_length: int) -> None:
    check(lambda ids, start, place: 0.0, row_length=row_length)
    with pytest.raises(ConfigError, match="would see each other"):
        check(lambda ids, start, place: float(ids[0]), row_length=row_length)
