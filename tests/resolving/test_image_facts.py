"""The facts of images that plans are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from data.batches.counts import ImageTokens
from resolving.data_facts import _image_tokens


@dataclass
class Samples:
    """Three samples: of one image, of two, of none."""

    image_sizes: Any
    num_image_tokens: Any
    lengths: Any


def test_one_size_has_as_many_pairs_and_the_largest_is_known() -> None:
    samples: Any = Samples(np.array([36, 4, 4]), np.array([36, 8, 0]), np.array([50, 30, 100]))
    found = _image_tokens(samples, None)
    assert found == ImageTokens(0.36, 36, round((36**2 + 2 * 4**2) / 44))
    assert 44 / found.typical * found.typical**2 == pytest.approx(36**2 + 2 * 4**2, rel=0.02)


def test_data_without_images_has_none_of_their_tokens() -> None:
    samples: Any = Samples(np.zeros(0, dtype=np.int64), np.array([0, 0]), np.array([5, 6]))
    assert _image_tokens(samples, None) == ImageTokens(0.0, 1, 1)
    samples.num_image_tokens = None
    assert _image_tokens(samples, None) is None
