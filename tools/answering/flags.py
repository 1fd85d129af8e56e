"""The flags of tools.generate and tools.chat, read before imports that take seconds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from utils.errors import ConfigError

_LEAST_TEMPERATURE = 1e-3  # logits divided by less may overflow
_MOST_TOKENS = 10**6


def generate_flags(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The flags of tools.generate.

    Raises:
        ConfigError: for a value; a wrong flag or --help ends the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="an exported folder, an adapter's folder, a run, or a checkpoint")
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument("--prompts", type=Path, help='a file: one per line, or JSON rows with "prompt" or "messages"')
    parser.add_argument("--image", type=Path, help="a file, for a model of image and text")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's turn in the chat template")
    return _with_answer_flags(parser, argv, max_new_tokens=128)


def chat_flags(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The flags of tools.chat; raises as `generate_flags`."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.chat", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a run, a checkpoint, an adapter's folder, or an exported folder")
    parser.add_argument("--system", metavar="TEXT", help="the system's turn, before all others")
    parser.add_argument(
        "--chat_template_kwargs", metavar="JSON", help="what the template reads besides, as rows of chat_dataset have"
    )
    return _with_answer_flags(parser, argv, max_new_tokens=512)


def _with_answer_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, *, max_new_tokens: int
) -> argparse.Namespace:
    """Add the flags of both, with this default, and read all."""
    parser.add_argument("--max_new_tokens", type=int, default=max_new_tokens, help=f"longest answer ({max_new_tokens})")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling at a temperature above 0")
    parser.add_argument("--base", help="the base model, if it is not where the checkpoint says")
    given = parser.parse_args(argv)
    _check_answer_flags(given)
    return given


def _check_answer_flags(given: argparse.Namespace) -> None:
    if not (given.temperature == 0 or _LEAST_TEMPERATURE <= given.temperature < math.inf):  # NaN is none of these
        raise ConfigError(
            f"--temperature: {given.temperature} is neither 0 nor a number from {_LEAST_TEMPERATURE} on; give 0 for "
            "the likeliest token each time"
        )
    if not 1 <= given.max_new_tokens <= _MOST_TOKENS:
        raise ConfigError(
            f"--max_new_tokens: {given.max_new_tokens} is not from 1 to {_MOST_TOKENS}; give such a number"
        )
    if not 0 <= given.seed < 2**63:
        raise ConfigError(f"--seed: {given.seed} is not from 0 to 2^63 - 1; give another")
