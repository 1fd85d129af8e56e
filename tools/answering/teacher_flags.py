"""The flags of the tool that writes a teacher's probabilities, which need no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def teacher_flags(argv: Sequence[str] | None, description: str | None) -> tuple[argparse.Namespace, list[str]]:
    """The flags of `tools.teacher_logprobs`, read from `argv`, or the command line, and those of the data."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.teacher_logprobs",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("teacher", type=Path, help="a model's folder, an adapter's folder, a run, or a checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    parser.add_argument("--top_k", type=int, default=16, help="tokens kept at each place (16)")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences computed at once (8)")
    parser.add_argument("--base", help="the base model, if it is not where the checkpoint says")
    return parser.parse_known_args(argv)
