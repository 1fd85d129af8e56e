"""The flags that say how an answer is written."""

from __future__ import annotations

import argparse
import math

from utils.errors import ConfigError

_LEAST_TEMPERATURE = 1e-3  # logits divided by less may overflow
_MOST_TOKENS = 10**6


def add_answer_flags(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Add the flags.

    Args:
        max_new_tokens: the default.
    """
    parser.add_argument("--max_new_tokens", type=int, default=max_new_tokens, help=f"longest answer ({max_new_tokens})")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling at a temperature above 0")
    parser.add_argument("--base", help="the base model, if it is not where the checkpoint says")


def check_answer_flags(given: argparse.Namespace) -> None:
    """Refuse values that cannot hold.

    Raises:
        ConfigError: with the flag.
    """
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
