"""Lines to print of a few generated texts of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NUM_PRINTED = 2
_MOST_CHARACTERS = 300
_PLACE, _TEXTS = ("dataset", "row"), ("prompt", "reference", "generated")


def sample_lines(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Four lines for each sample: its place and figures, prompt, reference, and generated text."""
    lines = []
    for sample in samples:
        figures = "".join(f" | {name} {sample[name]:.2f}" for name in sample if name not in (*_PLACE, *_TEXTS))
        lines.append(f"sample | {sample['dataset']} | row {sample['row']}{figures}")
        lines += [f"  {name:<9} | {_shortened(sample[name])}" for name in _TEXTS]
    return lines


def _shortened(text: str) -> str:
    """The text in one line, without the middle of a long one."""
    text = " ".join(text.split())
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
