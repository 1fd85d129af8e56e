"""A few of the texts that a model generated at an evaluation, as lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NUM_PRINTED = 2
_MOST_CHARACTERS = 300


def sample_lines(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Four lines for each of the samples: its place and ROUGE, prompt, reference, and what was generated."""
    lines = []
    for sample in samples:
        lines.append(f"sample | {sample['dataset']} | row {sample['row']} | rougeL {sample['rougeL']:.2f}")
        lines += [f"  {name:<9} | {_shortened(sample[name])}" for name in ("prompt", "reference", "generated")]
    return lines


def _shortened(text: str) -> str:
    """The text in one line, without the middle of a long one."""
    text = " ".join(text.split())
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
